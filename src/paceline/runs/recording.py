"""Loads and checks what a replay needs, the log and the result, before anything is computed."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, is_simulated
from paceline.errors import UserError
from paceline.runs.arrival_log import LogContents, read_log
from paceline.runs.durable_files import write_atomically
from paceline.runs.folder import RunFolder
from paceline.system.strict_json import seal, to_json, unseal


@dataclass(frozen=True)
class Recording:
    """A run to replay up to update `until`, or to the end of its log."""

    folder: RunFolder
    config: RunConfig
    log: LogContents
    result: dict[str, Any] | None
    until: int | None = None
    output: Path | None = None

    def notes(self) -> list[str]:
        """Return sentences about the log for the user."""
        name, notes = self.folder.arrivals_file.name, []
        if self.log.torn:
            notes.append(f"{name} ends in a torn record of {self.log.torn} bytes, which is ignored")
        undone = len(self.log.records) - len(self.log.effective_indices)
        if undone:
            notes.append(f"{undone} records of {name} were undone when the run resumed from a checkpoint")
        return notes

    def require_end(self, updates: int, late: int) -> None:
        """Check that a fully replayed log reached `until` and the number of updates in the result."""
        then = self.result or {}
        if (then.get("updates", updates), then.get("late_pushes", late)) != (updates, late):
            raise UserError(
                f"{self.folder.arrivals_file} ends at update {updates} with {late} late pushes, "
                f"{self.folder.result_file.name} says {then.get('updates')} with {then.get('late_pushes')}: "
                "the end of the log is missing, or it belongs to another run"
            )
        if self.until is not None and updates < self.until:
            raise too_far(self.until, updates)


def too_far(until: int, updates: int) -> UserError:
    """Return the error for an update that the run never reached."""
    return UserError(f"--until {until}: this run has {updates} updates; give a number from 0 to {updates}")


def open_recording(path: Path, until: int | None = None, output: Path | None = None) -> Recording:
    """Check everything that needs no computing; the weights of update `until` are saved to `output`."""
    folder = RunFolder.open(path)
    config = folder.config()
    if config.timing_only:
        raise UserError(f"{path} simulated only times and computed no gradients: there is nothing to replay")
    result = folder.result()
    log = read_log(folder.arrivals_file, config, way_on=_without_replay(config, result))
    if not log.records:
        raise UserError(f"{folder.arrivals_file} holds no record: the run never started")
    if result is not None and not {"updates", "weights_sha256"} <= result.keys():
        raise UserError(f"{folder.result_file} is not a run result: the run folder is damaged")
    if until is None:
        if output is not None:
            raise UserError("--output names the file for the weights of --until: add --until N")
        return Recording(folder, config, log, result)
    pushes = sum(record.kind == "push" for record in log.records)
    most = result["updates"] if result is not None else pushes  # without a result: at most one update a push
    if not 0 <= until <= most:
        raise too_far(until, most)
    output = output if output is not None else path / f"replay-{until}.safetensors"
    if output.exists():
        raise UserError(f"{output} exists already and is not overwritten: remove it, or give another --output FILE")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: folder {output.parent} does not exist")
    return Recording(folder, config, log, result, until, output)


def _without_replay(config: RunConfig, result: dict[str, Any] | None) -> str | None:
    """Return what a damaged log means for a run that cannot be resumed; None for one that can."""
    if is_simulated(config):
        return "simulate it again, the result is the same"
    if result is None or result["status"] in ("stopped", "diverged"):
        return None
    return f"the run is {result['status']}, its weights and its result are not affected, but it cannot be replayed"


@dataclass(frozen=True)
class ScriptCall:
    """How a user's script was started, as stored in `script.json`."""

    command: list[str]
    cwd: str
    sha256: str

    @property
    def path(self) -> Path:
        """The script's file."""
        return Path(self.cwd, *self.command[:1])

    @staticmethod
    def of(command: list[str]) -> ScriptCall:
        """Return the call of `command` in the current directory."""
        return ScriptCall(command, str(Path.cwd()), _sha256(Path(command[0])))

    def save(self, folder: RunFolder) -> None:
        """Store the call in the run folder."""
        write_atomically(folder.script_file, (to_json(seal(asdict(self)), indent=2) + "\n").encode())
        folder.sign()

    @staticmethod
    def load(folder: RunFolder) -> ScriptCall:
        """Load the call that created a run; require that the script still exists."""
        try:
            fields = unseal(folder.script_file.read_bytes())
            call = ScriptCall([str(word) for word in fields["command"]], str(fields["cwd"]), str(fields["sha256"]))
        except FileNotFoundError:
            raise UserError(f"{folder.path} does not record which script created it: start the script again") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{folder.script_file} cannot be read ({error}): the run folder is damaged") from None
        if not Path(call.cwd).is_dir():
            raise UserError(f"folder {call.cwd}, in which the script was started, no longer exists: create it again")
        if not call.command or not call.path.is_file():
            raise UserError(f"script {call.path} of this run no longer exists: put it back, it computes the steps")
        return call

    def inside(self, folder: Path) -> ScriptCall:
        """Return the same call in another folder, to which the script's relative paths then lead."""
        return ScriptCall([str(self.path), *self.command[1:]], str(folder.resolve()), self.sha256)

    @property
    def changed(self) -> bool:
        """Whether the script's file has changed since the run."""
        return _sha256(self.path) != self.sha256


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
