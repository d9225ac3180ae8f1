"""Report a run's progress: to the user several times a second, and as rows in the run's events."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import torch

from paceline.config import RunConfig
from paceline.core.messages import (
    DataAssignment,
    Drain,
    Expel,
    Input,
    Join,
    Leave,
    SetLocalSteps,
    SkipBatch,
    Stop,
)
from paceline.core.own_loop.settings import SettingsDisagreement
from paceline.core.server import Finding, Server
from paceline.interfaces import Report
from paceline.runs.events import EventLog
from paceline.runs.result import moved_bytes
from paceline.runtimes.server.accounting import TimeAccounting
from paceline.runtimes.server.timing import TrainingClock
from paceline.tasks.given_weights import InitialWeights

MAX_TOLD, MAX_ROWS = 3, 20
"""Of what the guard finds and nobody is expelled for: workers that the user is told about, and event rows for each."""
SHARE = 0.002  # most of the server's time that computing norms may take


class WeightNorm:
    """Computes the norm of all weights, but not so often that it costs much of the server's time."""

    def __init__(self, server: Server, virtual: bool) -> None:
        self._server, self._virtual = server, virtual
        self._next = 0.0

    def norm(self) -> float | None:
        """The norm to six digits; None if there are no weights or the last one is too recent.

        Under a virtual clock it is computed every time, so that equal runs have equal rows.
        """
        began = time.perf_counter()
        if not self._server.weights.numel() or (not self._virtual and began < self._next):
            return None
        norm = float(torch.linalg.vector_norm(self._server.weights))
        ended = time.perf_counter()
        self._next = ended + (ended - began) / SHARE
        return float(f"{norm:.6g}") if math.isfinite(norm) else None


class EventRecorder:
    """Writes an event for each input other than a push, and notifies the user of what matters at once."""

    def __init__(self, server: Server, events: EventLog, report: Report) -> None:
        self._server, self._events, self._report = server, events, report
        self.lost: list[int] = []
        self.away: set[int] = set()  # lost workers that have not joined again
        self.generation = server.assignments.now.generation if server.assignments is not None else 0
        """Of the data assignment that the last event was about."""
        self._divided_over = server.assignments.now.members if server.assignments is not None else ()
        self._disagreement_told = False
        self._is_loop_done = False  # whether the last change of membership is a loop that came to its end
        self._found = Counter[tuple[str, int]]()  # how often, by kind and worker, the guard found something

    def take(self, message: Input, now: float, stop_reason: str | None) -> None:
        """Write the event of an input that the server has accepted."""
        if isinstance(message, Join | Leave | Drain):
            self._is_loop_done = isinstance(message, Leave) and message.done
        if isinstance(message, Join):
            row = {"worker": message.worker, "incarnation": message.incarnation, "threads": message.threads}
            self._events.write("worker_joined", now, **row)
            self.away.discard(message.worker)
        elif isinstance(message, Leave) and not self._server.finished:
            self._leave(message, now)
        elif isinstance(message, Expel):
            self._lose(message.worker, now)
        elif isinstance(message, SkipBatch):
            self._events.write("batch_skipped", now, worker=message.worker, batch=message.batch)
            self._report({"kind": "note", "text": f"batch {message.batch} of worker {message.worker} is passed over"})
        elif isinstance(message, SetLocalSteps):
            self._events.write("local_steps", now, worker=message.worker, steps=message.steps)
        elif isinstance(message, Drain):
            self._events.write("worker_draining", now, worker=message.worker)
            self._report({"kind": "note", "text": f"worker {message.worker} is drained: it leaves after its push"})
        elif isinstance(message, Stop):
            self._events.write("stopped", now, reason=stop_reason)

    def _leave(self, message: Leave, now: float) -> None:
        member, live = self._server.members.get(message.worker), self._server.num_live
        if member is not None and member.released:
            self._events.write("worker_left", now, worker=message.worker, pushes=member.pushes)
        elif message.worker not in self.away and (member is None or not member.inactive):
            pushes = self._lose(message.worker, now)
            self._report({"kind": "lost", "worker": message.worker, "live": live, "pushes": pushes})

    def _lose(self, worker: int, now: float) -> int:
        """Count a worker as lost; returns how many pushes it had sent."""
        self.lost.append(worker)
        self.away.add(worker)
        pushes = self._server.members[worker].pushes if worker in self._server.members else 0
        self._events.write("worker_lost", now, worker=worker, pushes=pushes, live=self._server.num_live)
        return pushes

    def rows(self) -> dict[str, Any]:
        """Rows of the result: how often the data was reassigned, and lost workers that have joined again."""
        deals = {"deals": self.generation} if self._server.assignments is not None else {}
        returned = sorted(set(self.lost) - self.away)
        return {**deals, **({"returned_workers": returned} if returned else {})}

    def findings(self, found: list[Finding], now: float) -> None:
        """Write what the guard found; of what does not expel, tell only the first of the first few workers.

        Of pushes that are not finite, tell the first alone: those of other workers have the same cause.
        """
        for worker, kind, why in found:
            self._found[kind, worker] += 1
            often, workers = self._found[kind, worker], sum(one == kind for one, _ in self._found)
            if kind == "expelled" or often <= MAX_ROWS:
                self._events.write(kind, now, worker=worker, why=why)
            if kind == "expelled" or (often == 1 and workers <= (1 if kind == "not_finite" else MAX_TOLD)):
                verb = {"expelled": " is expelled", "suspicious": " looks suspicious"}.get(kind, "")
                too = ""
                if kind == "suspicious" and self._server.num_workers == 1:
                    verb, too = "", ", so the steps may be too long"
                elif kind == "suspicious" and workers > 1:
                    too = "; several workers do, so the steps may be too long"
                self._report({"kind": "note", "text": f"worker {worker}{verb}: {why}{too}"})
        found.clear()

    def assignment(self, assignment: DataAssignment, now: float) -> None:
        """Write that the data was divided again; the log needs no record, since its inputs determine the division."""
        self.generation, members, first_pass = assignment
        since = {"first_pass": first_pass} if first_pass else {}
        row = {"generation": self.generation, "members": members, **since}
        self._events.write("deal", now, **row, updates=self._server.version)
        if first_pass and not self._is_loop_done:
            who = f"worker{'s' * (len(members) > 1)} {', '.join(map(str, members))}"
            what = f"from pass {first_pass + 1} on, the data is divided over {who}"
            left_out = "; until then, the part of a worker that left is left out"
            self._report({"kind": "note", "text": what + left_out * bool(self._has_left(members))})

    def _has_left(self, members: tuple[int, ...]) -> bool:
        """Whether a worker is among those of the division before, and not among these."""
        before, self._divided_over = self._divided_over, members
        return bool(set(before) - set(members))

    def disagreement(self, found: SettingsDisagreement, now: float) -> None:
        """Tell the user once that the scripts' optimizers have different settings in a round."""
        if self._disagreement_told:
            return
        self._disagreement_told = True
        used, other, setting, (one, another) = found
        self._events.write("settings_disagreement", now, used=used, other=other, setting=setting, values=[one, another])
        what = f"in a round, {setting} of worker {used} is {one:g}, that of worker {other} {another:g}"
        self._report({"kind": "note", "text": f"{what}: a round uses the settings of the lowest-numbered live worker"})

    def begins_from(self, initial: InitialWeights, now: float) -> None:
        """Write and tell which file the weights of the run begin from; the row names all tensors that did not fit."""
        self._events.write("initial_weights", now, **initial.row())
        self._report({"kind": "note", "text": initial.line()})

    def fault(self, fault: dict[str, Any], now: float) -> None:
        """Write that a fault was injected."""
        row = {name: value for name, value in fault.items() if name != "kind"}
        self._events.write("fault", now, fault=fault["kind"], **row)


ACCOUNT_SECONDS = 2.0
BYTES_A_SECOND = 4096.0
"""Limit on the size of all rows: longer rows are written less often. 1,000 workers take 80 kB, so one every 20 s."""
OFTEN_VIRTUAL, MANY_VIRTUAL = 0.1, 100
"""A simulated run writes a row at every tenth of its budget; with more workers than this only at its end."""


class AccountRows:
    """Writes the workers' accounts as events, less often the longer they are; also while no worker pushes."""

    def __init__(self, accounts: TimeAccounting, server: Server, events: EventLog, clock: TrainingClock) -> None:
        self._accounts, self._server, self._events, self._clock = accounts, server, events, clock
        self.next_due = 0.0  # by the clock's source; in a simulated run the share of its budget

    def write_if_due(self, share: float | None = None) -> None:
        """Write a row if one is due; `share` of its budget is what a simulated run has done, None in a real run."""
        at = self._clock.source() if share is None else share
        if at >= self.next_due and (share is None or self._server.num_workers <= MANY_VIRTUAL):
            nbytes = self.write()
            pause = max(ACCOUNT_SECONDS, nbytes / BYTES_A_SECOND) if share is None else OFTEN_VIRTUAL
            self.next_due = at + pause

    def write(self) -> int:
        """Write a row now; returns its size in bytes."""
        row = self._accounts.row(self._server, self._clock.source())
        return self._events.write("workers", self._clock.now(), **row)


REPORT_SECONDS, ROW_SECONDS = 0.25, 1.0
VIRTUAL_SHARE = 0.01  # a simulated run reports at every hundredth of its budget, since its seconds are virtual


class Progress:
    """The progress of one server, averaged since the last event row."""

    def __init__(
        self, server: Server, config: RunConfig, events: EventLog, report: Report, seconds: float, virtual: bool
    ) -> None:
        self._server, self._config, self._events, self._report = server, config, events, report
        self._limit = config.max_seconds
        self._weighing = WeightNorm(server, virtual)
        self.next_share = 0.0 if virtual else None
        """The share of the budget at which a simulated run reports next; None for a real run."""
        self.next_due = 0.0  # when to call `is_due` again
        self._next_row, self._since, self._samples_then = 0.0, seconds, server.samples
        self.losses: list[float] = []  # of the pushes since the last event row

    def is_due(self, now: float) -> bool:
        """Whether to report now."""
        return now >= self.next_due if self.next_share is None else self.share(now) >= self.next_share

    def share(self, now: float) -> float:
        """The share of the run that is done, by the budget or the time limit, whichever is further."""
        server, limit = self._server, self._limit
        done = server.budget.fraction(server.samples, server.version)
        return done if limit is None else max(done, min(1.0, now / limit))

    def tell(self, now: float, with_norm: bool) -> None:
        """Report to the user, and write an event row if one is due; `with_norm` if all weights are in this process."""
        server, span, share = self._server, now - self._since, self.share(now)
        loss = sum(self.losses) / len(self.losses) if self.losses else math.nan
        row = {
            "updates": server.version,
            "samples": server.samples,
            "fraction": round(share, 6) if server.budget.is_known or self._limit is not None else None,
            "loss": round(loss, 6) if math.isfinite(loss) else None,
            "rate": round((server.samples - self._samples_then) / span, 1) if span > 0 else None,
            "staleness": round(sum(k * c for k, c in server.staleness.items()) / max(1, server.staleness.total()), 3),
            "live": server.num_live,
            "lr": server.lr_inside,
            **_limited(server),
        }
        self._report({"kind": "progress", "now": round(now, 3), **row})
        if self.next_share is None:
            self.next_due = now + REPORT_SECONDS
        else:
            self.next_share, self._next_row = share + VIRTUAL_SHARE, now
        if now >= self._next_row and self.losses:
            norm = self._weighing.norm() if with_norm else None
            more = {"norm": norm} if norm is not None else {}
            self._events.write("progress", now, **row, **moved_bytes(self._config, server), **more)
            self._next_row = now + ROW_SECONDS
            self._since, self._samples_then = now, server.samples
            self.losses.clear()


def _limited(server: Server) -> dict[str, float]:
    """What the rule's step limit, if there is one, multiplied the learning rate of the last update by."""
    limit = server.rule_state.get("limit")
    return {"step_factor": round(1.0 / float(limit[-1]), 4)} if limit is not None else {}


def own_names(task: Any, config: RunConfig) -> dict[str, Any]:
    """The names of a user's own model and data, for the result: those of the settings did not apply."""
    if task is None or config.task is None:
        return {}
    return {"model": type(task.model).__name__, "dataset": None}


def run_row(config: RunConfig, updates: int, facts: dict[str, Any]) -> dict[str, Any]:
    """The fields of the event that begins a run, or goes on with it."""
    own = {
        name: facts[name] for name in ("model", "dataset", "decided_by_script", "unit") if facts.get(name) is not None
    }
    return {"workers": config.workers, "strategy": config.strategy, "updates": updates, **own}
