"""How a run stands, as text: a line about it, a line for each worker, and who is slow and why."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.status import RunStatus, WorkerStatus
from paceline.analysis.stragglers import SLOWER, Straggler, stragglers
from paceline.reports.tables import Column, fit_table
from paceline.system.terminal import fold

MOST_WORKERS = 32
"""That are shown one by one; `--json` has all."""
MOST_NAMED = 8
QUIET_SECONDS = 15.0


COLUMNS = (
    Column("worker", 0),
    Column("state", 0),
    Column("compute", 0),
    Column("send", 3),
    Column("wait", 5),
    Column("server", 4),
    Column("step", 6),
    Column("pushes", 2),
    Column("stale", 1),
    Column("seen", 7),
)


def describe(status: RunStatus, width: int = 80) -> str:
    """Everything there is to say, no line longer than `width`."""
    return "\n".join([describe_run(status, width), *describe_workers(status, width)])


def describe_run(status: RunStatus, width: int = 80) -> str:
    """What is to be said of the run as a whole."""
    return fold(_run_line(status), width)


def describe_workers(status: RunStatus, width: int = 80, most: int = MOST_WORKERS) -> list[str]:
    """Of its workers: at most so many, and who is slow."""
    parts = []
    if status.workers:
        found = stragglers(status.workers)
        shown = _chosen(status.workers, found, most)
        parts.append(fold(_span_line(status), width))
        parts.append(worker_table(shown, width))
        if len(shown) < len(status.workers):
            left = len(status.workers) - len(shown)
            parts.append(
                fold(f"and {left:,} workers more, none of them worse; 'paceline status --json' has all", width)
            )
        parts += [fold(line, width) for line in findings(status, found)]
    elif status.status != "starting":
        parts.append(fold("its events say nothing of its workers", width))
    return parts


def seconds_text(seconds: float | None) -> str:
    """With as many digits as one reads.

    >>> [seconds_text(value) for value in (None, 0.00042, 0.0312, 1.5, 42.0, 600.0, 8000.0)]
    ['-', '0.42 ms', '31 ms', '1.5 s', '42 s', '10 min', '2.2 h']
    """
    if seconds is None:
        return "-"
    if seconds < 1.0:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.0995 else f"{1000 * seconds:.0f} ms"
    if seconds < 120.0:
        return f"{seconds:.1f} s" if seconds < 10.0 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200.0 else f"{seconds / 3600:.1f} h"


def _run_line(status: RunStatus) -> str:
    people = "1 worker" if status.num_workers == 1 else f"{status.num_workers:,} workers"
    kind = "simulated, " if status.simulated else ""
    parts = [f"{status.run}: {status.strategy}, {status.model}, {people}: {kind}{status.status}"]
    if status.reason:
        parts[0] += f" ({status.reason})"
    if status.updates:
        parts.append(f"update {status.updates:,}")
    if status.fraction is not None:
        parts.append(f"{100 * status.fraction:.0f} % of the budget")
    if status.rate:
        parts.append(f"{status.rate:,.0f} samples/s")
    if status.seconds:
        parts.append(f"{seconds_text(status.seconds)} {'of virtual time' if status.simulated else 'of training'}")
    if status.deals:
        parts.append(f"data dealt anew {'once' if status.deals == 1 else f'{status.deals:,} times'}")
    if status.seconds_left is not None:
        parts.append(f"about {seconds_text(status.seconds_left)} left")
    return ", ".join(parts)


def _span_line(status: RunStatus) -> str:
    if status.span is None:
        return "each worker, since the server began:"
    return f"each worker, over the last {seconds_text(status.span)} of training:"


def _chosen(workers: Sequence[WorkerStatus], found: Sequence[Straggler], most: int) -> list[WorkerStatus]:
    """All, or where there are too many the stragglers first and some of the others."""
    if len(workers) <= most:
        return list(workers)
    named = {one.worker: place for place, one in reversed(list(enumerate(found)))}
    return sorted(workers, key=lambda worker: named.get(worker.worker, len(found)))[:most]


def worker_table(workers: Sequence[WorkerStatus], width: int = 80) -> str:
    """A line a worker; columns that nobody can fill, or that do not fit, are left out."""
    return fit_table(COLUMNS, [_cells(worker) for worker in workers], width)


def _cells(worker: WorkerStatus) -> list[str]:
    share = {part: f"{100 * value:.0f} %" for part, value in worker.shares.items()}
    return [
        str(worker.worker),
        worker.state,
        *(share.get(part, "-") for part in ("computing", "sending", "waiting", "server")),
        seconds_text(worker.step_seconds),
        f"{worker.pushes:,}" if worker.pushes is not None else "-",
        f"{worker.staleness:.1f}" if worker.staleness is not None else "-",
        seconds_text(worker.ago),
    ]


def findings(status: RunStatus, found: Sequence[Straggler]) -> list[str]:
    """Who is slow and why, a sentence each; or that nobody is."""
    lines = [_sentence(one) for one in found[:MOST_NAMED]]
    if len(found) > MOST_NAMED:
        lines.append(f"and {len(found) - MOST_NAMED:,} more that are slow")
    quiet, one_process = status.quiet_seconds or 0.0, status.num_workers == 1 or status.simulated
    if quiet > QUIET_SECONDS and status.status == "running" and not one_process:
        what = "the server is stopped, or in a ring a worker that all wait for"
        lines.append(f"nothing was written for {seconds_text(quiet)}: {what}")
    if not lines and sum(worker.step_seconds is not None for worker in status.workers) > 1:
        lines.append(f"all workers are alike: nobody takes {SLOWER:g} times as long as the others")
    return lines


def _sentence(one: Straggler) -> str:
    own, usual = seconds_text(one.seconds), seconds_text(one.usual)
    match one.cause:
        case "compute":
            return f"worker {one.worker} is slow, by its compute: a step takes it {own}, the others {usual}"
        case "link":
            return f"worker {one.worker} is slow, by its link: sending takes it {own} a push, the others {usual}"
        case "paused":
            return f"worker {one.worker} is paused: silent on its turn for {own}, up to {usual} is normal for it"
        case _:
            return f"worker {one.worker} is lost"
