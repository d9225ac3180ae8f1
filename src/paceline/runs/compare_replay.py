"""Compares a replay with its run: the hash of the weights, and the first mismatch."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from paceline.errors import UserError
from paceline.runs.arrival_log import RECORD_BYTES, Record
from paceline.runs.checkpoint import Checkpoint, readable_checkpoints
from paceline.runs.recording import Recording
from paceline.runs.replay import Mismatch, Replay, ReplayMismatch
from paceline.runs.result import NamedTensors, trained_tensors, weights_sha256
from paceline.system.environment import environment

PROGRESS_RECORDS = 50
ENVIRONMENT_KEYS = ("paceline", "torch", "numpy", "cpu")
"""Parts of the environment that can change the last bit of a result."""


def checkpoints_by_record(recording: Recording) -> dict[int, Checkpoint]:
    """Return the run's checkpoints by the number of effective records before them."""
    found, effective = {}, recording.log.effective_indices
    for checkpoint in readable_checkpoints(recording.folder.checkpoints):
        if checkpoint.log_offset > recording.log.ends:
            raise UserError(
                f"{recording.folder.arrivals_file} ends at byte {recording.log.ends}, checkpoint {checkpoint.version} "
                f"was taken at byte {checkpoint.log_offset}: the end of the log is missing"
            )
        place = (checkpoint.log_offset - recording.log.begins) // RECORD_BYTES
        found[bisect.bisect_left(effective, place)] = checkpoint
    return found


def compare(
    again: Replay,
    recording: Recording,
    model: NamedTensors,
    report: Callable[[dict[str, Any]], None],
    on_record: Callable[[Record], None] | None = None,
) -> dict[str, Any]:
    """Feed the recording to `again` and return the comparison as JSON; call `on_record` for each record."""
    records = recording.log.effective_records

    def progress(number: int) -> None:
        if on_record is not None:
            on_record(records[number])
        if number % PROGRESS_RECORDS == 0:
            row = {"kind": "progress", "fraction": number / len(records), "updates": again.server.version}
            report({**row, "loss": None, "rate": None, "staleness": 0.0})

    stuck: str | None = None
    try:
        again.feed(records, progress, recording.until)
    except ReplayMismatch as error:
        stuck = str(error)
    version, mismatch = again.server.version, again.mismatch
    reached = recording.until is not None and version >= recording.until
    if mismatch is None and not reached:
        recording.require_end(version, again.server.late)
    tensors = trained_tensors(again.server, model)
    digest = weights_sha256(tensors)
    recorded = recording.result["weights_sha256"] if recording.result is not None else None
    if mismatch is None and recorded is not None and recording.until is None and digest != recorded:
        mismatch = Mismatch(version, None, None, "weights", "those of the result", "others")
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
        "identical": False if mismatch is not None else None if unjudged else True,
        "first_departure": mismatch.row() if mismatch is not None else None,
        "stuck": stuck,
        "weights_file": str(recording.output) if reached else None,
        "made_with": _differences(recording) if mismatch is not None else {},
    }


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Save for `load_state_dict`; never overwrite a file."""
    try:
        with path.open("xb") as file:
            file.write(save(tensors))
    except FileExistsError:
        raise UserError(f"{path} exists already and is not overwritten: give another --output FILE") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another --output FILE") from None


def _differences(recording: Recording) -> dict[str, str]:
    """Return the parts of the run's environment that differ from this one."""
    then = (recording.result or {}).get("environment") or {}
    here = environment()
    return {name: str(then[name]) for name in ENVIRONMENT_KEYS if name in then and then[name] != here[name]}
