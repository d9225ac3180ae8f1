"""`/metrics`: the status of runs in the Prometheus text format. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.analysis.status import ENDED, PARTS, UNDER_WAY, RunStatus
from paceline.analysis.stragglers import stragglers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_WORKERS = 64  # largest run with samples per worker; a larger one has only counts and stragglers
STATES = (*UNDER_WAY, *ENDED, "killed", "unreachable", "damaged")

FIGURES = (
    ("progress_ratio", "gauge", "Share of the budget spent.", "fraction"),
    ("updates_total", "counter", "Updates applied.", "updates"),
    ("samples_total", "counter", "Samples applied.", "samples"),
    ("train_seconds_total", "counter", "Seconds of training, by the run's own clock.", "seconds"),
    ("samples_per_second", "gauge", "Samples applied per second, lately.", "rate"),
    ("loss", "gauge", "Mean training loss of the latest pushes; of an ended run, that of its train data.", "loss"),
    ("staleness", "gauge", "Mean staleness of all pushes.", "staleness"),
    (
        "test_accuracy_percent",
        "gauge",
        "Test accuracy at the last evaluation, of the weights in paceline_run_info.",
        "test_accuracy",
    ),
    ("validation_accuracy_percent", "gauge", "Validation accuracy at the last evaluation.", "validation_accuracy"),
    ("quiet_seconds", "gauge", "Seconds since the run last wrote an event.", "quiet_seconds"),
    ("workers_expected", "gauge", "Workers the run was started for.", "num_workers"),
)
"""Metrics with one sample per run: name, kind, help, and field of the status."""
Sample = tuple[dict[str, str], float | None]


class MetricFamily(NamedTuple):
    """One metric with all its samples."""

    name: str
    kind: str
    help: str
    samples: Sequence[Sample]


def exposition(runs: Sequence[RunStatus]) -> str:
    """Return all metrics of all runs; unknown values have no sample."""
    return "".join(_text(family) for family in _families(runs))


def _families(runs: Sequence[RunStatus]) -> Iterator[MetricFamily]:
    names = ("run", "strategy", "model", "weights")
    info = [({name: getattr(run, name) for name in names}, 1.0) for run in runs]
    yield MetricFamily("paceline_run_info", "gauge", "Strategy and model of the run, and the weights it scores.", info)
    status = [({"run": run.run, "status": one}, float(run.status == one)) for run in runs for one in STATES]
    yield MetricFamily("paceline_run_status", "gauge", "1 for the status of the run, 0 for the others.", status)
    for name, kind, text, field in FIGURES:
        values = [({"run": run.run}, getattr(run, field)) for run in runs]
        yield MetricFamily(f"paceline_{name}", kind, text, values)
    counts = [
        ({"run": run.run, "state": state}, float(count))
        for run in runs
        for state, count in sorted(Counter(worker.state for worker in run.workers).items())
    ]
    yield MetricFamily("paceline_workers", "gauge", "Workers by state.", counts)
    slow = [
        ({"run": run.run, "worker": str(found.worker), "cause": found.cause}, 1.0)
        for run in runs
        for found in stragglers(run.workers)[:MAX_WORKERS]
    ]
    yield MetricFamily("paceline_straggler", "gauge", "1 for each straggler, with the cause.", slow)
    yield from _of_workers([run for run in runs if len(run.workers) <= MAX_WORKERS])


def _of_workers(runs: Sequence[RunStatus]) -> Iterator[MetricFamily]:
    each = [({"run": run.run, "worker": str(worker.worker)}, worker) for run in runs for worker in run.workers]
    shares = [({**labels, "part": part}, worker.shares.get(part)) for labels, worker in each for part in PARTS]
    yield MetricFamily("paceline_worker_share_ratio", "gauge", "Share of the worker's time by activity.", shares)
    steps: list[Sample] = [(labels, worker.step_seconds) for labels, worker in each]
    yield MetricFamily("paceline_worker_step_seconds", "gauge", "Seconds per step of the worker.", steps)
    pushes: list[Sample] = [(labels, worker.pushes) for labels, worker in each]
    yield MetricFamily("paceline_worker_pushes_total", "counter", "Pushes of the worker.", pushes)


def _text(family: MetricFamily) -> str:
    lines = [f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n"]
    for labels, value in family.samples:
        if value is not None and math.isfinite(value):
            inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"{family.name}{{{inside}}} {value!r}\n")
    return "".join(lines) if len(lines) > 1 else ""


def _escaped(text: str) -> str:
    """
    >>> print(_escaped('a "b" \\\\ c'))
    a \\"b\\" \\\\ c
    """
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
