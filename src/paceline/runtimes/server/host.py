"""Host the pure Server in a real or simulated run: clock, arrival log, events, checkpoints, evaluation, result.

Each input is announced, handled by the server and logged; then each reply's weights are written into the worker's
memory and the reply is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from paceline.analysis.collapse import logged_losses
from paceline.analysis.reported import ReportedMetrics
from paceline.assembly.non_finite import non_finite_row
from paceline.assembly.work import WorkAssignment
from paceline.config import RunConfig
from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Discard, Disposition, Drain, Expel, Input, Join, Leave, Outcome, Push, Reply, Stop
from paceline.core.server import PushGuard, Server
from paceline.core.worker import LocalWorker
from paceline.errors import UserError
from paceline.interfaces import Report
from paceline.runs.arrival_log import ArrivalLog
from paceline.runs.control_files import DrainRequests
from paceline.runs.events import EventLog
from paceline.runs.folder import TIME_IS_UP, RunFolder
from paceline.runs.recovery import PushValues, RecoveryResult
from paceline.runs.replay import recompute_push
from paceline.runs.result import finite, make_result, save_weights, status_of
from paceline.runs.snapshots import BestWeights, snapshots_of
from paceline.runtimes.server.accounting import TimeAccounting
from paceline.runtimes.server.checkpoints import Checkpoints
from paceline.runtimes.server.evaluation import Evaluator
from paceline.runtimes.server.progress import AccountRows, EventRecorder, Progress, own_names, run_row
from paceline.runtimes.server.runtime import Runtime
from paceline.runtimes.server.timing import TimingCollector, TrainingClock
from paceline.settings.stopping import chosen_part, goal_of, measure_of
from paceline.settings.strategies import on_ring
from paceline.system.signals import TERMINATED
from paceline.tasks.script_model import ScriptModel
from paceline.tasks.supervised import SupervisedTask
from paceline.tasks.synthetic import TimingModel
from paceline.tracking.process import Trackers


class Host:
    """Runs one Server: takes inputs in order, answers workers, and keeps the run's folder."""

    def __init__(
        self,
        server: Server,
        task: SupervisedTask | ScriptModel | TimingModel,
        work: WorkAssignment | None,
        config: RunConfig,
        folder: RunFolder,
        report: Report,
        runtime: Runtime,
        seconds: float = 0.0,
        facts: dict[str, Any] | None = None,
        source: Callable[[], float] | None = None,
    ) -> None:
        """`seconds` of training came before, in a resumed run. `source` is the clock of a simulated run."""
        self.server, self.config, self.folder, self.work = server, config, folder, work
        self.task = task if isinstance(task, SupervisedTask) else None
        self.memories: dict[int, WorkerBuffers] = {}
        self.on_gpu: set[int] = set()  # workers whose pushes the server cannot compute again bit for bit
        self.stop_reason: str | None = None
        self.reported = ReportedMetrics()
        self.first_incarnation = 0  # of workers: earlier ones may belong to joins that a resume has undone
        self.unsent: list[Reply] = []  # replies that `commit` will send (`--durable`)
        self.next_due = 0.0  # when to call `housekeep` next, by the clock's source
        self.timings = TimingCollector()
        self.accounting = TimeAccounting(self.timings, runtime.way, runtime.time_shares)
        self.clock = TrainingClock(seconds, source) if source is not None else TrainingClock(seconds)
        self.requests = DrainRequests(folder, self.drain, self._has_left, self._why_stalled)
        self._runtime, self._report, self._facts, self._trained = runtime, report, dict(facts or {}), task
        self._is_virtual = virtual = source is not None
        folder.result_file.unlink(missing_ok=True)  # from now on the run is not finished
        with ExitStack() as opened:  # if something cannot be opened or written, all that was opened is closed
            self.events = events = opened.enter_context(EventLog(folder.events_file))
            self.log = opened.enter_context(closing(ArrivalLog(folder.arrivals_file, config)))
            self._values = opened.enter_context(closing(PushValues(folder, config, self.log.nbytes)))
            self._checkpoints = Checkpoints(server, config, folder, (self.log, events, report), seconds, virtual)
            writer = opened.enter_context(closing(self._checkpoints.writer))
            self._snapshots = snapshots_of(config, folder, server, task, writer)
            best = folder, task, writer, chosen_part(config), measure_of(config)
            keeps_best = config.eval_every is not None and not virtual
            self._best = BestWeights(*best) if keeps_best and self.task is not None else None
            self._progress = Progress(server, config, events, report, seconds, virtual)
            self._account_rows = AccountRows(self.accounting, server, events, self.clock)
            self._notes, self._goal = EventRecorder(server, events, report), goal_of(config)
            scored = work, config, events, self.clock, self.timings, report, self._best
            self._evaluator = Evaluator(server, self.task, *scored)
            self._guard = self._make_guard()
            kind = "run_resumed" if server.version or seconds else "run_started"
            self._facts |= own_names(self.task, config)
            events.write(kind, seconds, **run_row(config, server.version, self._facts))
            if self.task is not None and (initial := self.task.initial_weights) is not None:
                self._facts["initial_weights"] = initial.row()
                if kind == "run_started":
                    self._notes.begins_from(initial, seconds)
            self._trackers = opened.enter_context(closing(Trackers(config.track or [], folder, report)))
            self._opened = opened.pop_all()

    def handle(self, message: Input) -> None:
        """Take one input through the server and the log, and answer the workers that it releases.

        Each worker is answered as soon as its copy of the weights is made; everything that can wait comes after.
        """
        server = self.server
        try:
            now, began = self.clock.now(), self.clock.source()
            if self._runtime.is_sharded:
                self._runtime.announce(message)
            self.accounting.on_input(message, server, began)
            self._values.append(message)
            outcome = server.handle(message)
            if outcome.disposition in (Disposition.DISCARDED, Disposition.EXPELLED):
                message, outcome = self._turn_down(message, outcome.disposition)
            self.log.append(message, outcome.disposition, now)
            if server.samples >= self._evaluator.next_samples and not server.finished:
                self._evaluate()
            if server.finished:
                self.clock.halt()
            elif isinstance(message, Join | Leave) and server.started:
                self.clock.go()  # it was the last worker that the start barrier waited for
            for reply in outcome.replies:
                if outcome.disposition != Disposition.REPEATED:  # else the memory holds that reply's weights already
                    server.send_weights(reply, self.memories[reply.worker])
                if self.config.durable:
                    self.unsent.append(reply)  # `commit` sends it, once the log is synced
                else:
                    self._runtime.send(reply, now >= self._checkpoints.next_checkpoint)
                self.accounting.on_reply(reply, began, self.clock.source())
            self._follow_up(message, outcome.disposition, now)
            if self.unsent and not self._runtime.groups_inputs:
                self.commit()
        except OSError as error:
            raise self._disk_error(error) from None

    def _make_guard(self) -> PushGuard | None:
        """The guard of a server that gets whole pushes; those of a ring are reduced, those of a shard are parts."""
        server, config = self.server, self.config
        if on_ring(config) or self._runtime.is_sharded or config.timing_only:
            server.guard, server.updater.checks_sums = None, True
            return None
        server.guard = guard = PushGuard(server.members, server.norms, server.updater, config.robust)
        for one in server.by_optimizer[1:]:  # only warn: what stands for a push that is turned down names no optimizer
            one.guard = PushGuard(one.members, one.norms, one.updater, findings=guard.findings)
        return guard

    def verify_with(self, make_worker: Callable[[Join], LocalWorker] | None, why_not: str = "") -> None:
        """Recompute doubtful pushes with a worker in this process; None if that is impossible, `why_not` says why."""

        def recompute(push: Push) -> Push | str:
            if push.worker in self.on_gpu:
                return "it was computed on a GPU"
            return recompute_push(self.server, self.memories, make_worker, why_not, push)

        if self._guard is not None:
            self._guard.recompute = recompute

    def _turn_down(self, message: Input, verdict: Disposition) -> tuple[Input, Outcome]:
        """Replace a push that the guard turned down by the input that says so: it alone is logged and replayed."""
        assert isinstance(message, Push)
        named, is_over = (message.worker, message.incarnation), verdict == Disposition.EXPELLED
        instead = Expel(*named) if is_over else Discard(*named, message.seq)
        return instead, self.server.handle(instead)

    def _follow_up(self, message: Input, disposition: Disposition, now: float) -> None:
        """Do what can wait until the replies are sent: events, progress, snapshot, checkpoint."""
        server = self.server
        if self._guard is not None and self._guard.findings:
            self._notes.findings(self._guard.findings, now)
        if isinstance(message, Push):
            self._progress.losses.append(message.loss)
        else:
            self.next_due = 0.0  # the clock may have started
            if disposition == Disposition.TAKEN:
                self._notes.take(message, now, self.stop_reason)
        if now >= self._progress.next_due and self._progress.is_due(now):
            self.tell_progress()
        if self._snapshots is not None:
            self._keep_weights()
        if (disagreement := server.own_loops.disagreement) is not None:
            self._notes.disagreement(disagreement, now)
        if server.assignments is not None and server.assignments.now.generation != self._notes.generation:
            self._notes.assignment(server.assignments.now, now)
        is_due = now >= self._checkpoints.next_due and self._checkpoints.is_ready(now, self.memories)
        if is_due and self._runtime.can_checkpoint(server):
            self.checkpoint()

    def commit(self) -> None:
        """Sync the values of a script's pushes and the log once, then send all replies that wait for it."""
        try:
            self._values.sync()
            self.log.sync()
        except OSError as error:
            raise self._disk_error(error) from None
        unsent, self.unsent = self.unsent, []
        with_state = self.clock.now() >= self._checkpoints.next_checkpoint
        for reply in unsent:
            self._runtime.send(reply, with_state)

    def resume_from(self, rebuilt: RecoveryResult) -> None:
        """Handle the first input of a resumed run, and write an event about the recovery."""
        self.handle(rebuilt.resume_on(self.server, self.config, self._runtime.brings_own_states, self._report))
        if rebuilt.skip is not None:
            self.handle(rebuilt.skip)
        self.first_incarnation = rebuilt.incarnation
        row = {"updates": self.server.version, "checkpoint": rebuilt.checkpoint, "recomputed_pushes": rebuilt.pushes}
        seconds = {} if self._is_virtual else {"seconds": round(rebuilt.seconds, 3)}
        self.events.write("recovered", self.clock.now(), **row, lost_pushes=rebuilt.resume.lost, **seconds)

    def _evaluate(self) -> None:
        """Halt the clock, evaluate the weights, and stop the run if it has reached its target."""
        with self._pausing():
            scores = self._evaluator.evaluate()
        if self._goal is not None and self._goal.is_met(scores.value(self._goal.metric)):
            self.stop(self._goal.reason)

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """Halt the clock while the weights are scored or saved, and do not count that time as a worker's silence."""
        halted = self.clock.source()
        with self.clock.paused():
            self._runtime.gather()
            yield
            self.accounting.extend(self.clock.source() - halted)

    def _keep_weights(self) -> None:
        """Take a snapshot if one is due, before any later checkpoint, so that a resumed run misses none."""
        assert self._snapshots is not None
        if self.server.finished or self._snapshots.is_due(self.server):
            with self._pausing():  # a snapshot of a model with norm layers computes their statistics
                self._snapshots.take_if_due(self.server)
                if self.server.finished:
                    self._snapshots.take_final(self.server)

    def _disk_error(self, error: OSError) -> UserError:
        return self.folder.disk_error(error, self.server.version)

    @property
    def lost(self) -> list[int]:
        """Workers that were lost, in that order."""
        return self._notes.lost

    def note_fault(self, fault: dict[str, Any]) -> None:
        """Write the event of an injected fault."""
        self._notes.fault(fault, self.clock.now())

    def note_expelled(self, worker: int, why: str) -> None:
        """Write the event of a worker that was disconnected because of what it sent."""
        self.events.write("expelled", self.clock.now(), worker=worker, why=why)

    def _has_left(self, worker: int) -> bool:
        member = self.server.members.get(worker)
        return self.server.finished or member is None or not member.live or member.released

    def _why_stalled(self, worker: int) -> str | None:
        is_stalled = worker in self.accounting.stalled
        return self.accounting.stall(worker, self.server, self.clock.source()).what if is_stalled else None

    def drain(self, worker: int, again: bool = False) -> str | None:
        """Let a worker leave after its current push. Returns the reason if that is impossible.

        With `again` a worker that is being drained is no reason: the run is to drop it.
        """
        member = self.server.members.get(worker)
        if self.server.finished:
            return "training is over"
        if member is None or not member.live or member.released:
            here = [number for number, one in sorted(self.server.members.items()) if one.live and not one.inactive]
            return f"it is not a worker of this run; these are: {', '.join(map(str, here)) or 'none'}"
        if member.draining and again:
            return None
        if member.inactive or member.draining:
            return "it has no work left" if member.inactive else "it is being drained already"
        self.handle(Drain(worker))
        return None

    def stop(self, reason: str) -> None:
        """End the run from outside; the reason goes into the result."""
        if not self.server.finished:
            self.stop_reason = reason
            self.handle(Stop())

    @property
    def seconds_left(self) -> float:
        """Seconds of training until `--max-seconds`; infinite without it or if training is over."""
        limit = self.config.max_seconds
        return math.inf if limit is None or self.server.finished else max(0.0, limit - self.clock.now())

    def check_time_limit(self) -> None:
        """Stop if `--max-seconds` are over. Call it between two inputs: the stop is a logged input too."""
        if not self.seconds_left:
            self.stop(TIME_IS_UP)

    def housekeep(self) -> None:
        """Do what time alone makes due: the time limit and the accounting row. Sets `next_due`."""
        self.check_time_limit()
        try:
            self._account_rows.write_if_due()
        except OSError as error:
            raise self._disk_error(error) from None
        self.next_due = min(self._account_rows.next_due, self.clock.source() + self.seconds_left)

    def tell_progress(self) -> None:
        """Report progress, look for requests and trackers, and write the accounting row if it is due."""
        self._progress.tell(self.clock.now(), with_norm=not self._runtime.is_sharded)
        if not self._is_virtual:
            self.requests.look()
        self._trackers.poll()
        self._account_rows.write_if_due(self._progress.next_share)

    def checkpoint(self) -> None:
        """Copy a checkpoint now; it is written in the background."""
        self._values.begin_segment(self.log.nbytes)
        self._checkpoints.take(self.clock.now(), self.memories, self._runtime.gather)

    def checkpoint_now(self) -> None:
        """Write a checkpoint; it is on disk when this returns."""
        try:
            self._values.begin_segment(self.log.nbytes)
            self._checkpoints.take_and_wait(self.clock.now(), self.memories, self._runtime.gather)
        except OSError as error:
            raise self._disk_error(error) from None

    def note_figures(self, worker: int, figures: dict[str, float]) -> None:
        """Record what a user's own loop measured, and stop the run if it has reached its target."""
        self.reported.add(worker, finite(figures))
        row = {"samples": self.server.samples, "figures": finite(figures)}
        self.events.write("reported", self.clock.now(), worker=worker, **row)
        if self._goal is not None and self._goal.is_met(self.reported.goal_value(self._goal.metric, self.lost)):
            self.stop(self._goal.reason)

    def save_finished(self) -> None:
        """Save a finished run while its scripts still run, and report that; `finish` adds what they measure by then."""
        if status_of(self.server, self.stop_reason) == "finished":
            self.folder.write_result(self._save({}))
            self._report({"kind": "saved"})

    def finish(self, found: dict[str, Any] | None = None) -> dict[str, Any]:
        """Score and save the weights, and write the result (with `found` in it) last of all; returns the result."""
        self.clock.halt()
        self.requests.look(is_ending=True)
        self._account_rows.write()
        if (timing := self.timings.row(self.server.pushes)) is not None:
            self.events.write("timing", self.clock.now(), **timing)
        result = self._save(found or {})
        try:
            self.events.write("run_ended", self.clock.now(), status=result["status"], updates=self.server.version)
            self.folder.write_result(result)
            self._values.close(remove=result["status"] == "finished")
        except OSError as error:
            raise self._disk_error(error) from None
        self._trackers.end(hurry=self.stop_reason == TERMINATED)
        return result

    def _save(self, found: dict[str, Any]) -> dict[str, Any]:
        """Score and save the weights, and return the result, with `found` in it."""
        self._runtime.gather()
        status = status_of(self.server, self.stop_reason)
        if self.timings.row(self.server.pushes) is not None:
            found = {"utilisation": self.timings.shares(self.server.num_workers), **found}
        scores = self._evaluator.final_scores(status == "diverged", self.stop_reason)
        if status == "finished":
            found = {**found, **self._evaluator.judge(scores, self.stop_reason, self._logged_losses)}
        try:
            if status == "stopped" and self.server.can_checkpoint and not self.config.timing_only:
                self.checkpoint()
            self._checkpoints.writer.wait()
            self._checkpoints.complain(self.clock.now())
            tensors = save_weights(self.folder, self.server, self._trained)
        except OSError as error:
            raise self._disk_error(error) from None
        model = self._trained if isinstance(self._trained, TimingModel) else self._trained.layout
        facts = scores, tensors, model.num_parameters, self.stop_reason, self._notes.lost
        return make_result(self.config, self.server, self.clock.now(), *facts, *self._more_rows(), found, self._facts)

    def _logged_losses(self) -> list[float]:
        return logged_losses(self.folder.arrivals_file, self.config)

    def _more_rows(self) -> list[dict[str, Any]]:
        """Rows of the result that only some runs have."""
        return [
            self._notes.rows(),
            self._checkpoints.upkeep(),
            {"chosen_on": self._evaluator.chosen_on(self._goal is not None and self.stop_reason == self._goal.reason)},
            {"best": self._best.found} if self._best is not None else {},
            non_finite_row(self.config, self.server, self.task, self.work),
            self.reported.rows(self.lost),
        ]

    def close(self) -> None:
        """Close trackers, the writer of checkpoints and all files."""
        self._opened.close()
