"""Formats the status of a run as text: the run, a table of workers, and the stragglers with causes."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.status import ENDED, PARTS, RunStatus, WorkerStatus
from paceline.analysis.stragglers import MIN_SECONDS, MIN_SHARE, SLOW_THRESHOLD, Straggler, stragglers
from paceline.reports.tables import Column, fit_table
from paceline.system.terminal import fold, loss_text, printable, seconds_text

MAX_WORKERS = 32  # workers shown; `--json` has all
MAX_NAMED = 8
QUIET_SECONDS = 15.0
MOMENT_SECONDS = 0.1  # figures written so shortly one after the other are of one moment
MAX_LETTERS = 2000
HEADS = ("worker", "state", "compute", "send", "wait", "server", "step", "pushes", "stale", "seen")
COLUMNS = [Column(*pair) for pair in zip(HEADS, (0, 0, 0, 3, 5, 4, 6, 2, 1, 7), strict=True)]


def format_status(status: RunStatus, width: int = 80) -> str:
    """Return the whole status, with lines of at most `width`."""
    return "\n".join([format_run(status, width), *format_workers(status, width)])


def format_run(status: RunStatus, width: int = 80) -> str:
    """Return the lines about the run as a whole."""
    lines = (_run_line(status), *_step_limit(status), *status.damaged)
    return "\n".join(fold(printable(line, MAX_LETTERS), width) for line in lines)


def _step_limit(status: RunStatus) -> list[str]:
    """Say by how much the rule shortens steps, if it does."""
    if status.step_factor is None or status.step_factor >= 1.0:
        return []
    why = f"the loss is too sharply curved for {status.num_workers} workers' steps"
    return [f"step limit: lr x {status.step_factor:.2g}: {why}"]


def format_workers(status: RunStatus, width: int = 80, max_workers: int = MAX_WORKERS) -> list[str]:
    """Return the table of at most `max_workers` workers, and the stragglers."""
    parts = []
    if status.workers:
        found = stragglers(status.workers)
        shown = _select_workers(status.workers, found, max_workers)
        over = "since the server started"
        if status.span is not None:
            over = f"over the last {seconds_text(status.span)} of training (pushes and stale: {over})"
        parts.append(fold(f"each worker, {over}{_as_of(status)}:", width))
        parts.append(worker_table(shown, width))
        if left := len(status.workers) - len(shown):
            more = f"and {left:,} more workers, none of them slower; 'paceline status --json' has all"
            parts.append(fold(more, width))
        parts += [fold(line, width) for line in findings(status, found)]
    elif status.status != "starting":
        parts.append(fold("its events have no figures of its workers", width))
    return parts


def _as_of(status: RunStatus) -> str:
    """Say when the figures of the workers were written, if those of the whole run are newer or the run was killed."""
    at = status.workers_at
    if at is None or status.status in ENDED or (status.status != "killed" and status.seconds - at < MOMENT_SECONDS):
        return ""
    return f", as last written after {seconds_text(at)}"


def _run_line(status: RunStatus) -> str:
    workers = "1 worker" if status.num_workers == 1 else f"{status.num_workers:,} workers"
    kind = "simulated, " if status.simulated else ""
    parts = [f"{status.run}: {status.strategy}, {status.subject or status.model}, {workers}: {kind}{status.status}"]
    if status.reason:
        parts[0] += f" ({status.reason})"
    if status.updates:
        least = "at least " if status.status == "killed" else ""  # its log may hold more than its last event
        parts.append(f"{least}update {status.updates:,}")
    if status.fraction is not None:
        parts.append(f"{100 * status.fraction:.0f} % of the budget")
    parts += loss_parts(status)
    if status.rate:
        parts.append(f"{status.rate:,.0f} {status.unit}/s")
    if status.seconds:
        parts.append(f"{seconds_text(status.seconds)} {'of virtual time' if status.simulated else 'of training'}")
    if status.deals:
        parts.append(f"data reassigned {'once' if status.deals == 1 else f'{status.deals:,} times'}")
    if status.seconds_left is not None:
        parts.append(f"about {seconds_text(status.seconds_left)} left")
    for name, one in status.reported.items():
        parts.append(f"{name} {'not finite' if one.value is None else f'{one.value:.4g}'} (worker {one.worker})")
    return ", ".join(parts)


def loss_parts(status: RunStatus) -> list[str]:
    """Return the loss, with its update if the run has made more since; nothing if it is unknown."""
    if status.loss is None:
        return []
    at = f" at update {status.loss_at:,}" if status.loss_at is not None and status.loss_at != status.updates else ""
    return [f"loss {loss_text(status.loss)}{at}"]


def _select_workers(workers: Sequence[WorkerStatus], found: Sequence[Straggler], count: int) -> list[WorkerStatus]:
    """Return all workers, or the stragglers first if there are too many."""
    if len(workers) <= count:
        return list(workers)
    named = {one.worker: place for place, one in reversed(list(enumerate(found)))}
    return sorted(workers, key=lambda worker: named.get(worker.worker, len(found)))[:count]


def worker_table(workers: Sequence[WorkerStatus], width: int = 80) -> str:
    """Return one line per worker; drop columns that are empty or do not fit."""
    return fit_table(COLUMNS, [_cells(worker) for worker in workers], width)


def _cells(worker: WorkerStatus) -> list[str]:
    share = {part: f"{100 * value:.0f} %" for part, value in worker.shares.items()}
    return [
        str(worker.worker),
        worker.state,
        *(share.get(part, "-") for part in PARTS),
        seconds_text(worker.step_seconds),
        f"{worker.pushes:,}" if worker.pushes is not None else "-",
        f"{worker.staleness:.1f}" if worker.staleness is not None else "-",
        seconds_text(worker.ago),
    ]


def findings(status: RunStatus, found: Sequence[Straggler]) -> list[str]:
    """Return a sentence per straggler, or one that says that there are none."""
    lines = [_sentence(one) for one in found[:MAX_NAMED]]
    if len(found) > MAX_NAMED:
        lines.append(f"and {len(found) - MAX_NAMED:,} more stragglers")
    quiet, one_process = status.quiet_seconds or 0.0, status.num_workers == 1 or status.simulated
    if quiet > QUIET_SECONDS and status.status == "running" and not one_process:
        what = "the server is stopped, or the others of a ring wait for a stopped worker"
        lines.append(f"nothing was written for {seconds_text(quiet)}: {what}")
    if not lines and sum(worker.step_seconds is not None for worker in status.workers) > 1:
        slow = f"{SLOW_THRESHOLD:g} times as long as the others"
        least = f"{100 * MIN_SHARE:.0f} % of its time and {MIN_SECONDS:g} s"
        lines.append(f"no stragglers: no worker loses {least} by taking {slow}")
    return lines


def _sentence(one: Straggler) -> str:
    own, usual = seconds_text(one.seconds), seconds_text(one.usual)
    match one.cause:
        case "compute":
            return f"worker {one.worker} is slow (compute): {own} per step, the others {usual}"
        case "link":
            return f"worker {one.worker} is slow (link): {own} to send a push, the others {usual}"
        case "paused":
            return f"worker {one.worker} is paused: silent for {own} on its turn, up to {usual} is normal for it"
        case "stalled":
            step = f"its usual step takes {usual}" if one.usual is not None else "it has made none before"
            return f"worker {one.worker} has made no step for {own}; {step}"
        case _:
            return f"worker {one.worker} is lost"
