"""Run folders written by hand, through the real writers, for reports to be made of."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from paceline.config import RunConfig
from paceline.core.messages import Disposition, Input, Join, Push, Resume
from paceline.runs.arrival_log import ArrivalLog
from paceline.runs.events import EventLog
from paceline.runs.folder import RunFolder
from paceline.settings.resolve import resolve

NOTHING = torch.empty(0)


def make_folder(path: Path, name: str = "run", **settings: Any) -> RunFolder:
    """A folder with nothing but its settings."""
    return RunFolder.create(resolve(RunConfig(**{"workers": 2, "runs": str(path), "name": name, **settings})))


def push(worker: int, seq: int, loss: float = 1.0, samples: int = 32) -> Push:
    return Push(worker, 0, seq, seq, samples, loss, NOTHING, NOTHING)


def log_inputs(
    folder: RunFolder, inputs: list[tuple[Input, float]], disposition: Disposition = Disposition.TAKEN
) -> None:
    """Append (input, now) pairs to the log."""
    log = ArrivalLog(folder.arrivals_file, folder.config())
    for message, now in inputs:
        log.append(message, disposition, now)
    log.close()


def log_events(folder: RunFolder, *rows: dict[str, Any]) -> None:
    with EventLog(folder.events_file) as events:
        for row in rows:
            events.write(row["kind"], row["now"], **{k: v for k, v in row.items() if k not in ("kind", "now")})


def started(now: float = 0.0, kind: str = "run_started") -> dict[str, Any]:
    return {"kind": kind, "now": now, "workers": 2, "strategy": "async", "updates": 0}


def progress(now: float, samples: int, fraction: float, **more: Any) -> dict[str, Any]:
    row = {"kind": "progress", "now": now, "updates": samples // 32, "samples": samples, "fraction": fraction}
    row |= {"loss": 2.0 / (1.0 + now), "rate": 320.0, "staleness": 1.0, "live": 2, "lr": 0.005}
    return row | {"bytes_pushed": 4 * samples, "bytes_pulled": 4 * samples, "norm": 5.0 + now} | more


def accounts(now: float, computing: list[float], states: list[str] | None = None, **more: Any) -> dict[str, Any]:
    count = len(computing)
    row: dict[str, Any] = {"kind": "workers", "now": now, "worker": list(range(count)), "computing": computing}
    row |= {"state": states or ["live"] * count, "waiting": [max(0.0, now - one) for one in computing]}
    row |= {"steps": [int(10 * one) for one in computing], "pushes": [int(10 * one) for one in computing]}
    return row | {"staleness": [1.0] * count, "ago": [0.1] * count, "stale": [[0, 1], [1, 9]], "paused": {}} | more


def result_of(folder: RunFolder, status: str = "finished", **more: Any) -> dict[str, Any]:
    """A result with all that the closing lines need."""
    config = folder.config()
    found: dict[str, Any] = {"strategy": config.strategy, "workers": config.workers, "status": status, "reason": None}
    for part in ("train", "validation", "test"):
        found |= {f"{part}_{what}": None for what in ("accuracy", "loss", "correct", "total")}
    found |= {"test_accuracy": 81.5, "test_loss": 0.5, "test_correct": 815, "test_total": 1000}
    found |= {"updates": 40, "samples": 1280, "train_seconds": 4.0, "samples_per_second": 320.0, "task": None}
    found |= {"per_class_accuracy": [80.0] * 10, "staleness": {"mean": 1.0, "p50": 1, "p95": 2, "max": 3}}
    found |= {
        "dropped_pushes": 0,
        "bytes_pushed": 5120,
        "bytes_pulled": 5120,
        "dataset": config.dataset,
        "model": config.model,
    }
    return found | {"environment": {"cpu": "one", "cores": 2, "torch": "2"}, "git": None} | more


def whole_run(path: Path, name: str = "run", pushes: int = 40, end: bool = True, **settings: Any) -> RunFolder:
    """Two workers, some pushes, evaluations, and a result unless it has not ended."""
    folder = make_folder(path, name, **settings)
    rows: list[dict[str, Any]] = [started(), accounts(0.0, [0.0, 0.0], ["awaited"] * 2)]
    rows += [{"kind": "worker_joined", "now": 0.0, "worker": one, "incarnation": 0, "threads": 1} for one in (0, 1)]
    for second in range(1, 5):
        rows += [progress(float(second), 320 * second, second / 8), accounts(float(second), [0.9 * second] * 2)]
        score = {"test_accuracy": 20.0 * second, "test_loss": 2.0 / second}
        rows.append({"kind": "evaluation", "now": float(second), "samples": 320 * second, **score})
    log_events(folder, *rows)
    inputs: list[tuple[Input, float]] = [(Join(0, 0), 0.0), (Join(1, 0), 0.0)]
    inputs += [(push(one % 2, one // 2, 2.0 * math.exp(-one / 20)), 4.0 * (one + 1) / pushes) for one in range(pushes)]
    log_inputs(folder, inputs)
    if end:
        log_events(folder, {"kind": "run_ended", "now": 4.0, "status": "finished", "updates": 40})
        folder.write_result(result_of(folder))
    return folder


def taken_back(folder: RunFolder, undone: int, now: float) -> None:
    """As a resume from a checkpoint leaves it."""
    log_inputs(folder, [(Resume(undone=undone, lost=undone), now)])


def as_json(digest: dict[str, Any]) -> str:
    """Only what JSON has."""
    return json.dumps(digest, allow_nan=False)
