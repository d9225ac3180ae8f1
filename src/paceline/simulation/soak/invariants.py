"""Invariants of the design, checked after every input that the server handles in a soak trial."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Disposition, Drain, Input, Join, Leave, Outcome, Push, Reply, Resume
from paceline.core.server import AppliedUpdate, Server
from paceline.runs.replay import same_bits
from paceline.settings.rules import average_horizon, rule_of
from paceline.settings.strategies import Waiting, strategy_of
from paceline.simulation.soak.membership_model import MembershipModel
from paceline.simulation.soak.oracle import AppliedPush, AverageOracle, SerialOracle
from paceline.simulation.soak.violation import require
from paceline.simulation.soak.worker_model import WorkerModel
from paceline.tasks.synthetic import OPTIMUM, curvature, gradient_at, shard_of

if TYPE_CHECKING:
    from paceline.simulation.soak.draw import Trial

ROUNDING = 1e-5  # tolerance of float32 against the oracle, relative to the larger of coordinate and optimum

ServerState = tuple[dict[str, Any], dict[str, Tensor]]
PushIdentity = tuple[int, int, int]  # worker, incarnation, number


def server_state(server: Server) -> ServerState:
    """Return the complete state of a server as plain values and tensors."""
    counts = ("version", "samples", "dropped", "late", "pushes", "replies", "finished")
    values = {name: getattr(server, name) for name in counts}
    values |= {
        "staleness": dict(server.staleness),
        "members": {worker: asdict(member) for worker, member in sorted(server.members.items())},
        "awaited": server.pending_workers,
        "policy": server.policy.facts(),
        "held": {worker: push[:6] for worker, push in sorted(server.held.items())},
        "assignments": server.assignments.facts() if server.assignments is not None else None,
    }
    tensors = {"weights": server.weights, **server.rule_state}
    tensors |= {f"update {worker}": push.update for worker, push in server.held.items()}
    tensors |= {f"state {worker}": state for worker, state in server.worker_states.items()}
    if server.differences is not None:
        working = [worker for worker, member in server.members.items() if member.live and not member.inactive]
        held = server.differences.held
        tensors |= {f"sent {worker}": held[worker] for worker in working if worker in held}
    return values, tensors


def require_same(promise: str, before: ServerState, after: ServerState) -> None:
    """Require that a server rebuilt from checkpoint and log equals the original in every value and bit."""
    for name, value in before[0].items():
        require(after[0][name] == value, promise, "{} was {}, is {}", name, value, after[0][name])
    require(before[1].keys() == after[1].keys(), promise, "{} became {}", set(before[1]), set(after[1]))
    for name, tensor in before[1].items():
        require(same_bits(tensor, after[1][name]), promise, "{} was {}, is {}", name, tensor, after[1][name])


class InvariantChecker:
    """Checks every input, update and reply, across all restarts of the server."""

    def __init__(self, trial: Trial, memories: Mapping[int, WorkerBuffers]) -> None:
        self._memories = memories
        self._strategy, self._budget, self._poison = strategy_of(trial.strategy), trial.budget, trial.poison
        self._quotas, self._quota = trial.quotas, trial.quota
        self._membership = MembershipModel(trial.workers, trial.room is not None, self._strategy.in_rounds)
        self._predicts = rule_of(trial.rule).traits.sends_others
        self._plain = rule_of(trial.rule).name in ("plain", "ringmaster")
        optimizer = trial.optimizer, trial.lr, trial.momentum
        if self._strategy.is_local:
            optimizer = "nesterov", trial.outer_lr, trial.outer_momentum
        self._oracle = SerialOracle(*optimizer, OPTIMUM[0])
        self._exact = trial.codec is None and trial.pull_codec is None and not self._strategy.is_local
        """Whether an update is the gradient at weights of the server, so that there is a bound of the distance left."""
        self._max_steps = self._strategy.local_steps if self._strategy.is_local else 0
        self._models: defaultdict[tuple[int, int], WorkerModel] = defaultdict(lambda: WorkerModel(trial))
        averages = average_horizon(trial.config) is not None
        self._average = AverageOracle(trial.average, [0.0] * len(OPTIMUM)) if averages else None
        self._weights = [torch.zeros(len(OPTIMUM))]
        self._scratch = torch.zeros(len(OPTIMUM))
        self._samples = self._num_applied = 0
        self._accepted: Counter[int] = Counter()
        self._applied, self._dropped = set[PushIdentity](), set[PushIdentity]()
        self._last_reply: dict[int, Reply] = {}
        self._sent: dict[int, Tensor] = {}
        self._incarnations: dict[int, int] = {}
        self._dead: set[tuple[int, int]] = set()
        self._too_late: set[tuple[int, int]] = set()  # workers that joined after the end of the run
        self._clocks: dict[int, int] = {}

    def on_update(self, update: AppliedUpdate, server: Server) -> None:
        """Check one update of the server."""
        pushes = update.pushes
        version = len(self._weights) - 1
        spent = self._budget.exhausted(self._samples, version)
        require(not spent, "budget", "update {} after the budget was spent", version)
        require(server.version == version + 1, "growth", "version {} after {}", server.version, version)
        if self._strategy.in_rounds:
            least = self._round_size(update.num_live - len(self._membership.waiting))
            require(len(pushes) >= least, "round", "update {} has {} pushes of {}", version, len(pushes), least)
        parts = [self._part(push, version, server) for push in pushes]
        present = self._present(server)
        for push in pushes:
            quota = self._quota(push.worker)
            left = quota is None or self._accepted[push.worker] < quota
            require(left, "budget", "push {} exceeds a quota of {}", push[:3], quota)
            self._accepted[push.worker] += max(1, self._last_reply[push.worker].steps)
            self._num_applied += 1
            self._clocks[push.worker] = self._clocks.get(push.worker, 0) + 1
            self._samples += push.samples
        self._weights.append(server.weights.clone())
        finite = math.isfinite(sum(server.weights.tolist()))
        require(finite, "finite", "update {} gives {}", version, server.weights)
        if self._average is not None:
            self._check_average(self._average, present, server)
        if not self._plain:
            return  # the tests have an oracle for each of the other rules
        expected, found = self._oracle.apply(parts), server.weights.tolist()[0]
        near = abs(found - expected) <= ROUNDING * max(abs(expected), abs(OPTIMUM[0]))
        require(near, "weights", "update {} gives {}, the serial oracle {}", version, found, expected)

    def _present(self, server: Server) -> float:
        """Return the share of the data that is still computed on, among workers that finish or have finished it."""
        quotas = {worker: quota for worker, quota in enumerate(self._quotas) if quota is not None}
        finished = sum(quota for worker, quota in quotas.items() if self._accepted[worker] >= quota)
        working = sum(quota for worker, quota in quotas.items() if worker in server.roster.at_work)
        return working / (working + finished) if finished else 1.0

    def _check_average(self, oracle: AverageOracle, present: float, server: Server) -> None:
        """Check the weights that would be evaluated and saved."""
        oracle.apply(server.weights.tolist(), present)
        for found, expected in zip(server.evaluated.tolist(), oracle.average, strict=True):
            near = abs(found - expected) <= 10 * ROUNDING * max(1.0, abs(expected))
            require(near, "average", "update {} averages to {}, the oracle to {}", server.version, found, expected)

    def _part(self, push: Push, version: int, server: Server) -> AppliedPush:
        """Check an applied push: new, from a live worker, and the gradient at the weights the worker was sent."""
        identity = push[:3]
        require(identity not in self._applied, "once", "push {} is applied again in update {}", identity, version)
        self._applied.add(identity)
        last = self._last_reply.get(push.worker)
        require(identity[:2] not in self._dead, "dead", "push {} of a worker that left is applied", identity)
        known = last is not None and (last.incarnation, last.serial) == (push.incarnation, push.reply)
        require(known, "weights", "push {} does not answer {}", identity, last)
        assert last is not None
        if self._strategy.in_rounds:
            require(last.version == version, "bound", "a round of version {} holds a push from {}", version, last)
        shard = shard_of(push.worker, last.assignment)
        batches, weight = range(last.batch, last.batch + max(1, last.steps)), push.weight or push.samples
        weighted = push.weight is None or push.weight == sum(0.5 + (shard + 3 * batch) % 4 for batch in batches)
        require(weighted, "counts", "push {} of batches {} has weight {}", identity, batches, push.weight)
        poisoned = self._poison is not None and push.worker == self._poison[0] and self._poison[1] in batches
        require(not poisoned, "finite", "push {} is applied although it has a NaN", identity)
        if self._exact:
            gradient = gradient_at(self._sent[push.worker], shard, last.batch, self._scratch)
            same = torch.equal(gradient, push.update)
            require(same, "weights", "push {} is not the gradient that {} asks for", identity, last)
            return AppliedPush(last.version, weight, curvature(shard, last.batch))
        model = self._models[identity[:2]]
        model.count(model.update_of(self._sent[push.worker], last, shard), push.update)
        model.check_left_out(self._saved_state(push.worker, server))
        return AppliedPush(last.version, weight, curvature(shard, last.batch), push.update.tolist()[0])

    def _saved_state(self, worker: int, server: Server) -> Tensor:
        """Return the local state that the worker has saved with its last push that was not dropped."""
        return self._memories[worker].saved_state(server.members[worker].saved)

    def on_weights(self, reply: Reply, server: Server) -> None:
        """Check the weights sent with a reply: those of its version, unless they are predicted or encoded."""
        worker, wanted, differences = reply.worker, self._weights[-1], server.differences
        sent = self._memories[worker].weights if differences is None else differences.held[worker]
        if not self._predicts and (differences is None or not reply.serial):
            require(same_bits(sent, wanted), "weights", "worker {} is sent {}, not {}", worker, sent, wanted)
        elif not self._predicts:
            before, after = ((wanted - weights).abs().amax().item() for weights in (self._sent[worker], sent))
            nearer = after <= before * (1.0 + ROUNDING) + ROUNDING
            require(nearer, "weights", "worker {} was {} from the weights, and is sent to {}", worker, before, after)
        self._sent[worker] = sent.clone()

    def on_input(self, message: Input, outcome: Outcome, server: Server) -> None:
        """Check the server and its replies after one input."""
        version = len(self._weights) - 1
        require(server.version == version, "growth", "version {} after {} updates", server.version, version)
        require(server.samples == self._samples, "growth", "{} samples, not {}", server.samples, self._samples)
        counted = self._num_applied + server.dropped + server.late + len(server.held)
        if server.divergence is None:
            require(server.pushes == counted, "counts", "{} pushes, {} accounted for", server.pushes, counted)
        if outcome.disposition == Disposition.TAKEN:
            self._track(message)
            if isinstance(message, Join) and server.finished:
                self._too_late.add((message.worker, message.incarnation))
        for worker in [w for w in self._clocks if self._accepted[w] == self._quota(w)]:
            del self._clocks[worker]
        if isinstance(message, Push) and outcome.disposition == Disposition.DROPPED:
            self._on_drop(message, server)
        for reply in outcome.replies:
            if reply.finished and not server.finished:
                self._check_last_push(reply)
            self._check(reply, version, outcome.disposition == Disposition.REPEATED)
        if not server.finished:
            self._membership.check_waiting(self._clocks)
        if server.started and not server.finished and self._clocks:
            self._check_held_back(server)

    def _on_drop(self, push: Push, server: Server) -> None:
        """Check that a dropped push took nothing out of its worker's error feedback."""
        self._dropped.add(push[:3])
        self._models[push[:2]].discarded += 1
        if not self._exact:
            self._models[push[:2]].check_left_out(self._saved_state(push.worker, server))

    def _track(self, message: Input) -> None:
        """Update the expected members and their clocks from an accepted input."""
        match message:
            case Join(worker, incarnation):
                self._incarnations[worker] = incarnation
                if not self._membership.on_join(worker, self._clocks, len(self._weights) - 1):
                    self._clocks[worker] = min(self._clocks.values(), default=0)
            case Push():
                self._membership.begun = True
            case Drain(worker):
                self._membership.draining.add(worker)
            case Leave(worker, incarnation):
                known = self._incarnations.get(worker, -1)
                self._dead.add((worker, min(incarnation, known)))
                if incarnation >= known:
                    self._clocks.pop(worker, None)
                    self._membership.waiting.pop(worker, None)
            case Resume():
                self._dead |= set(self._incarnations.items())
                self._clocks.clear()
                self._membership.clear()

    def _check(self, reply: Reply, version: int, repeated: bool) -> None:
        """Check a reply: to a live worker, with the newest version and the next batch, within the staleness bound."""
        worker, last = reply.worker, self._last_reply.get(reply.worker)
        name = (worker, reply.incarnation)
        require(name not in self._dead, "dead", "{} for a worker that left", reply)
        require(self._incarnations.get(worker) == reply.incarnation, "dead", "{} for an unknown worker", reply)
        if repeated:
            same = last is not None and last._replace(finished=reply.finished) == reply
            require(same, "growth", "a repeated push gets {}, the first got {}", reply, last)
            return
        newest = reply.version == version or (
            reply.finished and reply.version < version
        )  # a leave may complete a round
        require(newest, "growth", "{} at version {}", reply, version)
        discarded = self._models[name].discarded
        require(reply.discarded == discarded, "counts", "{} after {} dropped pushes", reply, discarded)
        steps_fit = reply.finished or (reply.steps <= self._max_steps and (reply.steps > 0) == (self._max_steps > 0))
        require(steps_fit, "batch", "{} asks for more than {} local steps", reply, self._max_steps)
        require(last is None or last.version <= reply.version, "growth", "{} after {}", reply, last)
        if not reply.finished:
            self._membership.on_reply(worker, self._clocks, version)
            self._membership.check_assignment(reply, self._accepted[worker], self._clocks)
        accepted = self._accepted[worker] - self._membership.accepted_before(worker)
        require(reply.batch == accepted, "batch", "{} after {} accepted", reply, accepted)
        self._last_reply[worker] = reply
        if reply.finished and worker in self._membership.draining:
            self._membership.draining.discard(worker)
            self._membership.waiting.pop(worker, None)
            self._membership.released.add(worker)
            self._clocks.pop(worker, None)
        require(reply.finished or worker in self._clocks, "budget", "{} for a worker that has no work left", reply)
        if self._strategy.waiting is Waiting.BOUNDED and not reply.finished:
            ahead = self._clocks[worker] - min(self._clocks.values())
            require(ahead <= self._strategy.max_lead, "bound", "{} continues {} steps ahead", name, ahead)

    def _check_last_push(self, reply: Reply) -> None:
        """Check that the last push of a worker that is sent away was applied, or dropped by the policy."""
        last = self._last_reply.get(reply.worker)
        if last is not None and not last.finished and last.incarnation == reply.incarnation:
            push = (last.worker, last.incarnation, last.serial)
            require(
                push in self._applied | self._dropped, "last push", "{} although push {} was not counted", reply, push
            )

    def _round_size(self, live: int) -> int:
        """Return how many pushes a round of `live` workers waits for: a lost worker uses up a spare."""
        return max(1, min(live, self._strategy.pushes_per_update(max(live, len(self._quotas)))))

    def _check_held_back(self, server: Server) -> None:
        """Check that a worker waits only for missing pushes of its round, or for one too far behind."""
        held = [worker for worker in self._clocks if server.members[worker].waiting]
        if self._strategy.in_rounds:
            needed = self._round_size(len(self._clocks))
            require(len(held) < needed, "held", "a round of {} waits although {} have pushed", needed, held)
            return
        if self._strategy.waiting is Waiting.BOUNDED:
            least = min(self._clocks.values()) + self._strategy.max_lead
            held = [worker for worker in held if self._clocks[worker] <= least]
        require(not held, "held", "workers {} wait without a reason, clocks {}", held, self._clocks)

    def on_end(self, server: Server, gone: set[int | None]) -> None:
        """Check the end of a run: its budget is spent exactly, or every missing worker is gone permanently."""
        if server.divergence is not None:
            found = self._poison is not None and server.divergence.worker == self._poison[0]
            require(found and server.finished, "finite", "ended by {}, poison is {}", server.divergence, self._poison)
            return
        version, accepted = len(self._weights) - 1, self._accepted
        working = [w for w, quota in enumerate(self._quotas) if quota is None or accepted[w] < quota]
        if not server.finished:
            missing = [w for w in working if w not in gone]
            require(not missing, "budget", "the run ended although workers {} were to return", missing)
        elif self._budget.per_worker and self._budget.steps is None:
            joined = self._incarnations.keys() - self._membership.released
            gone_or_late = self._dead | self._too_late
            missing = [w for w in working if w in joined and (w, self._incarnations[w]) not in gone_or_late]
            require(not missing, "budget", "over while workers {} have work left", missing)
        else:
            require(self._budget.exhausted(self._samples, version), "budget", "over after {} samples", self._samples)
        if not self._plain or not self._exact:
            return
        for found, answer in zip(server.weights.tolist(), OPTIMUM, strict=True):
            left, allowed = abs(found - answer), self._oracle.tolerance(abs(answer)) + ROUNDING
            require(left <= allowed, "optimum", "{} is {} from the optimum, {} is allowed", found, left, allowed)
