"""Step and exchange times of this machine, measured by a run on real processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.errors import UserError
from paceline.runs.events import read_events
from paceline.runs.folder import RunFolder
from paceline.settings.strategies import Waiting, strategy_of

MIN_STEPS = 30


@dataclass(frozen=True)
class MeasuredStepTimes:
    """Times of a step and an exchange, and the quantiles of the step time."""

    step_seconds: float
    quantiles: tuple[float, ...]
    server_seconds: float
    latency: float
    cores: int
    num_workers: int


def read_step_times(path: Path) -> MeasuredStepTimes:
    """Read the step and exchange times from the events of a run on real processes."""
    folder = RunFolder.open(path)
    rows = [row for row in read_events(folder.events_file) if row.get("kind") == "timing"]
    if not rows:
        raise UserError(f"{path} has no timing events: use a finished run of 'paceline train' on several processes")
    row = rows[-1]
    workers = [times for times in row["workers"].values() if "cpu" in times]
    steps = sum(times["steps"] for times in workers)
    if steps < MIN_STEPS:
        raise UserError(f"{path} has only {steps} timed steps: let it run for at least {MIN_STEPS}")
    share = [times["steps"] / steps for times in workers]
    step = sum(part * times["cpu"] for part, times in zip(share, workers, strict=True))
    scales = np.array([times["cpu"] for times in workers])[:, None] / step
    quantiles = np.average(np.array([times["quantiles"] for times in workers]) * scales, axis=0, weights=share)
    held_back = strategy_of(folder.config()).waiting in (Waiting.BARRIER, Waiting.BOUNDED)
    waited = min(times["waited_least" if held_back else "waited"] for times in workers)
    return MeasuredStepTimes(
        step,
        tuple(map(float, quantiles)),
        row["server_cpu"],
        max(0.0, waited - row["server_cpu"]) / 2,
        row["cores"],
        len(row["workers"]),
    )
