"""What others may know of a run: the interface of a tracker, and what of a row is a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

AXES = ("now", "updates", "samples")
MEASURED = ("progress", "evaluation", "result")
SHARES = ("computing", "sending", "waiting", "server")


class Tracker(Protocol):
    """Hears of one run, from its start to its end, in order; in a process of its own, so it may take its time.

    `--track MODULE:NAME` calls NAME without arguments for one of these. A run that is resumed is told from its start.
    """

    def started(self, settings: dict[str, Any], folder: Path) -> None:
        """Before any row: every setting by name, and the run's folder."""
        ...

    def row(self, kind: str, fields: dict[str, Any]) -> None:
        """A row of `events.jsonl`; `now` (seconds of training), `updates` and `samples` are always among its fields."""
        ...

    def finished(self, result: dict[str, Any] | None) -> None:
        """The content of `result.json`; None where the run was killed and left none."""
        ...


def scalars(kind: str, fields: dict[str, Any]) -> dict[str, float]:
    """What a row measured, as KIND/FIELD, without what says when it was; of workers, the shares of their time.

    >>> scalars("progress", {"now": 1.0, "updates": 5, "samples": 80, "loss": 0.5, "rate": None})
    {'progress/loss': 0.5}
    >>> scalars("workers", {"computing": [3.0, 1.0], "waiting": [0.0, 4.0], "state": ["live", "held"]})
    {'workers/computing': 0.5, 'workers/waiting': 0.5}
    """
    if kind == "workers":
        sums = {name: sum(fields[name]) for name in SHARES if name in fields}
        whole = sum(sums.values())
        return {f"workers/{name}": value / whole for name, value in sums.items()} if whole else {}
    if kind not in MEASURED:
        return {}
    return {f"{kind}/{name}": float(value) for name, value in fields.items() if name not in AXES and is_number(value)}


def is_number(value: Any) -> bool:
    """Whether it can be drawn: true and false cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def final_scalars(result: dict[str, Any]) -> dict[str, float]:
    """The numbers of a result as result/NAME, without settings that were known before."""
    known = ("schema", "workers", "lr", "momentum", "seed", "epochs", "batch_size", "accumulate", *AXES)
    return scalars("result", {name: value for name, value in result.items() if name not in known})


def in_words(fields: dict[str, Any]) -> str:
    """The fields of a row that says what happened, as in `worker 2, pushes 17`."""
    return ", ".join(f"{name} {value}" for name, value in fields.items() if name not in AXES and value is not None)


HAPPENINGS = frozenset(
    {"run_resumed", "recovered", "worker_joined", "worker_left", "worker_lost", "worker_draining", "local_steps"}
    | {"stopped", "deal", "fault", "checkpoint", "writing_failed", "turned_away", "run_ended"}
)
"""Kinds of rows that are about something that happened, not about how things stand."""
