"""What a run on real processes teaches about its machine, read from its events."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.errors import UserError
from paceline.runs.events import read_events
from paceline.runs.folder import RunFolder
from paceline.settings.strategies import Waiting, strategy_of

FEWEST = 30


@dataclass(frozen=True)
class Measured:
    """What a run teaches about its machine: a step, an exchange and their spread."""

    step_seconds: float
    quantiles: tuple[float, ...]
    server_seconds: float
    latency: float
    cores: int
    num_workers: int


def measured(path: Path) -> Measured:
    """The step and exchange times of a run on real processes."""
    folder = RunFolder.open(path)
    rows = [row for row in read_events(folder.events_file) if row.get("kind") == "timing"]
    if not rows:
        raise UserError(
            f"{path} has no timing in its events: take a run of 'paceline train' on several processes that ended"
        )
    row = rows[-1]
    workers = [times for times in row["workers"].values() if "cpu" in times]
    steps = sum(times["steps"] for times in workers)
    if steps < FEWEST:
        raise UserError(f"{path} has only {steps} timed steps: let it run for at least {FEWEST}")
    share = [times["steps"] / steps for times in workers]
    step = sum(part * times["cpu"] for part, times in zip(share, workers, strict=True))
    quantiles = np.array([times["quantiles"] for times in workers]) * (
        np.array([t["cpu"] for t in workers])[:, None] / step
    )
    held_back = strategy_of(folder.config()).waiting in (Waiting.BARRIER, Waiting.BOUNDED)
    waited = min(times["waited_least" if held_back else "waited"] for times in workers)
    return Measured(
        step,
        tuple(float(q) for q in np.average(quantiles, axis=0, weights=share)),
        row["server_cpu"],
        max(0.0, waited - row["server_cpu"]) / 2,
        row["cores"],
        len(row["workers"]),
    )
