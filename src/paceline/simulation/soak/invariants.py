"""The promises of the design as things that can be seen to be broken, one input of the server after another."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.messages import Drain, Input, Join, Leave, Outcome, Push, Reply, Resume, Verdict
from paceline.core.server import Server
from paceline.runs.replay import same_bits
from paceline.settings.rules import rule_of
from paceline.settings.strategies import Waiting, strategy_of
from paceline.simulation.soak.membership_model import Membership
from paceline.simulation.soak.oracle import Oracle, Part
from paceline.simulation.soak.violation import require
from paceline.tasks.synthetic import OPTIMUM, curvature, gradient_at, shard_of

if TYPE_CHECKING:
    from paceline.simulation.soak.draw import Trial

ROUNDING = 1e-5
"""How far float32 may stray from the oracle, relative to the answer or to a coordinate that is far beyond it."""

Portrait = tuple[dict[str, Any], dict[str, Tensor]]


def portrait(server: Server) -> Portrait:
    """All that a server is, at any moment: plain values and tensors."""
    values = {
        "version": server.version,
        "samples": server.samples,
        "dropped": server.dropped,
        "late": server.late,
        "pushes": server.pushes,
        "replies": server.replies,
        "over": server.over,
        "staleness": dict(server.staleness),
        "members": {worker: asdict(member) for worker, member in sorted(server.members.items())},
        "awaited": server.awaited,
        "policy": server.policy.facts(),
        "held": {worker: push[:6] for worker, push in sorted(server.held.items())},
        "deals": server.deals.facts() if server.deals is not None else None,
    }
    tensors = {"weights": server.weights, **server.rule_state}
    tensors |= {f"update {worker}": push.update for worker, push in server.held.items()}
    tensors |= {f"state {worker}": state for worker, state in server.worker_states.items()}
    return values, tensors


def require_same(promise: str, before: Portrait, after: Portrait) -> None:
    """A server made from checkpoint and log is the one that wrote them: nothing that it took is lost."""
    for name, value in before[0].items():
        require(after[0][name] == value, promise, "{} was {}, is {}", name, value, after[0][name])
    require(before[1].keys() == after[1].keys(), promise, "{} became {}", set(before[1]), set(after[1]))
    for name, tensor in before[1].items():
        require(same_bits(tensor, after[1][name]), promise, "{} was {}, is {}", name, tensor, after[1][name])


class Witness:
    """Sees every input, every update and every answer, over all the lives of the server."""

    def __init__(self, trial: Trial) -> None:
        self._strategy = strategy_of(trial.strategy)
        self._budget, self._quotas, self._poison = trial.budget, trial.quotas, trial.poison
        self._quota = trial.quota
        self._membership = Membership(trial.workers, trial.room is not None, self._strategy.in_rounds)
        self._looks_ahead = rule_of(trial.rule).traits.sends_others
        self._plain = rule_of(trial.rule).name in ("plain", "ringmaster")
        self._oracle = Oracle(trial.optimizer, trial.lr, trial.momentum, OPTIMUM[0])
        self._weights = [torch.zeros(len(OPTIMUM))]
        self._scratch = torch.zeros(len(OPTIMUM))
        self._samples = 0
        self._accepted: Counter[int] = Counter()
        self._applied: set[tuple[int, int, int]] = set()
        self._dropped: set[tuple[int, int, int]] = set()
        self._told: dict[int, Reply] = {}
        self._sent: dict[int, Tensor] = {}
        self._here: dict[int, int] = {}
        self._dead: set[tuple[int, int]] = set()
        self._clocks: dict[int, int] = {}

    def applied(self, pushes: list[Push], server: Server) -> None:
        """The server has made one update of these pushes."""
        version = len(self._weights) - 1
        spent = self._budget.spent(self._samples, version)
        require(not spent, "budget", "update {} after the budget was spent", version)
        require(server.version == version + 1, "growth", "version {} after {}", server.version, version)
        parts = [self._part(push, version) for push in pushes]
        for push in pushes:
            quota = self._quota(push.worker)
            left = quota is None or self._accepted[push.worker] < quota
            require(left, "budget", "push {} goes beyond a quota of {}", push[:3], quota)
            self._accepted[push.worker] += 1
            self._clocks[push.worker] = self._clocks.get(push.worker, 0) + 1
            self._samples += push.samples
        self._weights.append(server.weights.clone())
        finite = math.isfinite(sum(server.weights.tolist()))
        require(finite, "finite", "update {} gives {}", version, server.weights)
        if not self._plain:
            return  # each of these rules has an oracle of its own in the tests
        expected, found = self._oracle.apply(parts), server.weights.tolist()[0]
        near = abs(found - expected) <= ROUNDING * max(abs(expected), abs(OPTIMUM[0]))
        require(near, "weights", "update {} gives {}, alone it gives {}", version, found, expected)

    def _part(self, push: Push, version: int) -> Part:
        """A push that may be applied: new, from somebody here, the gradient at the weights that it was sent."""
        identity = push[:3]
        require(identity not in self._applied, "once", "push {} is applied again in update {}", identity, version)
        self._applied.add(identity)
        told = self._told.get(push.worker)
        require(identity[:2] not in self._dead, "dead", "push {} of a worker that left is applied", identity)
        known = told is not None and (told.incarnation, told.serial) == (push.incarnation, push.reply)
        require(known, "weights", "push {} is no answer to {}", identity, told)
        assert told is not None
        if self._strategy.in_rounds:
            require(told.version == version, "bound", "a round of version {} holds a push from {}", version, told)
        part = shard_of(push.worker, told.deal)
        gradient = gradient_at(self._sent[push.worker], part, told.batch, self._scratch)
        finite = (push.worker, told.batch) != self._poison
        require(finite, "finite", "push {} is applied though it holds a NaN", identity)
        same = torch.equal(gradient, push.update)
        require(same, "weights", "push {} is not the gradient of batch {} at {}", identity, told.batch, told.version)
        return Part(told.version, push.samples, curvature(part, told.batch))

    def sent(self, worker: int, weights: Tensor) -> None:
        """These weights went along with an answer: those of its version, unless the rule looks ahead."""
        same = self._looks_ahead or same_bits(weights, self._weights[-1])
        require(same, "weights", "worker {} is sent {}, not {}", worker, weights, self._weights[-1])
        self._sent[worker] = weights.clone()

    def saw(self, message: Input, outcome: Outcome, server: Server) -> None:
        """An input was taken, and these are the answers."""
        version = len(self._weights) - 1
        require(server.version == version, "growth", "version {} after {} updates", server.version, version)
        require(server.samples == self._samples, "growth", "{} samples, not {}", server.samples, self._samples)
        settled = self._accepted.total() + server.dropped + server.late + len(server.held)
        if server.divergence is None:
            require(server.pushes == settled, "counts", "{} pushes, {} accounted for", server.pushes, settled)
        if outcome.verdict == Verdict.TAKEN:
            self._note(message)
        for worker in [w for w in self._clocks if self._accepted[w] == self._quota(w)]:
            del self._clocks[worker]
        if isinstance(message, Push) and outcome.verdict == Verdict.DROPPED:
            self._dropped.add(message[:3])
        for reply in outcome.replies:
            if reply.over and not server.over:
                self._check_last_push(reply)
            self._check(reply, version, outcome.verdict == Verdict.REPEATED)
        self._membership.require_entrance(self._clocks)
        if server.started and not server.over and self._clocks:
            self._check_held_back(server)

    def _note(self, message: Input) -> None:
        """Who is here, and at which clock."""
        match message:
            case Join(worker, incarnation):
                self._here[worker] = incarnation
                if not self._membership.waits(worker, self._clocks, len(self._weights) - 1):
                    self._clocks[worker] = min(self._clocks.values(), default=0)
            case Push():
                self._membership.begun = True
            case Drain(worker):
                self._membership.draining.add(worker)
            case Leave(worker, incarnation):
                known = self._here.get(worker, -1)
                self._dead.add((worker, min(incarnation, known)))
                if incarnation >= known:
                    self._clocks.pop(worker, None)
                    self._membership.coming.pop(worker, None)
            case Resume():
                self._dead |= set(self._here.items())
                self._clocks.clear()
                self._membership.clear()

    def _check(self, reply: Reply, version: int, repeated: bool) -> None:
        """An answer goes to somebody who is here, with the newest weights and the next batch, within the bound."""
        worker, told = reply.worker, self._told.get(reply.worker)
        name = (worker, reply.incarnation)
        require(name not in self._dead, "dead", "{} for a worker that left", reply)
        require(self._here.get(worker) == reply.incarnation, "dead", "{} for somebody unknown", reply)
        if repeated:
            same = told is not None and told._replace(over=reply.over) == reply
            require(same, "growth", "a repeat is answered with {}, at first with {}", reply, told)
            return
        newest = reply.version == version or (reply.over and reply.version < version)  # its leaving may close a round
        require(newest, "growth", "{} at version {}", reply, version)
        require(told is None or told.version <= reply.version, "growth", "{} after {}", reply, told)
        if not reply.over:
            self._membership.enter(worker, self._clocks, version)
            self._membership.deal(reply, self._accepted[worker], self._clocks)
        accepted = self._accepted[worker] - self._membership.before(worker)
        require(reply.batch == accepted, "batch", "{} after {} accepted", reply, accepted)
        self._told[worker] = reply
        if reply.over and worker in self._membership.draining:
            self._membership.draining.discard(worker)
            self._membership.dismissed.add(worker)
            self._clocks.pop(worker, None)
        require(reply.over or worker in self._clocks, "budget", "{} for a worker that has no work left", reply)
        if self._strategy.waiting is Waiting.BOUNDED and not reply.over:
            ahead = self._clocks[worker] - min(self._clocks.values())
            require(ahead <= self._strategy.max_lead, "bound", "{} is sent on {} steps ahead", name, ahead)

    def _check_last_push(self, reply: Reply) -> None:
        """Who is sent away has nothing left to push: what it was told to compute counts, or the policy dropped it."""
        told = self._told.get(reply.worker)
        if told is not None and not told.over and told.incarnation == reply.incarnation:
            last = (told.worker, told.incarnation, told.serial)
            settled = last in self._applied or last in self._dropped
            require(settled, "last push", "{} though push {} does not count", reply, last)

    def _check_held_back(self, server: Server) -> None:
        """Nobody waits without a reason: a round that lacks pushes, or a worker too far behind."""
        held = [worker for worker in self._clocks if server.members[worker].waiting]
        if self._strategy.in_rounds:
            needed = max(1, self._strategy.pushes_per_update(len(self._clocks)))
            require(len(held) < needed, "held", "a round of {} waits though {} have pushed", needed, held)
            return
        if self._strategy.waiting is Waiting.BOUNDED:
            least = min(self._clocks.values()) + self._strategy.max_lead
            held = [worker for worker in held if self._clocks[worker] <= least]
        require(not held, "held", "workers {} wait without a reason, clocks {}", held, self._clocks)

    def ended(self, server: Server, gone: set[int | None]) -> None:
        """The run is over: its budget is spent to the sample, or all who are missing are gone for good."""
        if server.divergence is not None:
            found = self._poison is not None and server.divergence.worker == self._poison[0]
            require(found and server.over, "finite", "ended by {}, poison is {}", server.divergence, self._poison)
            return
        version, accepted = len(self._weights) - 1, self._accepted
        working = [w for w, quota in enumerate(self._quotas) if quota is None or accepted[w] < quota]
        if not server.over:
            missing = [w for w in working if w not in gone]
            require(not missing, "budget", "the run ended though workers {} were to come back", missing)
        elif self._budget.own and self._budget.steps is None:
            excused = self._membership.dismissed
            working = [w for w in working if w in self._here and w not in excused]
            missing = [w for w in working if (w, self._here[w]) not in self._dead]
            require(not missing, "budget", "over while workers {} have work left", missing)
        else:
            require(self._budget.spent(self._samples, version), "budget", "over after {} samples", self._samples)
        if not self._plain:
            return
        for found, answer in zip(server.weights.tolist(), OPTIMUM, strict=True):
            left, allowed = abs(found - answer), self._oracle.tolerance(abs(answer)) + ROUNDING
            require(left <= allowed, "optimum", "{} is {} from the answer, {} is allowed", found, left, allowed)
