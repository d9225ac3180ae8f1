"""What a replay came to, beside the run it repeats: the weights' hash, and where it first departs."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from paceline.errors import UserError
from paceline.runs.arrival_log import RECORD_BYTES, Record
from paceline.runs.checkpoint import Cut, readable_cuts
from paceline.runs.recording import Recording
from paceline.runs.replay import Departed, Departure, Replay
from paceline.runs.result import Trained, trained_tensors, weights_sha256
from paceline.system.environment import environment

PROGRESS_RECORDS = 50
MATTERS = ("paceline", "torch", "numpy", "cpu")
"""What a difference in the last bit may come from."""


def marks_of(recording: Recording) -> dict[int, Cut]:
    """The run's checkpoints by the number of records before them that count."""
    marks, standing = {}, recording.log.standing
    for cut in readable_cuts(recording.folder.checkpoints):
        if cut.log_offset > recording.log.ends:
            raise UserError(
                f"{recording.folder.arrivals_file} ends at byte {recording.log.ends}, checkpoint {cut.version} was "
                f"taken at byte {cut.log_offset}: the log lost its end"
            )
        marks[bisect.bisect_left(standing, (cut.log_offset - recording.log.begins) // RECORD_BYTES)] = cut
    return marks


def compare(
    again: Replay,
    recording: Recording,
    model: Trained,
    report: Callable[[dict[str, Any]], None],
    passed: Callable[[Record], None] | None = None,
) -> dict[str, Any]:
    """Feed the recording to `again` and say how that compares with the run, as JSON; `passed` hears each record."""
    records = recording.standing

    def progress(number: int) -> None:
        if passed is not None:
            passed(records[number])
        if number % PROGRESS_RECORDS == 0:
            nothing = {"loss": None, "rate": None, "staleness": 0.0}
            row = {"fraction": number / len(records), "updates": again.server.version, **nothing}
            report({"kind": "progress", **row})

    stuck: str | None = None
    try:
        again.feed(records, progress, recording.until)
    except Departed as departed:
        stuck = str(departed)
    version, departure = again.server.version, again.departure
    reached = recording.until is not None and version >= recording.until
    if departure is None and not reached:
        recording.require_end(version, again.server.late)
    tensors = trained_tensors(again.server, model)
    digest = weights_sha256(tensors)
    recorded = recording.result["weights_sha256"] if recording.result is not None else None
    if departure is None and recorded is not None and recording.until is None and digest != recorded:
        departure = Departure(version, None, None, "weights", "those of the result", "others")
    if reached:
        assert recording.output is not None
        _save(recording.output, tensors)
    unjudged = recorded is None or recording.until is not None
    return {
        "run": str(recording.folder.path),
        "records": again.fed,
        "updates": version,
        "weights_sha256": digest,
        "recorded_sha256": recorded,
        "identical": False if departure is not None else None if unjudged else True,
        "first_departure": departure.row() if departure is not None else None,
        "stuck": stuck,
        "weights_file": str(recording.output) if reached else None,
        "made_with": _differences(recording) if departure is not None else {},
    }


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    """As plain `load_state_dict` takes them; a file that is there is never overwritten."""
    try:
        with path.open("xb") as file:
            file.write(save(tensors))
    except FileExistsError:
        raise UserError(f"{path} exists already and is not overwritten: give another --output FILE") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another --output FILE") from None


def _differences(recording: Recording) -> dict[str, str]:
    """What the run was made with that is another here."""
    then = (recording.result or {}).get("environment") or {}
    here = environment()
    return {name: str(then[name]) for name in MATTERS if name in then and then[name] != here[name]}
