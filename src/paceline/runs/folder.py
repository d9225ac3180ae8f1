"""The run folder: what a run leaves, and how to tell a finished one from a half-written one."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from paceline.config import RunConfig, from_dict, is_simulated, read_toml, to_dict, to_toml
from paceline.errors import RunFailed, UserError

SCHEMA = 1
SCRIPT = "script"
GLANCE_SECONDS = 0.05
ALL_GONE = "all workers are gone"
NOT_COME = "not all workers came in time"
TIME_IS_UP = "time is up"
"""Reasons for an early end, as the result gives them."""


class RunFolder:
    """`runs/NAME/` and the files in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.events_file = path / "events.jsonl"
        self.arrivals_file = path / "arrivals.log"
        self.result_file = path / "result.json"
        self.weights_file = path / "weights.safetensors"
        self.live_weights_file = path / "live.safetensors"
        self.script_file = path / "script.json"
        self.frozen_file = path / "frozen.safetensors"
        self.checkpoints = path / "checkpoints"
        self.best_file = self.checkpoints / "best.safetensors"
        self.snapshots = path / "snapshots"
        self.faults_file = path / "faults.toml"
        self.requests = path / "requests"
        self.server_file = path / "server.json"
        self.token_file = path / "token"

    @property
    def has_log(self) -> bool:
        """Whether there is anything to go on from."""
        return self.arrivals_file.exists() and self.arrivals_file.stat().st_size > 0

    @staticmethod
    def create(config: RunConfig) -> RunFolder:
        """Make a new folder with the resolved config in it, and its faults; one that exists is never touched."""
        name = config.name or free_name(config)
        if not name or "/" in name or name in (".", ".."):
            raise UserError(f"--name '{name}' is not a folder name: use letters, digits, dots and dashes")
        folder = RunFolder(Path(config.runs) / name)
        try:
            folder.path.mkdir(parents=True)
            write_atomically(folder.config_file, _config_text(config, _heading()))
            if config.faults is not None:
                shutil.copyfile(config.faults, folder.faults_file)
        except FileExistsError:
            raise UserError(
                f"{folder.path} exists already: choose another --name, remove it, or 'paceline resume {folder.path}'"
            ) from None
        except OSError as error:
            raise UserError(f"run folder {folder.path} cannot be written: {error.strerror}; try --runs DIR") from None
        except KeyboardInterrupt:
            folder.discard_unstarted()
            raise
        return folder

    @staticmethod
    def open(path: Path) -> RunFolder:
        """An existing run; anything else is a clear error."""
        folder = RunFolder(path)
        if not folder.config_file.is_file():
            what = "has no config.toml" if path.is_dir() else "does not exist"
            above = path if any(path.glob("*/config.toml")) else path.parent
            raise UserError(f"{path} is not a run folder: it {what}; 'paceline list {above}' shows what is there")
        return folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands from training into this folder meanwhile."""
        with self.config_file.open("rb") as lock:
            if not _take(lock, fcntl.LOCK_EX):
                time.sleep(GLANCE_SECONDS)  # perhaps someone only looked whether it is taken
                if not _take(lock, fcntl.LOCK_EX):
                    raise UserError(f"{self.path} is still being trained by another command: stop that one first")
            yield

    def is_locked(self) -> bool:
        """Whether a command is training into this folder now."""
        with self.config_file.open("rb") as lock:
            return not _take(lock, fcntl.LOCK_SH)

    def way_on(self, config: RunConfig) -> str:
        """What to do after an early end."""
        if is_simulated(config):
            return "simulate again: it will come out the same"
        verb = "server --resume" if self.served().get("by_hand") else "resume"
        return f"'paceline {verb} {self.path}' goes on from there"

    def served(self) -> dict[str, Any]:
        """How the run was served the last time; nothing where it was not."""
        try:
            found: dict[str, Any] = json.loads(self.server_file.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def config(self) -> RunConfig:
        """The resolved config this run was started with."""
        return from_dict({**to_dict(RunConfig()), **read_toml(self.config_file)})

    def settle_config(self, config: RunConfig) -> None:
        """Write the config over with what was only learned at the start; in place, since the file is the lock too."""
        heading = "".join(f"# {name} = {json.dumps(text)}\n" for name, text in self.origin().items())
        with self.config_file.open("r+b") as file:
            file.write(_config_text(config, heading))
            file.truncate()

    def origin(self) -> dict[str, str]:
        """When the run was `made` and by which `command`, as far as the head of its config says."""
        with self.config_file.open(encoding="utf-8", errors="replace") as file:
            lines = [
                line[2:].partition(" = ") for line in itertools.takewhile(lambda line: line.startswith("# "), file)
            ]
        found = {}
        for name, _, text in lines:
            with contextlib.suppress(ValueError):
                found[name] = str(json.loads(text))
        return found

    def result(self) -> dict[str, Any] | None:
        """The result, or None while there is none."""
        try:
            loaded: dict[str, Any] = json.loads(self.result_file.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.result_file} cannot be read ({error}): the run folder is damaged") from None
        return loaded

    def require_unfinished(self) -> None:
        """A run that has ended by itself cannot go on."""
        result = self.result()
        if result is not None and result["status"] != "stopped":
            how = f"{result['status']} after {result['updates']} updates"
            raise UserError(f"{self.path} is {how}: there is nothing to resume")

    def write_result(self, result: dict[str, Any]) -> None:
        """Last of all: a folder with a result is a run that ended."""
        write_atomically(self.result_file, (json.dumps(result, indent=2) + "\n").encode())

    def discard_unstarted(self) -> None:
        """Remove a folder in which nothing has happened yet."""
        if not self.events_file.exists() and not self.arrivals_file.exists():
            self.config_file.unlink(missing_ok=True)
            self.script_file.unlink(missing_ok=True)
            self.frozen_file.unlink(missing_ok=True)
            self.faults_file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something else lies there: it stays
                self.path.rmdir()
                self.path.parent.rmdir()


def _config_text(config: RunConfig, heading: str) -> bytes:
    return f"{heading}schema = {SCHEMA}\n{to_toml(config)}".encode()


def _heading() -> str:
    """Comments that say where a run comes from: not settings, so that equal runs have equal ones."""
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    command = " ".join([name, *map(shlex.quote, sys.argv[1:])])
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return f"# made = {json.dumps(made)}\n# command = {json.dumps(command)}\n"


def _take(lock: BinaryIO, how: int) -> bool:
    """Take a lock that goes when the file is closed, unless someone has it."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_script(config: RunConfig) -> bool:
    """Whether the run was a user's own loop, whose pushes only that script can make."""
    return config.task is not None and config.task.startswith(f"{SCRIPT}:")


def free_name(config: RunConfig) -> str:
    """strategy-model-workers-time, with a number behind it when that is taken."""
    what = config.model if config.task is None else config.task.rpartition(":")[2]
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = f"{config.strategy.replace(':', '')}-{what}-{config.workers}w-{stamp}"
    name, number = base, 1
    while (Path(config.runs) / name).exists():
        number += 1
        name = f"{base}-{number}"
    return name


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary name beside `path`, sync, rename: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # a signal too
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def holding(folder: RunFolder) -> Iterator[None]:
    """A new folder is ours alone; a run that fails before it starts leaves none behind."""
    with folder.locked():
        try:
            yield
        except BaseException:
            folder.discard_unstarted()
            raise


def require_survivors(result: dict[str, Any], folder: RunFolder) -> None:
    """A run that ended because nobody was left is a failure, with a way on."""
    if result["status"] == "stopped" and result["reason"] in (ALL_GONE, NOT_COME):
        raise RunFailed(f"{result['reason']} at update {result['updates']}: {folder.way_on(folder.config())}")
