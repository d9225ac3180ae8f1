"""One trial of a soak: a cluster on a problem whose answer is known, its log and checkpoints kept in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import torch

from paceline.core.buffers import Memory
from paceline.core.messages import Input, Join, Push, Reply, Resume, Verdict
from paceline.core.schedules import Schedule, Training
from paceline.core.server import Roster, Server
from paceline.core.worker import Seat
from paceline.runs.arrival_log import Record
from paceline.runs.checkpoint import Cut, take_checkpoint
from paceline.runs.replay import Replay
from paceline.settings.fault_table import Fault
from paceline.simulation.event_queue import Action, Agenda
from paceline.simulation.faults import inject
from paceline.simulation.simulator import Deadlock, Simulation, Worker
from paceline.simulation.soak.draw import Trial
from paceline.simulation.soak.invariants import Witness, portrait, require_same
from paceline.simulation.soak.violation import Broken, require
from paceline.tasks.synthetic import OPTIMUM

MOST_PLANS = 20_000
REPLAYED = 3
"""One trial in so many is replayed from its whole log."""


class Limited(Agenda):
    """An agenda that ends: a cluster that never stops planning is going round in circles."""

    def at(self, time: float, action: Action, argument: object) -> None:
        if self._serial > MOST_PLANS:
            raise Broken("livelock", f"{MOST_PLANS} plans at {self.now:g} s, and training is not over")
        super().at(time, action, argument)


@dataclass(frozen=True)
class Story:
    """What a trial came to; the same seed tells the same story, bit for bit."""

    records: tuple[Record, ...]
    weights: tuple[float, ...]
    seconds: float
    num_events: int
    restarts: int
    pushes: int
    updates: int
    over: bool
    diverged: bool


class Stage:
    """A trial while it runs: the server's side with its log and checkpoints in memory, over all the server's lives."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.agenda = Limited()
        self.witness = Witness(trial)
        self.memories: dict[int, Memory] = {}
        self.send: Callable[[Reply], None] = lambda reply: None
        self.records: list[Record] = []
        self.restarts = 0
        self._cut: Cut | None = None
        self._chance = Random(trial.seed)
        self.server: Server = self._watched(self._new_server())
        self._begun = False

    def _new_server(self) -> Server:
        trial = self.trial
        weights, rule = torch.zeros(len(OPTIMUM)), trial.make_rule()
        training, roster = Training(trial.budget, Schedule(trial.lr)), Roster(trial.workers, trial.room)
        return Server(weights, rule, trial.make_policy(), training, roster)

    def _watched(self, server: Server) -> Server:
        server.on_update = lambda update: self.witness.applied(update.pushes, server)
        return server

    def start(self, send: Callable[[Reply], None]) -> Stage:
        """The first server; later, what checkpoint and log say it was, which must be what it was."""
        self.send = send
        if not self._begun:
            self._begun = True
            return self
        self.restarts += 1
        rebuilt = self.rebuild(self._cut)
        require_same("kept", portrait(self.server), portrait(rebuilt))
        self.server = self._watched(rebuilt)
        self.memories.clear()
        self.handle(Resume())
        return self

    def rebuild(self, cut: Cut | None) -> Server:
        """The server that a checkpoint and the log behind it make."""
        server = self._new_server()
        if cut is not None:
            cut = replace(cut, facts=json.loads(json.dumps(cut.facts)))  # as from a file
        replay = Replay(server, self.trial.make_seat, cut)
        replay.feed(self.records[cut.log_offset if cut is not None else 0 :])
        if replay.mismatch is not None:
            raise Broken("kept", f"a replay departs: {replay.mismatch}")
        return server

    def handle(self, message: Input) -> None:
        """As `Host` does: server, log, weights and replies, then perhaps a checkpoint."""
        outcome = self.server.handle(message)
        self.records.append(_record(message, outcome.verdict, self.agenda.now))
        self.witness.saw(message, outcome, self.server)
        for reply in outcome.replies:
            if outcome.verdict != Verdict.REPEATED:
                self.server.hand_out(reply, self.memories[reply.worker])
                self.witness.sent(reply.worker, self.memories[reply.worker].weights)
            self.send(reply)
        if self.trial.cuts and self.server.can_be_cut and self._chance.random() < self.trial.cuts:
            self._cut = take_checkpoint(self.server, self.memories, len(self.records), self.agenda.now)


def _record(message: Input, verdict: Verdict, now: float) -> Record:
    match message:
        case Push(worker, incarnation, seq, reply, samples, loss):
            return Record("push", worker, incarnation, seq, reply, samples, loss, now, verdict)
        case Join(worker, incarnation, quota, threads):
            amount = 0xFFFFFFFF if quota is None else quota
            return Record("join", worker, incarnation, amount, threads, 0, 0.0, now, verdict)
    worker, incarnation = getattr(message, "worker", 0), getattr(message, "incarnation", 0)
    return Record(type(message).__name__.lower(), worker, incarnation, 0, 0, 0, 0.0, now, verdict)


def forgotten(simulation: Simulation) -> list[int]:
    """Workers that are here, that the server does not hold back, and for which nothing is planned or under way."""
    planned: list[object] = [plan[3] for plan in simulation.agenda._planned] + list(simulation._queue)
    for shared in (*simulation.wire._shared.values(), simulation._cores):
        planned += [job.argument for _, _, job in shared._jobs if not job.off] if shared is not None else []
    expected = {worker for plan in planned for worker in _mentioned(plan)}
    for worker, member in simulation.side.server.members.items():
        if member.waiting and member.incarnation == simulation.workers[worker].incarnation:
            expected.add(worker)
    return [worker.number for worker in simulation.workers if worker.seat is not None and worker.number not in expected]


def _mentioned(plan: object) -> set[int]:
    """The workers in a plan's argument, a message's or its own."""
    if isinstance(plan, Join | Push | Reply):
        return {plan.worker}
    if isinstance(plan, Worker):
        return {plan.number}
    return {worker for part in plan for worker in _mentioned(part)} if isinstance(plan, tuple) else set()


def _is_for_good(fault: Fault) -> bool:
    """Whether a worker may be gone and not come back."""
    return fault.kind == "drain" or (fault.kind == "crash" and fault.restart_after is None)


def perform(trial: Trial) -> Story:
    """Run a trial to its end; a promise that is not kept is raised as Broken."""
    with torch.inference_mode():
        return _perform(trial)


def _perform(trial: Trial) -> Story:
    stage = Stage(trial)

    def come(worker: int, incarnation: int) -> Seat:
        return trial.make_seat(Join(worker, incarnation, trial.quota(worker)))

    simulation = Simulation(stage.agenda, trial.cluster, trial.workers, come, stage.start, trial.room, inject)
    try:
        simulation.run()
        stage.witness.ended(stage.server, {fault.worker for fault in trial.cluster.faults if _is_for_good(fault)})
        require(not (lost := forgotten(simulation)), "forgotten", "workers {} wait for nothing", lost)
        if trial.seed % REPLAYED == 0:
            require_same("replay", portrait(stage.server), portrait(stage.rebuild(None)))
    except Broken:
        raise
    except Deadlock as error:
        raise Broken("deadlock", str(error)) from error
    except Exception as error:
        raise Broken("crash", f"{type(error).__name__}: {error}") from error
    server = stage.server
    return Story(
        tuple(stage.records),
        tuple(server.weights.tolist()),
        stage.agenda.now,
        simulation.num_events,
        stage.restarts,
        server.pushes,
        server.version,
        server.over,
        server.divergence is not None,
    )
