"""`/metrics`: the status of runs in the Prometheus text format. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from paceline.analysis.status import ENDED, PARTS, UNDER_WAY, RunStatus
from paceline.analysis.stragglers import stragglers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_WORKERS = 64  # largest run with samples per worker; a larger one has only counts and stragglers
STATES = (*UNDER_WAY, *ENDED, "killed", "unreachable")

Labels = dict[str, str]
Sample = tuple[Labels, float | None]


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
    info = [({**_of(run), "strategy": run.strategy, "model": run.model}, 1.0) for run in runs]
    yield MetricFamily("paceline_run_info", "gauge", "Strategy and model of the run.", info)
    status = [({**_of(run), "status": one}, float(run.status == one)) for run in runs for one in STATES]
    yield MetricFamily("paceline_run_status", "gauge", "1 for the status of the run, 0 for the others.", status)
    yield _gauge(runs, "progress_ratio", "Share of the budget spent.", "fraction")
    yield _counter(runs, "updates_total", "Updates applied.", "updates")
    yield _counter(runs, "samples_total", "Samples applied.", "samples")
    yield _counter(runs, "train_seconds_total", "Seconds of training, by the run's own clock.", "seconds")
    yield _gauge(runs, "samples_per_second", "Samples applied per second, lately.", "rate")
    yield _gauge(runs, "loss", "Mean training loss of the latest pushes.", "loss")
    yield _gauge(runs, "staleness", "Mean staleness of all pushes.", "staleness")
    yield _gauge(runs, "test_accuracy_percent", "Test accuracy at the last evaluation.", "test_accuracy")
    yield _gauge(runs, "quiet_seconds", "Seconds since the run last wrote an event.", "quiet_seconds")
    yield _gauge(runs, "workers_expected", "Workers the run was started for.", "num_workers")
    counts = [
        ({**_of(run), "state": state}, float(count))
        for run in runs
        for state, count in sorted(Counter(worker.state for worker in run.workers).items())
    ]
    yield MetricFamily("paceline_workers", "gauge", "Workers by state.", counts)
    slow = [
        ({**_of(run), "worker": str(found.worker), "cause": found.cause}, 1.0)
        for run in runs
        for found in stragglers(run.workers)[:MAX_WORKERS]
    ]
    yield MetricFamily("paceline_straggler", "gauge", "1 for each straggler, with the cause.", slow)
    yield from _of_workers([run for run in runs if len(run.workers) <= MAX_WORKERS])


def _of_workers(runs: Sequence[RunStatus]) -> Iterator[MetricFamily]:
    each = [({**_of(run), "worker": str(worker.worker)}, worker) for run in runs for worker in run.workers]
    shares = [({**labels, "part": part}, worker.shares.get(part)) for labels, worker in each for part in PARTS]
    yield MetricFamily("paceline_worker_share_ratio", "gauge", "Share of the worker's time by activity.", shares)
    steps: list[Sample] = [(labels, worker.step_seconds) for labels, worker in each]
    yield MetricFamily("paceline_worker_step_seconds", "gauge", "Seconds per step of the worker.", steps)
    pushes: list[Sample] = [(labels, worker.pushes) for labels, worker in each]
    yield MetricFamily("paceline_worker_pushes_total", "counter", "Pushes of the worker.", pushes)


def _gauge(runs: Sequence[RunStatus], name: str, text: str, field: str) -> MetricFamily:
    return MetricFamily(f"paceline_{name}", "gauge", text, [(_of(run), getattr(run, field)) for run in runs])


def _counter(runs: Sequence[RunStatus], name: str, text: str, field: str) -> MetricFamily:
    return MetricFamily(f"paceline_{name}", "counter", text, [(_of(run), getattr(run, field)) for run in runs])


def _of(run: RunStatus) -> Labels:
    return {"run": run.run}


def _text(family: MetricFamily) -> str:
    lines = list(_lines(family.name, family.samples))
    if not lines:
        return ""
    return f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n" + "".join(lines)


def _lines(name: str, samples: Iterable[Sample]) -> Iterator[str]:
    for labels, value in samples:
        if value is not None and math.isfinite(value):
            inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            yield f"{name}{{{inside}}} {value!r}\n"


def _escaped(text: str) -> str:
    """
    >>> print(_escaped('a "b" \\\\ c'))
    a \\"b\\" \\\\ c
    """
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
