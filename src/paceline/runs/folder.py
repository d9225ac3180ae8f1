"""The run folder: the files of a run, its lock, and whether it finished."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import shlex
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config import SCHEMA, RunConfig, from_dict, is_script, is_simulated, read_toml, to_dict, to_toml
from paceline.errors import DiskError, RunFailed, UserError
from paceline.runs.arrival_log import has_push, require_same_config
from paceline.runs.durable_files import opened_folder, sync_folder, write_atomically
from paceline.runs.events import RESULT_TYPES
from paceline.system.sealed_weights import read_weights
from paceline.system.strict_json import escape_texts, from_json, is_text, require_types, seal, to_json, unseal
from paceline.system.terminal import printable
from paceline.system.user_key import is_signed, key_file, sign

LOCK_RETRY_SECONDS = 0.05
CHECKPOINT_DIGITS = 12  # of a version, in the name of a checkpoint
ALL_GONE = "all workers are gone"
NOT_COME = "not all workers came in time"
TIME_IS_UP = "time is up"  # reasons for an early end, as the result states them
LOOPS_ENDED = "every worker ended its loop"
ONE_ENDED = "a worker ended its loop"
RAISED = "exception in "  # begins the reason of a run that an exception in a user's code has ended
_CHECK = b'# crc32 = "'  # the first line of config.toml: a checksum of the others
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_DISK_ERRORS = (*_NO_ROOM, errno.EROFS, errno.EIO)


class RunFolder:
    """`runs/NAME/` and the files in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.events_file = path / "events.jsonl"
        self.arrivals_file = path / "arrivals.log"
        self.result_file = path / "result.json"
        self.initial_file = path / "initial.safetensors"
        self.weights_file = path / "weights.safetensors"
        self.live_weights_file = path / "live.safetensors"
        self.script_file = path / "script.json"
        self.frozen_file = path / "frozen.safetensors"
        self.optimizer_file = path / "optimizer.safetensors"
        self.streams = path / "streams"
        self.checkpoints = path / "checkpoints"
        self.best_file = self.checkpoints / "best.safetensors"
        self.snapshots = path / "snapshots"
        self.faults_file = path / "faults.toml"
        self.requests = path / "requests"
        self.server_file = path / "server.json"
        self.token_file = path / "token"
        self.read_token_file = path / "read-token"
        self.owner_file = path / "owner"
        self.copy_state_file = path / "mirror.json"

    @property
    def has_log(self) -> bool:
        """Whether the run has a log to resume from."""
        return self.arrivals_file.exists() and self.arrivals_file.stat().st_size > 0

    @staticmethod
    def create(config: RunConfig) -> RunFolder:
        """Create a new folder with the resolved config and the fault table; refuse one that exists."""
        folder = RunFolder(Path(config.runs) / (config.name or free_name(config)))
        try:  # from here on, an interrupt may find it: also one inside mkdir, which has made it then
            folder.path.mkdir(parents=True)
            write_atomically(folder.config_file, _config_text(config, _heading()))
            sync_folder(folder.path.parent)
            if config.faults is not None:
                shutil.copyfile(config.faults, folder.faults_file)
            if config.weights is not None:
                write_atomically(folder.initial_file, read_weights(Path(config.weights), config.weights_sha256))
            folder.sign()
        except FileExistsError:
            raise _exists_already(folder) from None
        except OSError as error:
            folder.discard_unstarted()
            raise _not_created(folder.path, error) from None
        except (KeyboardInterrupt, UserError):
            folder.discard_unstarted()
            raise
        return folder

    @staticmethod
    def open(path: Path) -> RunFolder:
        """Open an existing run; raise UserError for any other path."""
        folder = RunFolder(path)
        if not folder.config_file.is_file():
            if (path.parent / folder.config_file.name).is_file():
                raise UserError(f"{path} is in a run folder, but is none: give {path.parent}")
            what = "has no config.toml" if path.is_dir() else "is a file" if path.exists() else "does not exist"
            above = path if any(path.glob("*/config.toml")) else path.parent
            raise UserError(f"{path} is not a run folder: it {what}; 'paceline list {above}' shows what is there")
        return folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder, so that no other command trains into it; a full disk then ends in one line."""
        with opened_folder(self.path) as lock:
            if not _try_lock(lock, fcntl.LOCK_EX):
                time.sleep(LOCK_RETRY_SECONDS)  # another process may hold it briefly in is_locked
                if not _try_lock(lock, fcntl.LOCK_EX):
                    raise UserError(f"{self.path} is still being trained by another command: stop that one first")
            with self.naming_disk_errors():
                yield

    def is_locked(self) -> bool:
        """Return whether a command is training into this folder now."""
        with opened_folder(self.path) as lock:
            return not _try_lock(lock, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def naming_disk_errors(self) -> Iterator[None]:
        """Raise the error of a full or read-only disk as one line that names this folder and the way on."""
        try:
            yield
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            raise self.disk_error(error) from None

    def disk_error(self, error: OSError, update: int | None = None) -> DiskError:
        """Return the one line for a disk that is full, read-only or broken; the run had reached `update`."""
        what, remedy = f"writing failed ({error.strerror or error})", "check the disk"
        if error.errno in _NO_ROOM:
            what, remedy = "no space is left", "make room"
        elif error.errno in _NOT_WRITABLE:
            remedy = "make it writable"
        where = f"{self.path} at update {update}" if update is not None else str(self.path)
        way_on = "start it again"
        with contextlib.suppress(OSError, UserError):
            if not self.is_unstarted():
                way_on = self.resume_hint(self.config())
        return DiskError(f"{what} in {where}: {remedy}, then {way_on}")

    def resume_hint(self, config: RunConfig) -> str:
        """Return how to continue after an early end."""
        if is_simulated(config):
            return "simulate it again: the result is the same"
        try:
            verb = "server --resume" if self.served().get("by_hand") else "resume"
        except UserError as error:
            return str(error)
        return f"'paceline {verb} {self.path}' continues from there"

    def stopped_hint(self, result: dict[str, Any] | None) -> str:
        """Return where a mistake in the user's code has stopped the run, and how it goes on."""
        where = f" at update {result['updates']}" if result is not None else ""
        return f"the run stopped{where}; once the code is mended, {self.resume_hint(self.config())}"

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
        values = read_toml(self.config_file)
        first, _, rest = self.config_file.read_bytes().partition(b"\n")
        if first.startswith(_CHECK) and first != _check_line(rest):  # older versions wrote none
            why = "was changed since the run wrote it: undo that, or remove its first line"
            raise UserError(f"{self.config_file} {why} to keep the change")
        before = {"train_score": "all"}  # what a folder without this setting did
        config = from_dict({**to_dict(RunConfig()), **before, **values})
        require_same_config(self.arrivals_file, config)
        return config

    def update_config(self, config: RunConfig) -> None:
        """Replace the config by one with values learned at the start."""
        heading = "".join(f"# {name} = {to_json(text)}\n" for name, text in self.origin().items())
        write_atomically(self.config_file, _config_text(config, heading))

    def sign(self) -> None:
        """Mark the folder as this user's, if it names code to import; a user without a key needs --trust later."""
        config = self.config()
        if self._named_code(config, trackers=True, mirror=True):
            with contextlib.suppress(OSError, RuntimeError):
                signature = sign(self._signed(config))
                write_atomically(self.owner_file, f"{signature}\n".encode())

    def require_trust(self, trackers: bool, mirror: bool = False) -> None:
        """Refuse a folder of somebody else that names code to import: a task, a script or (if asked) `trackers`.

        With `mirror`, also one that names a store to copy the run to, with the user's credentials.
        """
        config = self.config()
        code = self._named_code(config, trackers, mirror)
        if not code:
            return
        try:
            signature = self.owner_file.read_text(errors="replace").strip() if self.owner_file.exists() else ""
            if is_signed(self._signed(config), signature):
                return
            found = f"was not signed with your key {key_file()}"
        except FileNotFoundError:
            found = f"is not signed by you, who have no key {key_file()}"
        except (OSError, RuntimeError) as error:
            found = f"cannot be compared with your key ({getattr(error, 'strerror', None) or error})"
        what = printable(" and ".join(code), 400)
        raise UserError(
            f"{self.path} {found}, and would {what}: add --trust if you trust {'this' if mirror else 'this code'}"
        )

    def _named_code(self, config: RunConfig, trackers: bool, mirror: bool) -> list[str]:
        """Return what going on with the run would import, execute or upload, one phrase each."""
        found = []
        if is_script(config):
            found.append(f"run the script that {self.script_file.name} names{self._script_words()}")
        elif config.task is not None:
            found.append(_import_phrase("task", config.task))
        names = [name for name in config.track or [] if trackers and ":" in name]
        found += [_import_phrase("tracker", name) for name in names]
        return found + ([f"copy the run to {config.mirror}"] if mirror and config.mirror not in (None, "none") else [])

    def _script_words(self) -> str:
        try:
            fields = unseal(self.script_file.read_text())
            return f", {Path(str(fields['cwd']), str(fields['command'][0]))}"
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def _signed(self, config: RunConfig) -> bytes:
        """Return what a signature covers: all that decides which code is imported."""
        script = self.script_file.read_bytes() if self.script_file.exists() else b""
        mirror = [config.mirror] if config.mirror is not None else []
        return to_json(["run folder", config.task, config.track, script.hex(), *mirror]).encode()

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
            remedy = f"remove this file, then {self.resume_hint(self.config())}"
            raise UserError(
                f"{self.result_file} cannot be read ({error}): the run folder is damaged; {remedy}"
            ) from None
        found: dict[str, Any] = escape_texts(result)
        return found

    def require_unfinished(self, recovery: str = "log") -> None:
        """Refuse a run that ended, but for a diverged one, from before its divergence; or that has not begun."""
        result = self.result()
        if result is None and not self.has_log and not self.checkpoints.exists():
            what = f"{self.path} was ended before its first step: nothing was trained, and there is nothing to resume"
            raise UserError(f"{what}; remove this folder, and start the run again with the same command")
        if result is None or result["status"] == "stopped":
            return
        end, diverged = f"{result['status']} after {result.get('updates')} updates", result["status"] == "diverged"
        if diverged and recovery == "log":
            back = "--recovery checkpoint goes back to its newest checkpoint"
            raise UserError(f"{self.path} is {end}: {back}, --recovery skip-batch also skips the batch")
        if not diverged:
            raise UserError(f"{self.path} is {end}: there is nothing to resume")

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the result. It is the last file written: a folder with a result is a run that ended."""
        write_atomically(self.result_file, (to_json(seal(result), indent=2) + "\n").encode())

    def discard_unstarted(self) -> None:
        """Remove the folder if nothing has happened in it yet and it holds only files of ours."""
        kept = self.initial_file, self.frozen_file, self.optimizer_file, self.streams
        copied = self.copy_state_file, self.path / "mirror.log"
        made = (self.config_file, self.script_file, *kept, self.faults_file, self.owner_file, *copied)
        served = (self.server_file, self.token_file, self.read_token_file, self.path / "tls")
        names = {path.name for path in (*made, *served, self.events_file, self.arrivals_file)}
        with contextlib.suppress(OSError):
            if self.is_unstarted() and {path.name for path in self.path.iterdir()} <= names:
                shutil.rmtree(self.path)
                self.path.parent.rmdir()

    def remove_copy_state(self) -> None:
        """Forget the copy in a store of a run that never started."""
        if self.is_unstarted():
            self.copy_state_file.unlink(missing_ok=True)

    def is_unstarted(self) -> bool:
        """Whether nothing was trained: no push was logged yet."""
        return not has_push(self.arrivals_file)

    def sweep(self) -> None:
        """Remove unfinished files and checkpoints that a killed process left; call it with the folder locked."""
        for place in (self.path, self.checkpoints, self.snapshots, self.streams):
            for path in place.glob(".*.tmp"):
                pid = path.name.split(".")[-2]
                if pid.isdecimal() and len(pid) < CHECKPOINT_DIGITS and Path("/proc", pid).exists():
                    continue  # being written, by a command that needs no lock
                with contextlib.suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _import_phrase(kind: str, text: str) -> str:
    where, _, name = text.rpartition(":")
    module = where if where.endswith(".py") else f"module {where}, perhaps of {Path.cwd()}"
    return f"import {kind} '{name}' from {module}"


def _exists_already(folder: RunFolder) -> UserError:
    what = f"{folder.path} exists already: choose another --name"
    with contextlib.suppress(UserError):
        folder.require_unfinished()
        return UserError(f"{what}, remove it, or 'paceline resume {folder.path}'")
    return UserError(f"{what}, or remove it")


def _not_created(path: Path, error: OSError) -> UserError:
    return UserError(f"run folder {path} cannot be written: {error.strerror}; try --runs DIR")


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


def _try_lock(lock: int, how: int) -> bool:
    """Take a lock, held until the descriptor is closed; return False if another process holds it."""
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


@contextlib.contextmanager
def new_folder(config: RunConfig) -> Iterator[RunFolder]:
    """Create the folder of a run and lock it; remove it if the run fails or is interrupted before it starts."""
    folder = RunFolder.create(config)
    try:
        with folder.locked():
            yield folder
    except BaseException:
        folder.discard_unstarted()
        raise


def require_survivors(result: dict[str, Any], folder: RunFolder) -> None:
    """Raise RunFailed, with a hint, for a run that ended because no workers were left."""
    if result["status"] == "stopped" and result["reason"] in (ALL_GONE, NOT_COME):
        raise RunFailed(f"{result['reason']} at update {result['updates']}: {folder.resume_hint(folder.config())}")
