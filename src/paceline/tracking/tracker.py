"""The `Tracker` interface, and which fields of an event row are metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from paceline.analysis.status import PARTS
from paceline.system.strict_json import is_number

AXES = ("now", "updates", "samples")
METRIC_KINDS = ("progress", "evaluation", "result")


class Tracker(Protocol):
    """Receives one run from start to end, in order; it runs in its own process, so it may be slow.

    `--track MODULE:NAME` calls NAME without arguments to create one. A resumed run is sent again from its start.
    """

    def started(self, settings: dict[str, Any], folder: Path) -> None:
        """Called before any row, with every setting by name and the run folder."""
        ...

    def row(self, kind: str, fields: dict[str, Any]) -> None:
        """Called per row of `events.jsonl`; its fields include `now` (seconds of training), `updates` and `samples`."""
        ...

    def finished(self, result: dict[str, Any] | None) -> None:
        """Called with the content of `result.json`; None if the run was killed and has none."""
        ...


def scalars(kind: str, fields: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a row as KIND/FIELD, without its time axes; for workers, the shares of their time.

    What a user's own loop reports is named after the worker, too.

    >>> scalars("progress", {"now": 1.0, "updates": 5, "samples": 80, "loss": 0.5, "rate": None})
    {'progress/loss': 0.5}
    >>> scalars("workers", {"computing": [3.0, 1.0], "waiting": [0.0, 4.0], "state": ["live", "held"]})
    {'workers/computing': 0.5, 'workers/waiting': 0.5}
    >>> scalars("reported", {"worker": 1, "figures": {"f1": 0.9}})
    {'reported/f1/worker1': 0.9}
    """
    if kind == "reported":
        return {f"reported/{name}/worker{fields['worker']}": value for name, value in reported(fields).items()}
    if kind == "workers":
        sums = {name: sum(fields[name]) for name in PARTS if name in fields}
        whole = sum(sums.values())
        return {f"workers/{name}": value / whole for name, value in sums.items()} if whole else {}
    if kind not in METRIC_KINDS:
        return {}
    return {f"{kind}/{name}": float(value) for name, value in fields.items() if name not in AXES and is_number(value)}


def reported(fields: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a row that a user's own loop reported, without those that are no number."""
    return {name: float(value) for name, value in fields.get("figures", {}).items() if is_number(value)}


def final_scalars(result: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a result as result/NAME, without settings."""
    known = ("schema", "workers", "lr", "momentum", "seed", "epochs", "batch_size", "accumulate", *AXES)
    return scalars("result", {name: value for name, value in result.items() if name not in known})


def fields_text(fields: dict[str, Any]) -> str:
    """Return the fields of an event as text, as in `worker 2, pushes 17`."""
    return ", ".join(f"{name} {value}" for name, value in fields.items() if name not in AXES and value is not None)


TEXT_EVENTS = frozenset(
    {"run_resumed", "recovered", "worker_joined", "worker_left", "worker_lost", "worker_draining", "stalled"}
    | {"local_steps", "stopped", "deal", "fault", "checkpoint", "writing_failed", "turned_away", "run_ended"}
    | {"expelled", "suspicious", "not_finite", "batch_skipped"}
)
"""Kinds of rows that describe an event, not a measurement."""
