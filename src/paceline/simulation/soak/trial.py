"""One soak trial: a simulated cluster on a problem with a known optimum, log and checkpoints in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import torch

from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Disposition, Input, Join, Push, Reply, Resume, SetLocalSteps
from paceline.core.server import Exchange, Roster, Server
from paceline.core.worker import LocalWorker
from paceline.runs.arrival_log import Record
from paceline.runs.checkpoint import Checkpoint, take_checkpoint
from paceline.runs.replay import Replay
from paceline.simulation.event_queue import Action, EventQueue
from paceline.simulation.faults import inject
from paceline.simulation.simulator import Deadlock, SimulatedWorker, Simulation
from paceline.simulation.soak.draw import Trial
from paceline.simulation.soak.invariants import InvariantChecker, require_same, server_state
from paceline.simulation.soak.violation import InvariantViolation, require
from paceline.system.strict_json import to_json
from paceline.tasks.synthetic import OPTIMUM

MAX_EVENTS = 20_000
REPLAY_EVERY = 3  # every third trial is replayed from its whole log


class BoundedEventQueue(EventQueue):
    """An event queue with a maximum number of events: a cluster that never stops planning is in a livelock."""

    def at(self, time: float, action: Action, argument: object) -> None:
        if self._serial > MAX_EVENTS:
            raise InvariantViolation("livelock", f"{MAX_EVENTS} events at {self.now:g} s, and training is not finished")
        super().at(time, action, argument)


@dataclass(frozen=True)
class TrialRecord:
    """The outcome of a trial; equal seeds give equal records, bit for bit."""

    records: tuple[Record, ...]
    weights: tuple[float, ...]
    seconds: float
    num_events: int
    restarts: int
    pushes: int
    updates: int
    dropped: int
    finished: bool
    diverged: bool


class TrialDriver:
    """Runs the server of a trial, with log and checkpoints in memory, across all its restarts."""

    def __init__(self, trial: Trial) -> None:
        self.memories: dict[int, WorkerBuffers] = {}
        self.trial, self.queue, self.checker = trial, BoundedEventQueue(), InvariantChecker(trial, self.memories)
        self.send: Callable[[Reply], None]
        self.records: list[Record] = []
        self.restarts = -1  # the first start counts as none
        self._checkpoint: Checkpoint | None = None
        self._random = Random(trial.seed)
        self.server: Server = self._observed(self._new_server())

    def _new_server(self) -> Server:
        trial = self.trial
        parts = (trial.make_rule(), trial.make_policy(), trial.make_training(), Roster(trial.workers, trial.room))
        return Server(torch.zeros(len(OPTIMUM)), *parts, Exchange(trial.make_codecs()))

    def _observed(self, server: Server) -> Server:
        server.on_update = lambda update: self.checker.on_update(update, server)
        return server

    def start(self, send: Callable[[Reply], None]) -> TrialDriver:
        """Start the server; after a crash, rebuild it from checkpoint and log and check that it is equal."""
        self.send = send
        self.restarts += 1
        if not self.restarts:
            return self
        rebuilt = self.rebuild(self._checkpoint)
        require_same("kept", server_state(self.server), server_state(rebuilt))
        self.server = self._observed(rebuilt)
        self.memories.clear()
        self.handle(Resume())
        return self

    def rebuild(self, checkpoint: Checkpoint | None) -> Server:
        """Return the server rebuilt from a checkpoint and the log after it."""
        server = self._new_server()
        if checkpoint is not None:
            checkpoint = replace(checkpoint, facts=json.loads(to_json(checkpoint.facts)))  # as if read from a file
        replay = Replay(server, self.trial.make_worker, checkpoint)
        replay.feed(self.records[checkpoint.log_offset if checkpoint is not None else 0 :])
        if replay.mismatch is not None:
            raise InvariantViolation("kept", f"a replay differs: {replay.mismatch}")
        return server

    def handle(self, message: Input) -> None:
        """Handle an input as `Host` does: update, log, send replies, sometimes take a checkpoint."""
        outcome = self.server.handle(message)
        self.records.append(_record(message, outcome.disposition, self.queue.now))
        self.checker.on_input(message, outcome, self.server)
        for reply in outcome.replies:
            if outcome.disposition != Disposition.REPEATED:
                self.server.send_weights(reply, self.memories[reply.worker])
                self.checker.on_weights(reply, self.server)
            self.send(reply)
        chance = self.trial.checkpoint_chance
        if chance and self.server.can_checkpoint and self._random.random() < chance:
            self._checkpoint = take_checkpoint(self.server, self.memories, len(self.records), self.queue.now)


def _record(message: Input, disposition: Disposition, now: float) -> Record:
    match message:
        case Push(worker, incarnation, seq, reply, samples, loss):
            return Record("push", worker, incarnation, seq, reply, samples, loss, now, disposition)
        case Join(worker, incarnation, quota, threads):
            amount = 0xFFFFFFFF if quota is None else quota
            return Record("join", worker, incarnation, amount, threads, 0, 0.0, now, disposition)
        case SetLocalSteps(worker, steps):
            return Record("steps", worker, 0, steps, 0, 0, 0.0, now, disposition)
    worker, incarnation = getattr(message, "worker", 0), getattr(message, "incarnation", 0)
    return Record(type(message).__name__.lower(), worker, incarnation, 0, 0, 0, 0.0, now, disposition)


def unscheduled_workers(simulation: Simulation) -> list[int]:
    """Return live workers without any planned event or message that the server does not make wait."""
    planned: list[object] = [plan[3] for plan in simulation.queue._heap] + list(simulation._inbox)
    for shared in (*simulation.network._shared.values(), simulation._cores):
        planned += [job.argument for _, _, job in shared._jobs if not job.ended] if shared is not None else []
    expected = {worker for plan in planned for worker in _workers_in(plan)}
    for worker, member in simulation.side.server.members.items():
        if member.waiting and member.incarnation == simulation.workers[worker].incarnation:
            expected.add(worker)
    live = [worker.number for worker in simulation.workers if worker.instance is not None]
    return [number for number in live if number not in expected]


def _workers_in(plan: object) -> set[int]:
    """Return the workers that an event's argument refers to."""
    if isinstance(plan, Join | Push | Reply):
        return {plan.worker}
    if isinstance(plan, SimulatedWorker):
        return {plan.number}
    return {worker for part in plan for worker in _workers_in(part)} if isinstance(plan, tuple) else set()


@torch.inference_mode()
def perform(trial: Trial) -> TrialRecord:
    """Run a trial to its end; raise `InvariantViolation` if an invariant does not hold."""
    driver, faults = TrialDriver(trial), trial.cluster.faults
    gone = {one.worker for one in faults if one.kind == "drain" or (one.kind == "crash" and one.restart_after is None)}

    def make_worker(worker: int, incarnation: int) -> LocalWorker:
        return trial.make_worker(Join(worker, incarnation, trial.quota(worker)))

    simulation = Simulation(driver.queue, trial.cluster, trial.workers, make_worker, driver.start, trial.room, inject)
    try:
        simulation.run()
        driver.checker.on_end(driver.server, gone)
        require(not (lost := unscheduled_workers(simulation)), "forgotten", "no event is planned for workers {}", lost)
        if trial.seed % REPLAY_EVERY == 0:
            require_same("replay", server_state(driver.server), server_state(driver.rebuild(None)))
    except InvariantViolation:
        raise
    except Deadlock as error:
        raise InvariantViolation("deadlock", str(error)) from error
    except Exception as error:
        raise InvariantViolation("crash", f"{type(error).__name__}: {error}") from error
    server, records, weights = driver.server, tuple(driver.records), tuple(driver.server.weights.tolist())
    counts = simulation.num_events, driver.restarts, server.pushes, server.version, server.dropped
    return TrialRecord(records, weights, driver.queue.now, *counts, server.finished, server.divergence is not None)
