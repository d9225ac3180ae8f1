"""The host of the pure Server in a real run: gives it a clock and a log, hands out weights, evaluates, ends the run.

Each input goes: server, log, then for each reply the weights into the worker's memory and the reply to the worker.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from paceline.assembly.work import Work
from paceline.config import RunConfig, is_simulated
from paceline.core.buffers import Memory
from paceline.core.messages import Drain, Input, Join, Leave, Outcome, Push, Reply, Stop, Verdict
from paceline.core.server import Server
from paceline.errors import UserError
from paceline.interfaces import Report, Scores
from paceline.runs.arrival_log import ArrivalLog
from paceline.runs.control_files import pop_requests
from paceline.runs.events import EventLog
from paceline.runs.folder import ALL_GONE, NOT_COME, TIME_IS_UP, RunFolder, write_atomically
from paceline.runs.recovery import Rebuilt
from paceline.runs.result import finite, summarise, trained_tensors, weights_sha256, why_diverged
from paceline.runs.snapshots import Best, snapshots_of
from paceline.runtimes.server.accounting import BYTES_A_SECOND, MANY_VIRTUAL, OFTEN_VIRTUAL, ROW_SECONDS, Accounts
from paceline.runtimes.server.checkpoints import Checkpoints
from paceline.runtimes.server.evaluation import Scorer, named
from paceline.runtimes.server.progress import Notes, Progress
from paceline.runtimes.server.timing import Timekeeper, TrainingClock
from paceline.settings.stopping import goal_of, measure_of
from paceline.system.environment import environment
from paceline.system.signals import INTERRUPTED, TERMINATED
from paceline.tasks.script_model import ScriptModel
from paceline.tasks.supervised import SupervisedTask
from paceline.tasks.synthetic import TimingModel
from paceline.tracking.process import Trackers


def _all_is_here() -> None:
    """One server holds all weights."""


def _nobody(reply: Reply) -> None:
    raise AssertionError(f"no runtime has said how to send {reply}")


class Host:
    """Runs one Server for real."""

    def __init__(
        self,
        server: Server,
        task: SupervisedTask | ScriptModel | TimingModel,
        work: Work | None,
        config: RunConfig,
        folder: RunFolder,
        report: Report,
        seconds: float = 0.0,
        facts: dict[str, Any] | None = None,
        source: Callable[[], float] | None = None,
    ) -> None:
        self.server, self.config, self.folder = server, config, folder
        self.task = task if isinstance(task, SupervisedTask) else None
        self._trained = task
        self._num_parameters = (task if isinstance(task, TimingModel) else task.layout).num_parameters
        self.work = work
        self.memories: dict[int, Memory] = {}
        self.send: Callable[[Reply], None] = _nobody
        self.may_be_cut: Callable[[], bool] = lambda: True
        """Whether workers' memories hold all that belongs into a checkpoint."""
        self.announce: Callable[[Input], None] = lambda message: None
        """Told of every input before it is handled."""
        self.gather: Callable[[], None] = _all_is_here
        """Brings all weights and rule state here, where other servers have parts of them."""
        self.stop_reason: str | None = None
        self.figures: dict[str, dict[str, float]] = {}
        self.timekeeper = Timekeeper()
        self.accounts = Accounts(self.timekeeper)
        self.clock = TrainingClock(seconds, source) if source is not None else TrainingClock(seconds)
        self._is_virtual = source is not None
        folder.result_file.unlink(missing_ok=True)  # from here on the run is going on again
        self.events = EventLog(folder.events_file)
        self.log = ArrivalLog(folder.arrivals_file, config)
        self._facts = facts or {}
        self._report = report
        self._checkpoints = Checkpoints(
            server, config, folder, self.log, self.events, report, seconds, self._is_virtual
        )
        writer = self._checkpoints.writer
        self._snapshots = snapshots_of(config, folder, server, task, writer)
        scored = config.eval_every is not None and source is None
        kept = scored and isinstance(task, SupervisedTask)
        self._best = Best(folder, task, writer, measure_of(config)) if kept else None
        self._goal = goal_of(config)
        self.in_groups = False
        """Whether whoever brings inputs calls `commit` after several of them, not this host after each."""
        self._unsent: list[Reply] = []
        self.first_incarnation = 0
        """Of a worker that joins: those before may have been somebody's whose join was taken back."""
        self._progress = Progress(server, self.events, report, seconds, config.max_seconds, self._is_virtual)
        self._next_accounts = 0.0
        self._next_evaluation = self._evaluation_after(server.samples)
        self._notes = Notes(server, self.events, report)
        self._scorer = Scorer(server, work, self.events, self.clock, self.timekeeper)
        kind = "run_resumed" if server.version or seconds else "run_started"
        self.events.write(kind, seconds, workers=config.workers, strategy=config.strategy, updates=server.version)
        self._trackers = Trackers(config.track or [], folder, report)

    def handle(self, message: Input) -> None:
        """Take one input through the server and the log, and answer the workers it sets free.

        Each is sent its reply as soon as its own copy of the weights is made; what can wait comes after.
        """
        try:
            self._handle(message)
            if not self.in_groups:
                self.commit()
        except OSError as error:
            raise self._disk_error(error) from None

    def commit(self) -> None:
        """Where the log must be on disk before a reply leaves: sync it once, then send all replies that wait for it."""
        if self._unsent:
            try:
                self.log.sync()
            except OSError as error:
                raise self._disk_error(error) from None
            unsent, self._unsent = self._unsent, []
            for reply in unsent:
                self.send(reply)

    def go_on(self, rebuilt: Rebuilt) -> None:
        """The first input of a resumed run, and a row of what it took to be back."""
        self.handle(rebuilt.resume)
        self.first_incarnation = rebuilt.incarnation
        row = {"updates": self.server.version, "checkpoint": rebuilt.checkpoint, "recomputed_pushes": rebuilt.pushes}
        seconds = {} if self._is_virtual else {"seconds": round(rebuilt.seconds, 3)}
        self.events.write("recovered", self.clock.now(), **row, lost_pushes=rebuilt.resume.lost, **seconds)

    def _handle(self, message: Input) -> None:
        now, began = self.clock.now(), self.clock.source()
        self.announce(message)
        self.accounts.heard(message, self.server, began)
        outcome = self.server.handle(message)
        self.log.append(message, outcome.verdict, now)
        if self.server.samples >= self._next_evaluation and not self.server.over:
            self._evaluate_on_the_way()
        if self.server.over:
            self.clock.halt()
        elif self.server.started and isinstance(message, Join | Leave):
            self.clock.go()  # who came, or will never come, was the last to be awaited
        self._reply(outcome, began)
        if isinstance(message, Push):
            self._progress.count(message.loss)
        elif outcome.verdict == Verdict.TAKEN:
            self._notes.take(message, now, self.stop_reason)
        if self._progress.is_due(now):
            self.tell_progress()
        if self._snapshots is not None:
            self._keep_weights()
        self._notes.look_for_a_deal(now)
        if self._checkpoints.look(now, self.memories, self.may_be_cut):
            self.checkpoint()

    def _reply(self, outcome: Outcome, began: float) -> None:
        """Each worker is sent its reply as soon as its copy is made, or where the log is synced when that is done."""
        for reply in outcome.replies:
            if outcome.verdict != Verdict.REPEATED:  # then the memory holds what that reply was about
                self.server.hand_out(reply, self.memories[reply.worker])
            if self.config.durable:
                self._unsent.append(reply)
            else:
                self.send(reply)
            self.accounts.answered(reply, began, self.clock.source())

    @property
    def is_cut_due(self) -> bool:
        """Whether the next checkpoint is only waiting for its moment."""
        return self._checkpoints.is_due(self.clock.now())

    def _keep_weights(self) -> None:
        """A snapshot, where one is due; written before any later checkpoint, so that a resumed run misses none."""
        assert self._snapshots is not None
        if self.server.over or self._snapshots.is_due(self.server):
            self.gather()
        self._snapshots.take_if_due(self.server)
        if self.server.over:
            self._snapshots.take_final(self.server)

    def _disk_error(self, error: OSError) -> UserError:
        what = (
            "no space is left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"writing failed ({error.strerror})"
        )
        return UserError(
            f"{what} in {self.folder.path} at update {self.server.version}: make room, then "
            f"{self.folder.resume_hint(self.config)}"
        )

    @property
    def lost(self) -> list[int]:
        """Workers that were lost, in that order."""
        return self._notes.lost

    def note_fault(self, fault: dict[str, Any]) -> None:
        """The event row of a fault that was fired on purpose."""
        self._notes.fault(fault, self.clock.now())

    def look_for_requests(self) -> None:
        """Do what somebody outside asks for in the run's folder; whoever waits for inputs in vain may look too."""
        for request in pop_requests(self.folder):
            refused = {worker: self.drain(worker) for worker in request.drain}
            request.answer({worker: why for worker, why in refused.items() if why is not None})

    def drain(self, worker: int) -> str | None:
        """Have a worker leave after the push it is making; returns why that cannot be, if it cannot."""
        member = self.server.members.get(worker)
        if self.server.over:
            return "training is over"
        if member is None or not member.live or member.dismissed:
            here = [number for number, one in sorted(self.server.members.items()) if one.live and not one.done]
            return f"it is not at work here; workers {', '.join(map(str, here)) or 'none'} are"
        if member.done or member.draining:
            return "it has no work left" if member.done else "it is being drained already"
        self.handle(Drain(worker))
        return None

    def stop(self, reason: str) -> None:
        """End the run from outside; the reason goes into the result."""
        if not self.server.over:
            self.stop_reason = reason
            self.handle(Stop())

    @property
    def seconds_left(self) -> float:
        """Until --max-seconds are over, while the clock runs."""
        limit = self.config.max_seconds
        return math.inf if limit is None or self.server.over else max(0.0, limit - self.clock.now())

    def look_at_the_clock(self) -> None:
        """Whoever brings inputs asks for this between two of them: the stop is an input like any other, and logged."""
        if not self.seconds_left:
            self.stop(TIME_IS_UP)

    def tell_progress(self) -> None:
        """To the user and to whoever tracks the run; and what has to be looked at now and then is."""
        self._progress.tell(self.clock.now(), with_norm=self.gather is _all_is_here)
        if not self._is_virtual:
            self.look_for_requests()
        self._trackers.poll()
        self.tick()

    def tick(self) -> None:
        """Write down where each worker's time went, now and then; in silence too, so that silence is seen."""
        share = self._progress.next_share
        at = self.clock.source() if share is None else share
        if at >= self._next_accounts and (share is None or self.server.num_workers <= MANY_VIRTUAL):
            try:
                nbytes = self._write_accounts()
            except OSError as error:
                raise self._disk_error(error) from None
            self._next_accounts = at + (max(ROW_SECONDS, nbytes / BYTES_A_SECOND) if share is None else OFTEN_VIRTUAL)

    def _write_accounts(self) -> int:
        return self.events.write("workers", self.clock.now(), **self.accounts.row(self.server, self.clock.source()))

    def checkpoint(self) -> None:
        """Cut now; the cut is written beside the run."""
        self._checkpoints.take(self.clock.now(), self.memories, self.gather)

    def checkpoint_now(self) -> None:
        """Cut, and return when that is on disk."""
        try:
            self._checkpoints.take_and_wait(self.clock.now(), self.memories, self.gather)
        except OSError as error:
            raise self._disk_error(error) from None

    def _evaluation_after(self, samples: int) -> float:
        if self.config.eval_every is None:
            return math.inf
        step = self.config.eval_every * self.server.budget.epoch_samples
        return (math.floor(samples / step) + 1) * step

    def _evaluate_on_the_way(self) -> None:
        """Pause the clock, score the test data, and stop when the target is reached."""
        self._next_evaluation = self._evaluation_after(self.server.samples)
        if self.task is None or self.task.test is None:
            return
        self.clock.halt()
        began, halted = time.perf_counter(), self.clock.source()
        self.gather()
        scores = self._scorer.score(self.task, "test")
        seconds = {} if is_simulated(self.config) else {"test_seconds": round(time.perf_counter() - began, 3)}
        assert scores is not None
        found = named("test", scores)
        if self._best is not None:
            self._best.save_if_best(self.server, scores)
        if self.config.eval_train and (train := self._scorer.score(self.task, "train")) is not None:
            found |= named("train", train)
        at = {"updates": self.server.version, "samples": self.server.samples}
        self.events.write("evaluation", self.clock.now(), **at, **found, **seconds)
        epochs = self.server.samples / self.server.budget.epoch_samples
        accuracy = f"test accuracy {scores.accuracy:.2f} %, " if scores.per_class else ""
        metrics = "".join(f", {name} {value:.4g}" for name, value in scores.metrics.items())
        text = f"epoch {epochs:.2f}: {accuracy}test loss {scores.loss:.4f}{metrics}"
        self._report({"kind": "note", "text": text})
        self.accounts.deadlines.excuse(self.clock.source() - halted)
        self.clock.go()
        if self._goal is not None and self._goal.is_met(scores.value(self._goal.metric)):
            self.stop(self._goal.reason)

    def note_figures(self, worker: int, figures: dict[str, float]) -> None:
        """What a user's own loop measured: for the result and the events, and perhaps what the run was to reach."""
        self.figures.setdefault(str(worker), {}).update(figures)
        row = {"samples": self.server.samples, "figures": finite(figures)}
        self.events.write("reported", self.clock.now(), worker=worker, **row)
        if self._goal is not None and self._goal.is_met(figures.get(self._goal.metric)):
            self.stop(self._goal.reason)

    def named_weights(self) -> dict[str, Tensor]:
        """The trained tensors by name, for `load_state_dict`."""
        return trained_tensors(self.server, self._trained)

    @property
    def status(self) -> str:
        """How the run ended: finished, diverged or stopped."""
        if self.server.divergence is not None or not torch.isfinite(self.server.weights).all():
            return "diverged"
        as_asked = self.stop_reason is not None and self.stop_reason.startswith(("target", TIME_IS_UP))
        return "finished" if self.stop_reason is None or as_asked else "stopped"

    def _worth_scoring(self) -> tuple[str, ...]:
        """All data after a finished run, test data after Ctrl-C, nothing when the machine is being taken away."""
        if self.task is None or self.status == "diverged" or self.stop_reason in (ALL_GONE, NOT_COME, TERMINATED):
            return ()
        last = "test" if self.config.fold is None else "validation"
        if self.config.score == "none":
            return ()
        return (
            (last,)
            if self.stop_reason == INTERRUPTED or self.config.score == "test"
            else tuple(dict.fromkeys(("train", "validation", last)))
        )

    def finish(self, found: dict[str, Any] | None = None) -> dict[str, Any]:
        """Score, save the weights, write the result (with what else was found) last of all, and return it."""
        self.clock.halt()
        self.gather()
        status = self.status
        self._write_accounts()
        timing = self.timekeeper.row(self.server.pushes)
        if timing is not None:
            self.events.write("timing", self.clock.now(), **timing)
            found = {"utilisation": self.timekeeper.shares(self.server.num_workers), **(found or {})}
        scores: dict[str, Scores | None] = {}
        for which in self._worth_scoring():
            self._report({"kind": "scoring", "which": which})
            assert self.task is not None, "only what has data is worth scoring"
            scores[which] = self._scorer.score(self.task, which)
        try:
            if status == "stopped" and self.server.can_be_cut and not self.config.timing_only:
                self.checkpoint()
            if self._best is not None and (last := scores.get("test")) is not None:
                self._best.save_if_best(self.server, last)
            self._checkpoints.writer.wait()
            self._checkpoints.complain(self.clock.now())
            tensors = self.named_weights()
            write_atomically(self.folder.weights_file, save(tensors))
            if self.server.evaluated is not self.server.weights:
                live = trained_tensors(self.server, self._trained, live=True)
                write_atomically(self.folder.live_weights_file, save(live))
            result = {
                **summarise(self.config, self.server, self.clock.now(), scores),
                "weights_sha256": weights_sha256(tensors),
                "num_parameters": self._num_parameters,
                "status": status,
                "reason": why_diverged(self.config, self.server) if status == "diverged" else self.stop_reason,
                "lost_workers": self._notes.lost,
                **({"deals": self._notes.generation} if self.server.deals is not None else {}),
                **self._checkpoints.upkeep(),
                **({"best": self._best.found} if self._best is not None else {}),
                **({"reported": {key: finite(row) for key, row in self.figures.items()}} if self.figures else {}),
                **(found or {}),
                **self._facts,
                "environment": environment(),
            }
            self.events.write("run_ended", self.clock.now(), status=status, updates=self.server.version)
            self.folder.write_result(result)
        except OSError as error:
            raise self._disk_error(error) from None
        self._trackers.end(hurry=self.stop_reason == TERMINATED)
        return result

    def close(self) -> None:
        """Let go of the files."""
        self._trackers.close()
        self._checkpoints.writer.close()
        self.events.close()
        self.log.close()
