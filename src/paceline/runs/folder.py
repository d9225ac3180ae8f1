"""The run folder: the files of a run, its lock, and whether it finished."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shlex
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from paceline.config import SCHEMA, RunConfig, from_dict, is_simulated, read_toml, to_dict, to_toml
from paceline.errors import RunFailed, UserError
from paceline.runs.arrival_log import require_same_config
from paceline.runs.events import RESULT_TYPES
from paceline.system.strict_json import escape_texts, from_json, is_text, require_types, seal, to_json, unseal

LOCK_RETRY_SECONDS = 0.05
ALL_GONE = "all workers are gone"
NOT_COME = "not all workers came in time"
TIME_IS_UP = "time is up"  # reasons for an early end, as the result states them
_CHECK = b'# crc32 = "'  # the first line of config.toml: a checksum of the others


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
        self.read_token_file = path / "read-token"

    @property
    def has_log(self) -> bool:
        """Whether the run has a log to resume from."""
        return self.arrivals_file.exists() and self.arrivals_file.stat().st_size > 0

    @staticmethod
    def create(config: RunConfig) -> RunFolder:
        """Create a new folder with the resolved config and the fault table; refuse one that exists."""
        folder = RunFolder(Path(config.runs) / (config.name or free_name(config)))
        try:
            folder.path.mkdir(parents=True)
            write_atomically(folder.config_file, _config_text(config, _heading()))
            if config.faults is not None:
                shutil.copyfile(config.faults, folder.faults_file)
        except FileExistsError:
            hint = f"choose another --name, remove it, or 'paceline resume {folder.path}'"
            raise UserError(f"{folder.path} exists already: {hint}") from None
        except OSError as error:
            raise UserError(f"run folder {folder.path} cannot be written: {error.strerror}; try --runs DIR") from None
        except KeyboardInterrupt:
            folder.discard_unstarted()
            raise
        return folder

    @staticmethod
    def open(path: Path) -> RunFolder:
        """Open an existing run; raise UserError for any other path."""
        folder = RunFolder(path)
        if not folder.config_file.is_file():
            what = "has no config.toml" if path.is_dir() else "does not exist"
            above = path if any(path.glob("*/config.toml")) else path.parent
            raise UserError(f"{path} is not a run folder: it {what}; 'paceline list {above}' shows what is there")
        return folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder, so that no other command trains into it."""
        with self.config_file.open("rb") as lock:
            if not _try_lock(lock, fcntl.LOCK_EX):
                time.sleep(LOCK_RETRY_SECONDS)  # another process may hold it briefly in is_locked
                if not _try_lock(lock, fcntl.LOCK_EX):
                    raise UserError(f"{self.path} is still being trained by another command: stop that one first")
            yield

    def is_locked(self) -> bool:
        """Return whether a command is training into this folder now."""
        with self.config_file.open("rb") as lock:
            return not _try_lock(lock, fcntl.LOCK_SH)

    def resume_hint(self, config: RunConfig) -> str:
        """Return how to continue after an early end."""
        if is_simulated(config):
            return "simulate it again: the result is the same"
        try:
            verb = "server --resume" if self.served().get("by_hand") else "resume"
        except UserError as error:
            return str(error)
        return f"'paceline {verb} {self.path}' continues from there"

    def served(self) -> dict[str, Any]:
        """Return how the run was last served; empty if it never was."""
        try:
            found = unseal(self.server_file.read_bytes())
            require_types(found, {"address": is_text, "by_hand": lambda value: isinstance(value, bool)})
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.server_file} cannot be read ({error}): remove it, and give --listen again"
            ) from None
        return found

    def config(self) -> RunConfig:
        """Return the resolved config this run was started with; refuse one that the log beside it does not know."""
        config = from_dict({**to_dict(RunConfig()), **read_toml(self.config_file)})
        require_same_config(self.arrivals_file, config)
        first, _, rest = self.config_file.read_bytes().partition(b"\n")
        if first.startswith(_CHECK) and first != _check_line(rest):  # older versions wrote none
            why = "was changed since the run wrote it: undo that, or remove its first line"
            raise UserError(f"{self.config_file} {why} to keep the change")
        return config

    def update_config(self, config: RunConfig) -> None:
        """Overwrite the config with values learned at the start; in place, because the file is also the lock."""
        heading = "".join(f"# {name} = {to_json(text)}\n" for name, text in self.origin().items())
        with self.config_file.open("r+b") as file:
            file.write(_config_text(config, heading))
            file.truncate()

    def origin(self) -> dict[str, str]:
        """Return when (`made`) and by which `command` the run was created, from the comments in its config."""
        found: dict[str, str] = {}
        with self.config_file.open(encoding="utf-8", errors="replace") as file:
            for line in itertools.takewhile(lambda line: line.startswith("# "), file):
                name, _, text = line[2:].partition(" = ")
                with contextlib.suppress(ValueError):
                    found[name] = str(from_json(text))
        found.pop("crc32", None)
        return found

    def result(self) -> dict[str, Any] | None:
        """Return the result, or None if there is none yet."""
        try:
            result = unseal(self.result_file.read_bytes())
            require_types(result, RESULT_TYPES)
            if not is_text(result.get("status")):
                raise ValueError("it has no status")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.result_file} cannot be read ({error}): the run folder is damaged") from None
        found: dict[str, Any] = escape_texts(result)
        return found

    def require_unfinished(self, recovery: str = "log") -> None:
        """Refuse a run that ended: it cannot be resumed, but for a diverged one, from before its divergence."""
        result = self.result()
        if result is None or result["status"] == "stopped":
            return
        end, diverged = f"{result['status']} after {result.get('updates')} updates", result["status"] == "diverged"
        if diverged and recovery == "log":
            ways = (
                "--recovery checkpoint goes back to its newest checkpoint, --recovery skip-batch also skips the batch"
            )
            raise UserError(f"{self.path} is {end}: {ways}")
        if not diverged:
            raise UserError(f"{self.path} is {end}: there is nothing to resume")

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the result. It is the last file written: a folder with a result is a run that ended."""
        write_atomically(self.result_file, (to_json(seal(result), indent=2) + "\n").encode())

    def discard_unstarted(self) -> None:
        """Remove the folder if nothing has happened in it yet."""
        if not self.events_file.exists() and not self.arrivals_file.exists():
            ours = (self.config_file, self.script_file, self.frozen_file, self.faults_file)
            for path in (*ours, self.token_file, self.read_token_file, *self.path.glob("tls/*.pem")):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # keep a folder that holds other files
                if (self.path / "tls").is_dir():
                    (self.path / "tls").rmdir()
                self.path.rmdir()
                self.path.parent.rmdir()


def _config_text(config: RunConfig, heading: str) -> bytes:
    text = f"{heading}schema = {SCHEMA}\n{to_toml(config)}".encode()
    return _check_line(text) + b"\n" + text


def _check_line(text: bytes) -> bytes:
    return b'%s%08x"' % (_CHECK, zlib.crc32(text))


def _heading() -> str:
    """Return comments that name the origin of a run; not settings, so that equal runs have equal settings."""
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    command = " ".join([name, *map(shlex.quote, sys.argv[1:])])
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return f"# made = {to_json(made)}\n# command = {to_json(command)}\n"


def _try_lock(lock: BinaryIO, how: int) -> bool:
    """Take a lock, held until the file is closed; return False if another process holds it."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def free_name(config: RunConfig) -> str:
    """Return strategy-model-workers-time, with a number appended if that name is taken."""
    what = config.model if config.task is None else config.task.rpartition(":")[2]
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = f"{config.strategy.replace(':', '')}-{what}-{config.workers}w-{stamp}"
    name, number = base, 1
    while (Path(config.runs) / name).exists():
        number += 1
        name = f"{base}-{number}"
    return name


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file, sync and rename, so that readers see the old file or the new one."""
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
    """Lock a new folder; remove it if the run fails before it starts."""
    with folder.locked():
        try:
            yield
        except BaseException:
            folder.discard_unstarted()
            raise


def require_survivors(result: dict[str, Any], folder: RunFolder) -> None:
    """Raise RunFailed, with a hint, for a run that ended because no workers were left."""
    if result["status"] == "stopped" and result["reason"] in (ALL_GONE, NOT_COME):
        raise RunFailed(f"{result['reason']} at update {result['updates']}: {folder.resume_hint(folder.config())}")
