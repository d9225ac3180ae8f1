"""What a run left for its replay: its log, checked, and its result; found wrong before anything is computed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.runs.arrival_log import Log, Record, read_log
from paceline.runs.folder import RunFolder, write_atomically


@dataclass(frozen=True)
class Recording:
    """A run that can be replayed, up to update `until` or to the end of its log."""

    folder: RunFolder
    config: RunConfig
    log: Log
    result: dict[str, Any] | None
    until: int | None = None
    output: Path | None = None

    @property
    def standing(self) -> list[Record]:
        """The records that made the run what it came to."""
        return [self.log.records[place] for place in self.log.standing]

    def notes(self) -> list[str]:
        """What the user should know of the log."""
        name, notes = self.folder.arrivals_file.name, []
        if self.log.torn:
            notes.append(f"{name} ends in a torn record of {self.log.torn} bytes: it is left out")
        undone = len(self.log.records) - len(self.log.standing)
        if undone:
            notes.append(f"{undone} records of {name} were taken back when the run went on from a checkpoint")
        return notes

    def require_end(self, updates: int, late: int) -> None:
        """A log fed to its end must have come as far as it was asked to, and as the result says the run came."""
        then = self.result or {}
        if (then.get("updates", updates), then.get("late_pushes", late)) != (updates, late):
            raise UserError(
                f"{self.folder.arrivals_file} ends at update {updates} with {late} late pushes, "
                f"{self.folder.result_file.name} says {then.get('updates')} with {then.get('late_pushes')}: "
                "the log lost its end, or belongs to another run"
            )
        if self.until is not None and updates < self.until:
            raise too_far(self.until, updates)


def too_far(until: int, updates: int) -> UserError:
    """The error for an update that the run never made."""
    return UserError(f"--until {until}: this run has {updates} updates; give a number from 0 to {updates}")


def open_recording(path: Path, until: int | None = None, output: Path | None = None) -> Recording:
    """Check everything that can be checked without computing; `until` names the weights that are saved to `output`."""
    folder = RunFolder.open(path)
    config = folder.config()
    if config.timing_only:
        raise UserError(f"{path} simulated times alone and computed no gradients: there is nothing to replay")
    log = read_log(folder.arrivals_file, config)
    if not log.records:
        raise UserError(f"{folder.arrivals_file} holds no record: the run never started")
    result = folder.result()
    if result is not None and not (isinstance(result, dict) and {"updates", "weights_sha256"} <= result.keys()):
        raise UserError(f"{folder.result_file} is no result of a run: the run folder is damaged")
    if until is None:
        if output is not None:
            raise UserError("--output is where --until saves the weights: add --until N")
        return Recording(folder, config, log, result)
    pushes = sum(record.kind == "push" for record in log.records)
    most = result["updates"] if result is not None else pushes  # without a result: at most one update a push
    if not 0 <= until <= most:
        raise too_far(until, most)
    output = output if output is not None else path / f"replay-{until}.safetensors"
    if output.exists():
        raise UserError(f"{output} exists already and is not overwritten: remove it, or give another --output FILE")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}")
    return Recording(folder, config, log, result, until, output)


@dataclass(frozen=True)
class ScriptCall:
    """How a user's script was started, as `script.json` keeps it."""

    command: list[str]
    cwd: str
    sha256: str

    @property
    def path(self) -> Path:
        """The script's own file."""
        return Path(self.cwd, *self.command[:1])

    @staticmethod
    def of(command: list[str]) -> ScriptCall:
        """The call that is about to be made from here."""
        return ScriptCall(command, str(Path.cwd()), _sha256(Path(command[0])))

    def save(self, folder: RunFolder) -> None:
        """Keep it with the run."""
        write_atomically(folder.script_file, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @staticmethod
    def load(folder: RunFolder) -> ScriptCall:
        """The call that made a run; the script must still be there."""
        try:
            fields = json.loads(folder.script_file.read_text())
            call = ScriptCall([str(word) for word in fields["command"]], str(fields["cwd"]), str(fields["sha256"]))
        except FileNotFoundError:
            raise UserError(f"{folder.path} does not say which script made it: start the script again") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{folder.script_file} cannot be read ({error}): the run folder is damaged") from None
        if not Path(call.cwd).is_dir():
            raise UserError(f"folder {call.cwd}, from which the script was run, is not there any more: make it again")
        if not call.command or not call.path.is_file():
            raise UserError(f"script {call.path} of this run is not there any more: put it back to replay the run")
        return call

    @property
    def changed(self) -> bool:
        """Whether the file is another than when the run was made."""
        return _sha256(self.path) != self.sha256


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
