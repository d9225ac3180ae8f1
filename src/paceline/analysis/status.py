"""The status of a run and its workers, read from its folder: running, ended, killed or simulated."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.analysis.naming import dataset_name, model_name, read_named_settings, subject
from paceline.analysis.reported import ReportedValue, read_reported, reported_so_far
from paceline.analysis.scored_weights import kind_of
from paceline.config import is_simulated
from paceline.runs.events import RowParser, read_tail
from paceline.runs.folder import RunFolder

PARTS = ("computing", "sending", "waiting", "server")  # the parts of a worker's time, as the `workers` events name them
COLUMNS = ("worker", "state", "steps", "pushes", "staleness", "ago")
WINDOW_SECONDS = 30.0  # length of the latest events that the status of a running run covers
TAIL_BYTES = 1 << 20
ENDED = ("finished", "stopped", "diverged", "collapsed")
UNDER_WAY = ("starting", "running", "evaluating")
STARTS = ("run_started", "run_resumed")
Row = dict[str, Any]


@dataclass(frozen=True)
class WorkerStatus:
    """Status of one worker; None means not measured."""

    worker: int
    state: str  # live, held (by the server), draining, paused, stalled, lost, awaited, drained or done
    shares: dict[str, float] = field(default_factory=dict)  # shares of its time, by part
    step_seconds: float | None = None
    """Mean over the period of all figures, without the longest push: one pause makes no worker slow."""
    sending_seconds: float | None = None  # seconds per push
    steps: int = 0  # number of steps behind the shares and seconds
    pushes: int | None = None
    staleness: float | None = None
    ago: float | None = None  # seconds since its last message
    silent: float | None = None
    normal: float | None = None
    """For a paused worker: seconds of silence on its turn, and how many are normal. For a stalled one: seconds without
    a step, and seconds of its usual step."""


@dataclass(frozen=True)
class RunStatus:
    """Status of one run; None means unknown."""

    run: str
    strategy: str
    model: str
    num_workers: int
    status: str  # starting, running, evaluating or killed; or that of the result, one of ENDED
    reason: str | None = None
    dataset: str = "-"
    subject: str = ""  # the model and its data, as `analysis.naming` writes them
    simulated: bool = False
    updates: int = 0
    fraction: float | None = None  # share of the budget
    rate: float | None = None  # samples per second
    seconds: float = 0.0  # seconds of training, by the run's clock
    seconds_left: float | None = None
    quiet_seconds: float | None = None  # seconds since the last write, while it runs
    deals: int = 0  # number of times the data was reassigned because the set of workers changed
    span: float | None = None  # seconds of training that the workers' figures cover; None: all since the server started
    workers: tuple[WorkerStatus, ...] = ()
    workers_at: float | None = None  # when the workers' figures were written, by the run's clock; None: never
    samples: int = 0
    unit: str = "samples"  # what `samples` and `rate` count: `pushes` of loops that draw their own batches
    loss: float | None = None  # of an ended run that scored its train data, that score; else of its latest pushes
    loss_at: int | None = None  # the update that the loss belongs to
    staleness: float | None = None  # mean over all pushes so far
    step_factor: float | None = None  # what the rule's step limit multiplied the learning rate by, as last written
    test_accuracy: float | None = None  # latest evaluation, in percent
    validation_accuracy: float | None = None
    weights: str = "live"  # those that are scored: live, or averaged
    reported: dict[str, ReportedValue] = field(default_factory=dict)  # metrics of an own loop: the values that hold
    damaged: tuple[str, ...] = ()  # sentences about parts of its files that cannot be read


class RunSnapshot(NamedTuple):
    """The status of a run, and the latest events behind it."""

    status: RunStatus
    events: list[Row]


def read_status(path: Path) -> RunStatus:
    """Return the status of the run in this folder."""
    return read_run_snapshot(path).status


def read_run_snapshot(path: Path) -> RunSnapshot:
    """Return the status of the run in this folder, and the latest events of its server."""
    folder = RunFolder.open(path)
    parser = RowParser(folder.events_file)
    events, quiet = _latest(folder, parser)
    return RunSnapshot(_status_of(folder, events, quiet, parser.notes()), events)


def _status_of(folder: RunFolder, events: list[Row], quiet: float | None, damaged: list[str]) -> RunStatus:
    config, result = folder.config(), folder.result()
    simulated, settings = is_simulated(config), read_named_settings(folder, config, result)
    if result is None:
        progressed = any(row.get("kind") == "progress" for row in events)
        status, reason = status_without_result(folder, progressed, events[-1].get("kind") if events else None), None
    else:
        status, reason = result["status"], result.get("reason")
    last = _last(events, "progress")
    accounts = _last(events, "workers")
    workers, span = _workers(events, result, whole=simulated or status in ENDED)
    row = result or last
    deals: int = accounts.get("deal", 0)
    scored = (result or {}).get("train_loss")
    return RunStatus(
        run=str(folder.path),
        strategy=config.strategy,
        model=model_name(settings),
        dataset=dataset_name(settings),
        subject=subject(settings),
        num_workers=config.workers or 1,
        status=status,
        reason=reason,
        simulated=simulated,
        updates=row.get("updates", 0),
        fraction=1.0 if status == "finished" and not reason else last.get("fraction"),
        rate=row.get("rate", row.get("samples_per_second")),
        seconds=row.get("train_seconds") or max((one.get("now", 0.0) for one in events), default=0.0),
        seconds_left=None if simulated or status != "running" else seconds_left(events),
        quiet_seconds=quiet if status in UNDER_WAY else None,
        deals=row.get("deals", deals),
        span=span,
        workers=tuple(workers),
        workers_at=accounts.get("now"),
        samples=row.get("samples", 0),
        unit=(result or next(iter(events), {})).get("unit") or "samples",
        loss=scored if scored is not None else last.get("loss"),
        loss_at=row.get("updates") if scored is not None else last.get("updates"),
        staleness=last.get("staleness"),
        step_factor=last.get("step_factor"),
        test_accuracy=(result or _last(events, "evaluation")).get("test_accuracy"),
        validation_accuracy=(result or _last(events, "evaluation")).get("validation_accuracy"),
        weights=kind_of(result or {}, config),
        reported=read_reported(result) if result is not None else reported_so_far(events),
        damaged=tuple(damaged),
    )


def _latest(folder: RunFolder, parser: RowParser) -> tuple[list[Row], float | None]:
    """Return the latest events of the last server, and the seconds since it wrote them."""
    try:
        quiet = round(max(0.0, time.time() - folder.events_file.stat().st_mtime), 3)
        events = read_tail(folder.events_file, TAIL_BYTES, parser)
    except FileNotFoundError:
        return [], None
    starts = [place for place, row in enumerate(events) if row.get("kind") in STARTS]
    return events[starts[-1] :] if starts else events, quiet


def _last(events: list[Row], kind: str) -> Row:
    """Return the last event of this kind; empty if there is none."""
    return next((row for row in reversed(events) if row.get("kind") == kind), {})


def status_without_result(folder: RunFolder, progressed: bool, last_kind: str | None) -> str:
    """Return the status of a run without a result, from whether it progressed and its last event."""
    if not folder.is_locked():
        return "killed"
    if not progressed:
        return "starting"
    return "evaluating" if last_kind == "scoring" else "running"


def seconds_left(events: Iterable[Row]) -> float | None:
    """Estimate the remaining seconds from the progress in the latest events."""
    progress = (row for row in events if row.get("kind") == "progress")
    rows = [(row["now"], row["fraction"]) for row in progress if row.get("fraction") is not None]
    latest = [row for row in rows if row[0] >= rows[-1][0] - WINDOW_SECONDS]
    if len(latest) < 2:
        return None
    (began, before), (now, fraction) = latest[0], latest[-1]
    return round((1.0 - fraction) * (now - began) / (fraction - before), 1) if fraction > before else None


def _workers(events: list[Row], result: Row | None, whole: bool) -> tuple[list[WorkerStatus], float | None]:
    rows = [row for row in events if row.get("kind") == "workers" and is_whole(row)]
    if not rows:
        return workers_of_result(result), None
    last = rows[-1]
    earlier = [row for row in rows[:-1] if row["now"] >= last["now"] - WINDOW_SECONDS]
    if whole or not earlier or not any(last["steps"]):
        return workers_of(last), None
    return workers_of(last, earlier[0]), round(last["now"] - earlier[0]["now"], 3)


def workers_of_result(result: Row | None) -> list[WorkerStatus]:
    """Return what the result tells of each worker, which knows fewer parts of its time than a `workers` event."""
    shares = (result or {}).get("utilisation") or []
    return [WorkerStatus(worker, "done", dict(parts)) for worker, parts in enumerate(shares)]


def is_whole(row: Row) -> bool:
    """Return whether all columns are present, with one value per worker."""
    columns = [row.get(name) for name in COLUMNS] + [row[name] for name in (*PARTS, "longest", "send") if name in row]
    return all(isinstance(column, list) and len(column) == len(columns[0] or ()) for column in columns)


def workers_of(row: Row, since: Row | None = None) -> list[WorkerStatus]:
    """Return the status of each worker in a `workers` event: since an earlier event, or since the server started."""
    parts = [part for part in PARTS if part in row]
    places = {worker: place for place, worker in enumerate(since["worker"])} if since is not None else {}

    def grown(name: str, place: int) -> float:
        value: float = row[name][place]
        before = places.get(row["worker"][place])
        return max(0.0, value - since[name][before]) if since and name in since and before is not None else value

    found = []
    for place, worker in enumerate(row["worker"]):
        seconds = {part: grown(part, place) for part in parts}
        steps, whole = int(grown("steps", place)), sum(seconds.values())
        pushes, sent = grown("pushes", place), seconds.get("sending")
        longest = row["longest"][place] if "longest" in row and grown("longest", place) else 0.0
        silent, normal = {**row.get("paused", {}), **row.get("stalled", {})}.get(str(worker), (None, None))
        found.append(
            WorkerStatus(
                worker,
                row["state"][place],
                {part: round(value / whole, 4) for part, value in seconds.items()} if whole else {},
                _per_step(seconds.get("computing"), longest, pushes, steps),
                min([sent / pushes, *row.get("send", [])[place : place + 1]]) if sent is not None and pushes else None,
                steps,
                row["pushes"][place],
                row["staleness"][place],
                row["ago"][place],
                silent,
                normal,
            )
        )
    return found


def _per_step(computing: float | None, longest: float, pushes: float, steps: int) -> float | None:
    """Return the mean seconds of a step without the longest push, which may be a pause.

    >>> _per_step(computing=25.0, longest=20.0, pushes=6, steps=12)
    0.5
    """
    if computing is None or not steps:
        return None
    others = max(0.0, computing - longest) * pushes / (pushes - 1) if longest and pushes > 1 else computing
    return others / steps
