"""A cluster of toy workers around a real Server: every event is one call, and everything that was said is kept.

A push of worker w holds a one at place w and zeros elsewhere, so that each update shows whose pushes it is made of.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.messages import Disposition, Input, Join, Leave, Outcome, Push, Reply
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async, Barrier, DropStale, StaleSynchronous
from paceline.core.rules.averaged import Averaged
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Roster, Server, restore_server, server_facts
from paceline.interfaces import Arrival, Policy, Rule, State

POLICIES: dict[str, Callable[[], Policy]] = {
    "async": Async,
    "ringmaster:2": lambda: DropStale(2),
    "sync": Barrier,
    "backup:1": lambda: Barrier(spare=1),
    "backup:2": lambda: Barrier(spare=2),
    "bounded:0": lambda: StaleSynchronous(0),
    "bounded:2": lambda: StaleSynchronous(2),
}


@dataclass(frozen=True)
class Update:
    """One applied update as the rule saw it: whose pushes, and what the arrival said."""

    workers: frozenset[int]
    staleness: int
    num_live: int
    alone: int | None


class Ledger(Averaged):
    """Any rule, averaged, that also writes down what it applies and who it thinks is here."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self.updates: list[Update] = []
        self.here: set[int] = set()

    def join(self, state: State, worker: int) -> None:
        assert worker not in self.here, f"the rule is told twice that {worker} joined"
        self.here.add(worker)
        super().join(state, worker)

    def leave(self, state: State, worker: int) -> None:
        assert worker in self.here, f"the rule is told that {worker} left, who was not here"
        self.here.discard(worker)
        super().leave(state, worker)

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        workers = frozenset(int(place) for place in update.nonzero().flatten())
        assert len(self.here) == arrival.num_live and workers <= self.here
        self.updates.append(Update(workers, arrival.staleness, arrival.num_live, arrival.worker))
        super().apply(weights, state, update, arrival)


def samples_of(worker: int, batch: int) -> int:
    """How many samples a toy batch has: a function of its address."""
    return 1 + (worker + batch) % 3


MOST_SAMPLES = 3


@dataclass
class Toy:
    """One incarnation of a toy worker."""

    worker: int
    incarnation: int
    pending: Reply | None = None
    finished: bool = False
    last: Push | None = None

    def next_push(self, size: int) -> Push:
        """The push of the batch it was told to compute."""
        assert self.pending is not None
        reply, self.pending = self.pending, None
        update = torch.zeros(size)
        update[self.worker] = 1.0
        samples = samples_of(self.worker, reply.batch)
        self.last = Push(
            self.worker, self.incarnation, reply.serial, reply.serial, samples, 0.5, update, torch.empty(0)
        )
        return self.last


@dataclass(frozen=True)
class Happened:
    """One input, what the server made of it, and the cluster right after it."""

    message: Input
    outcome: Outcome
    updates: tuple[Update, ...]
    live: frozenset[int]


@dataclass
class ToyCluster:
    """Workers 0 to `num_workers` - 1, their server, and the history of both."""

    policy: str
    num_workers: int
    budget: Budget
    quotas: Sequence[int] | None = None
    live: dict[int, Toy] = field(default_factory=dict)
    ghosts: list[Toy] = field(default_factory=list)
    history: list[Happened] = field(default_factory=list)
    batches: dict[int, list[int]] = field(default_factory=dict)
    twin: Server | None = None
    make_rule: Callable[[int], Rule] = lambda max_workers: Plain(Sgd(0.5))

    def __post_init__(self) -> None:
        self.rule = Ledger(self.make_rule(self.num_workers))
        self.server = self._new_server(self.rule)
        self._incarnations: Counter[int] = Counter()
        self._batch_of: dict[int, int] = {}

    def _new_server(self, rule: Rule) -> Server:
        policy = POLICIES[self.policy]()
        return Server(
            torch.zeros(self.num_workers), rule, policy, Training(self.budget, Schedule(0.25)), Roster(self.num_workers)
        )

    def handle(self, message: Input) -> Outcome:
        """Feed one input to the server (and to its twin), deliver the replies, and write it all down."""
        version, known = self.server.version, len(self.rule.updates)
        outcome = self.server.handle(message)
        assert self.server.version >= version, "a version went back"
        if self.twin is not None:
            assert self.twin.handle(message) == outcome
            assert torch.equal(self.twin.weights, self.server.weights)
            assert torch.equal(self.twin.evaluated, self.server.evaluated)
        if outcome.disposition != Disposition.REPEATED:
            self._hand_out(outcome.replies)
        updates = tuple(self.rule.updates[known:])
        assert self.server.version == version + len(updates)
        for update in updates:
            for worker in update.workers:
                self.batches.setdefault(worker, []).append(self._batch_of[worker])
        for reply in outcome.replies:
            self._deliver(reply, outcome.disposition)
        working = frozenset(worker for worker, toy in self.live.items() if not toy.finished)
        self.history.append(Happened(message, outcome, updates, working))
        return outcome

    def _hand_out(self, replies: Sequence[Reply]) -> None:
        """What each is sent, by both servers."""
        for reply in replies:
            sent = torch.full((self.num_workers,), torch.nan)
            self.server.updater.reply_weights(reply.worker, sent)
            assert torch.isfinite(sent).all()
            if self.twin is not None:
                again = torch.empty_like(sent)
                self.twin.updater.reply_weights(reply.worker, again)
                assert torch.equal(again, sent)

    def _deliver(self, reply: Reply, disposition: Disposition) -> None:
        toy = self.live[reply.worker]
        assert reply.incarnation == toy.incarnation
        if disposition == Disposition.REPEATED:
            return
        assert toy.pending is None and not toy.finished, f"worker {reply.worker} was answered twice"
        assert reply.version == self.server.version, "a reply must carry the newest weights"
        if reply.finished:
            toy.finished = True
        else:
            toy.pending = reply

    def join(self, worker: int) -> Outcome:
        toy = Toy(worker, self._incarnations[worker])
        self._incarnations[worker] += 1
        self.live[worker] = toy
        quota = None if self.quotas is None else self.quotas[worker]
        return self.handle(Join(worker, toy.incarnation, quota))

    def push(self, worker: int) -> Outcome:
        toy = self.live[worker]
        assert toy.pending is not None
        self._batch_of[worker] = toy.pending.batch
        return self.handle(toy.next_push(self.num_workers))

    def leave(self, worker: int) -> Outcome:
        toy = self.live.pop(worker)
        self.ghosts.append(toy)
        return self.handle(Leave(worker, toy.incarnation))

    def repeat(self, worker: int) -> Outcome:
        last = self.live[worker].last
        assert last is not None
        return self.handle(last)

    def haunt(self, ghost: Toy) -> Outcome:
        """A push from an incarnation that has left."""
        push = ghost.next_push(self.num_workers) if ghost.pending is not None else ghost.last
        assert push is not None
        return self.handle(push)

    def fork(self) -> None:
        """From now on a second server, restored from this one's facts as JSON, is fed the same inputs."""
        facts = json.loads(json.dumps(server_facts(self.server)))
        self.twin = self._new_server(Averaged(self.make_rule(self.num_workers)))
        rule_state = {name: tensor.clone() for name, tensor in self.server.rule_state.items()}
        restore_server(self.twin, facts, self.server.weights.clone(), rule_state)

    def ready(self) -> list[int]:
        """Workers that were answered and have not pushed since."""
        return sorted(worker for worker, toy in self.live.items() if toy.pending is not None)

    def held_back(self) -> list[int]:
        """Live workers that wait for an answer."""
        return sorted(worker for worker, toy in self.live.items() if toy.pending is None and not toy.finished)

    def missing(self) -> list[int]:
        return [worker for worker in range(self.num_workers) if worker not in self.live]

    def play(self, choices: Sequence[int], churn: bool = True) -> None:
        """One event for each number: mostly pushes, sometimes a leave, a new incarnation, a repeat or a ghost."""
        for choice in choices:
            kind, pick = choice % 10, choice // 10
            repeatable = [worker for worker, toy in sorted(self.live.items()) if toy.last is not None]
            ghosts = [ghost for ghost in self.ghosts if ghost.pending is not None or ghost.last is not None]
            if churn and kind == 0 and self.live:
                self.leave(sorted(self.live)[pick % len(self.live)])
            elif churn and kind in (1, 2) and self.missing():
                self.join(self.missing()[pick % len(self.missing())])
            elif kind == 3 and repeatable:
                self.repeat(repeatable[pick % len(repeatable)])
            elif churn and kind == 4 and ghosts:
                self.haunt(ghosts[pick % len(ghosts)])
            elif self.ready():
                self.push(self.ready()[pick % len(self.ready())])

    def drain(self) -> None:
        """Bring back who is missing and push in turn until everybody was told that it is over."""
        for worker in self.missing():
            self.join(worker)
        turn = 0
        while not all(toy.finished for toy in self.live.values()):
            ready = self.ready()
            assert ready, f"deadlock: {self.held_back()} wait and nobody has anything to compute"
            self.push(ready[turn % len(ready)])
            turn += 1
            assert turn < 2_000, "the run does not end"

    def pushes(self, *verdicts: Disposition) -> list[Push]:
        """All pushes that came to one of these verdicts."""
        return [h.message for h in self.history if isinstance(h.message, Push) and h.outcome.disposition in verdicts]


def started(policy: str, num_workers: int, budget: Budget, quotas: Sequence[int] | None = None) -> ToyCluster:
    """A cluster in which everybody has joined."""
    cluster = ToyCluster(policy, num_workers, budget, quotas)
    for worker in range(num_workers):
        cluster.join(worker)
    return cluster
