"""The server: a state machine. Inputs in (join, push, leave and the like), replies out; it owns the only weights.

It reads no clock, opens no socket and draws no random number, so feeding it the same inputs gives the same weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.core.buffers import Memory
from paceline.core.compression import DENSE, Codecs, Decoded, Differences, Opened
from paceline.core.membership import Deals, Member
from paceline.core.messages import Drain, Input, Join, Leave, Outcome, Push, Rate, Reply, Resume, Steps, Stop, Verdict
from paceline.core.schedules import Budget, Inside, Schedule
from paceline.interfaces import Arrival, Codec, Decision, Policy, Rule


@dataclass(frozen=True)
class Divergence:
    """The push that ended a run: it held a NaN or an infinity and was not applied."""

    worker: int
    version: int
    loss: float


Mean: TypeAlias = Callable[[list[Push], int], Tensor]
"""How the pushes of a round, so many samples together, become one update; a ring brings it along already made."""


class Server:
    """Turns pushes into weights; the policy says when, the rule says how."""

    def __init__(
        self,
        weights: Tensor,
        rule: Rule,
        policy: Policy,
        budget: Budget,
        schedule: Schedule,
        num_workers: int,
        mean: Mean | None = None,
        codecs: Codecs = DENSE,
        nbytes: int | None = None,
        inside: Inside | None = None,
        places: int | None = None,
    ) -> None:
        """`nbytes` is what all weights take, where a simulation of times alone has none of them.

        With `places`, workers up to that number may come and go, and the data is dealt anew when they do.
        """
        self.weights = weights
        self.rule = rule
        self.policy = policy
        self.budget = budget
        self.schedule = schedule
        self.num_workers = num_workers
        self.places = places or num_workers
        self.deals = Deals(num_workers) if places is not None else None
        self.inside = inside
        self.steps: dict[int, int] = {}
        """Of workers that make fewer local steps than the others."""
        self.lr_factor = 1.0
        """What the schedule's learning rate is multiplied by."""
        self.rule_state = rule.start(weights)
        self.members: dict[int, Member] = {}
        self.worker_states: dict[int, Tensor] = {}
        self.version = 0
        self.samples = 0
        self.dropped = 0
        self.late = 0
        self.lost = 0
        """Pushes that were taken and, after a crash, not computed again."""
        self.pushes = 0
        self.replies = 0
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self.staleness: Counter[int] = Counter()
        self.over = False
        self.divergence: Divergence | None = None
        self._awaited = set(range(num_workers))
        self._roll: list[int] = []
        self._held: dict[int, Push] = {}
        self._num_live: int | None = None
        self._is_dealt = True
        self._is_part = False
        self._lr = torch.zeros((), device=weights.device)
        self._lr_value = 0.0
        self._mean = torch.empty_like(weights) if self.places > 1 and mean is None else weights
        self._mean_of = mean or self._weighted_mean
        self._has_weights = weights.numel() > 0  # a simulation of times alone has none
        self.nbytes = nbytes if nbytes is not None else weights.nbytes
        self.codecs = codecs
        encoded = codecs if self._has_weights else DENSE
        self._decoded = Decoded(encoded.push, weights) if encoded.push is not None else None
        self.differences = Differences(encoded.pull, codecs.key, weights) if encoded.pull is not None else None

    def keep_to(self, rule: Rule, span: slice, opened: Opened | None = None, pull: Codec | None = None) -> None:
        """From now on pushes are of this range of the weights alone, and `rule` and the codec `pull` keep to it."""
        self.rule, self._is_part = rule, True
        self._mean = torch.empty_like(self.weights[span])
        self.take_opened(opened)
        if self.differences is not None:
            assert pull is not None and not self.differences.held
            self.differences.keep_to(pull, span)

    def take_opened(self, opened: Opened | None) -> None:
        """From now on pushes come decoded; None: they were never encoded."""
        self._decoded = opened

    def steps_of(self, worker: int) -> int:
        """Steps that the push of `worker` on its way is made of."""
        member = self.members.get(worker)
        return max(1, member.steps) if member is not None else 1

    @property
    def num_live(self) -> int:
        """Workers that are here and still have work."""
        if self._num_live is None:
            self._num_live = sum(member.live and not member.done for member in self.members.values())
        return self._num_live

    @property
    def evaluated(self) -> Tensor:
        """The weights to score and to save: the live ones, unless the rule averages."""
        return self.rule.evaluated(self.weights, self.rule_state)

    @property
    def started(self) -> bool:
        """Whether every awaited worker has come (or is known never to come)."""
        return not self._awaited

    @property
    def awaited(self) -> list[int]:
        """Who has not come yet, and is not known never to come."""
        return sorted(self._awaited)

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self._lr_by(self.schedule)

    @property
    def lr_inside(self) -> float:
        """The learning rate of the batches dealt now: of local steps, where there are some."""
        return self._lr_by(self.inside.schedule if self.inside is not None else self.schedule)

    def _lr_by(self, schedule: Schedule) -> float:
        fraction = self.budget.fraction(self.samples, self.version)
        return schedule.lr(fraction, self.samples / self.budget.epoch_samples) * self.lr_factor

    def handle(self, message: Input) -> Outcome:
        """Take one input; the replies it sets free come back in the order they are to be sent."""
        match message:
            case Push():
                return self._push(message)
            case Join():
                return self._join(message)
            case Leave():
                return self._leave(message)
            case Steps(worker, steps):
                self.steps[worker] = steps
                return Outcome(Verdict.TAKEN)
            case Rate(_, factor):
                self.lr_factor = factor
                return Outcome(Verdict.TAKEN)
            case Drain(worker):
                return self._drain(worker)
            case Stop():
                return Outcome(Verdict.TAKEN, self._finish())
            case Resume(_, lost):
                self.lost += lost
                return self._resume()

    def weights_for(self, worker: int, out: Tensor) -> None:
        """Write what `worker` was just answered with into its memory."""
        if self._has_weights:
            self.rule.weights_for(self.weights, self.rule_state, worker, out)

    def hand_out(self, reply: Reply, memory: Memory) -> None:
        """Write what a reply speaks of into its worker's memory, once: all weights, or how those it has change."""
        worker, pull = reply.worker, self.codecs.pull
        if pull is None or not reply.serial:
            memory.nbytes = self.nbytes
            self.weights_for(worker, memory.weights)
            if self.differences is not None:
                self.differences.begin(worker, memory.weights)
        elif self.differences is None:
            memory.nbytes = pull.capacity
        else:
            written = self.differences.encode(worker, lambda out: self.weights_for(worker, out), memory.pulled)
            memory.num_pulled = written
            memory.nbytes = pull.capacity if self._is_part else written  # then others write the rest
        self.bytes_pulled += memory.nbytes

    def nbytes_of(self, push: Push) -> int:
        """What a push weighs on the way."""
        if self.codecs.push is None:
            return self.nbytes
        return self._decoded.nbytes_of(push.update) if self._decoded is not None else self.codecs.push.capacity

    def _join(self, join: Join) -> Outcome:
        member = self.members.get(join.worker)
        if member is not None and (member.live or join.incarnation <= member.incarnation):
            return Outcome(Verdict.REJECTED)
        if join.worker >= self.places:
            return Outcome(Verdict.REJECTED)
        accepted, pushes = (member.accepted, member.pushes) if member else (0, 0)
        unwanted = member is not None and member.draining and not member.dismissed  # lost before it could be told
        member = Member(join.incarnation, join.quota, accepted=accepted, pushes=pushes, dismissed=unwanted)
        member.threads = join.threads
        self.members[join.worker] = member
        self._count_again()
        was_started = self.started
        self._awaited.discard(join.worker)
        if not member.done:
            self.rule.join(self.rule_state, join.worker)
        if self.over or member.done:
            return Outcome(Verdict.TAKEN, (self._answer(join.worker, over=True), *self._start(was_started)))
        decision = self.policy.join(join.worker)
        return Outcome(Verdict.TAKEN, self._settle(decision) if was_started else self._start(was_started))

    def _count_again(self) -> None:
        """Somebody came, has no work left, or is about to go: who is at work must be looked at anew."""
        self._num_live = None
        self._is_dealt = False

    def _start(self, was_started: bool) -> tuple[Reply, ...]:
        """The starting line: nobody is answered before all have come, then everybody is, in worker order."""
        if was_started or not self.started:
            return ()
        waiting = [worker for worker, member in sorted(self.members.items()) if member.live and member.waiting]
        return tuple(self._answer(worker) for worker in waiting)

    def _push(self, push: Push) -> Outcome:
        member = self.members.get(push.worker)
        if member is None or not member.live or push.incarnation != member.incarnation:
            return Outcome(Verdict.REJECTED)
        if push.seq <= member.seq:
            again = () if member.waiting or push.seq < member.seq else (self.last_answer(push.worker),)
            return Outcome(Verdict.REPEATED, again)
        if member.waiting or push.reply != member.serial:
            return Outcome(Verdict.REJECTED)  # one reply is worth one push
        nbytes = self.nbytes_of(push)
        if self._decoded is not None and not self.over:
            push = push._replace(update=self._decoded.decode(push.update))  # before anything is changed
        self.bytes_pushed += nbytes
        member.heard(self.version)
        member.seq, member.waiting = push.seq, True
        member.pushes += 1
        self.pushes += 1
        if push.state.numel():
            self.worker_states[push.worker] = push.state.clone()
        if self.over:
            self.late += 1
            return Outcome(Verdict.LATE, (self._answer(push.worker, over=True),))
        decision = self.policy.push(push.worker, self.version - member.version)
        if decision.dropped:
            self.dropped += 1
            self._free([push])
        else:
            self._held[push.worker] = push
        replies = self._settle(decision)
        if self.divergence is not None and self.divergence.worker == push.worker:
            return Outcome(Verdict.REJECTED, replies)
        return Outcome(Verdict.DROPPED if decision.dropped else Verdict.TAKEN, replies)

    def _leave(self, leave: Leave) -> Outcome:
        member = self.members.get(leave.worker)
        if member is not None and leave.incarnation < member.incarnation + (not member.live):
            return Outcome(Verdict.REJECTED)  # old news
        was_started = self.started
        self._awaited.discard(leave.worker)
        if member is None or not member.live:
            return Outcome(Verdict.TAKEN, self._start(was_started))
        had_work = not member.done
        member.live = member.waiting = False
        self._count_again()
        if self.differences is not None:
            self.differences.forget(leave.worker)
        held = self._held.pop(leave.worker, None)
        if held is not None:
            self.dropped += 1
            self._free([held])
        if had_work:
            self.rule.leave(self.rule_state, leave.worker)
        if not had_work or self.over:
            return Outcome(Verdict.TAKEN)
        replies = self._settle(self.policy.leave(leave.worker))
        return Outcome(Verdict.TAKEN, (*replies, *self._start(was_started)))

    def _drain(self, worker: int) -> Outcome:
        """Once its push counts, or at once where it has none, `worker` is told that it is over for it."""
        member = self.members.get(worker)
        if self.over or member is None or not member.live or member.done or member.draining:
            return Outcome(Verdict.REJECTED)
        member.draining = True
        self._count_again()
        if not member.waiting or worker in self._held:
            return Outcome(Verdict.TAKEN)
        return Outcome(Verdict.TAKEN, self._settle(Decision(release=(worker,))))

    def _resume(self) -> Outcome:
        """Everybody is gone, pushes not yet applied are forgotten, and a new starting line is drawn."""
        for worker, member in self.members.items():
            if member.live and not member.done:
                self.rule.leave(self.rule_state, worker)
            member.live = member.waiting = False
            if self.differences is not None:
                self.differences.forget(worker)
        self._count_again()
        self._forget_held()
        self.policy.clear()
        known, crew = self.members, range(self.num_workers)
        self._awaited = {worker for worker in crew if worker not in known or not known[worker].done}
        all_spent = all(worker in known and known[worker].spent for worker in crew)
        self.over = self.budget.spent(self.samples, self.version) or all_spent
        return Outcome(Verdict.TAKEN)

    def _forget_held(self) -> None:
        """Pushes that will never be applied: nobody was told that they count."""
        self.dropped += len(self._held)
        self._free(self._held.values())
        self._held.clear()

    def _free(self, pushes: Iterable[Push]) -> None:
        """Pushes that are done with: memory they were decoded into serves others."""
        if self._decoded is not None:
            for push in pushes:
                self._decoded.free(push.update)

    def _settle(self, decision: Decision) -> tuple[Reply, ...]:
        """Carry a decision out: one update, then the answers it sets free, then those who have finished their work."""
        if decision.apply and (not self._apply(decision.apply) or self.budget.spent(self.samples, self.version)):
            return self._finish()
        answered = dict.fromkeys((*decision.apply, *decision.release))
        finished = [worker for worker in answered if self.members[worker].spent or self.members[worker].draining]
        if finished:
            self._count_again()
        for worker in finished:
            self.members[worker].dismissed = self.members[worker].draining
        replies = [self._answer(worker) for worker in decision.release if worker not in finished]
        for worker in finished:
            replies.append(self._answer(worker, over=True))
            self.rule.leave(self.rule_state, worker)
            replies.extend(self._settle(self.policy.leave(worker)))
        if any(self.members[worker].spent for worker in finished) and not self.num_live and not self._awaited:
            self.over = True
        return tuple(replies)

    def _apply(self, workers: tuple[int, ...]) -> bool:
        """One update from the held pushes of `workers`; False, and nothing changed, when it is not finite."""
        pushes = [self._held.pop(worker) for worker in workers]
        samples = sum(push.samples for push in pushes)
        staleness = [self.version - self.members[worker].version for worker in workers]
        if self._has_weights and not self._change_weights(pushes, samples, max(staleness)):
            return False
        self._free(pushes)
        self.version += 1
        self.samples += samples
        for worker, age in zip(workers, staleness, strict=True):
            self.staleness[age] += 1
            self.members[worker].accepted += self.steps_of(worker)
        if self._has_weights:
            self._look_for_silence()
        return True

    def _look_for_silence(self) -> None:
        """At one member an update: of who has fallen silent, the rule goes on without what it last said."""
        if len(self._roll) != len(self.members):
            self._roll = sorted(self.members)
        worker = self._roll[self.version % len(self._roll)]
        if self.members[worker].fell_silent(self.version, self.num_live):
            self.rule.lapse(self.rule_state, worker)

    def _change_weights(self, pushes: list[Push], samples: int, staleness: int) -> bool:
        """Hand the rule the push, or the mean of several; False when it holds a NaN or an infinity."""
        update = pushes[0].update if len(pushes) == 1 else self._mean_of(pushes, samples)
        if not math.isfinite(update.sum().item()):
            broken = [push for push in pushes if not torch.isfinite(push.update).all()]
            if broken:
                first = next((push for push in broken if not math.isfinite(push.loss)), broken[0])
                self.divergence = Divergence(first.worker, self.version, first.loss)
                return False
        alone = pushes[0].worker if len(pushes) == 1 else None
        self._set_lr(self.lr)
        self.rule.apply(self.weights, self.rule_state, update, Arrival(alone, staleness, self._lr, self.num_live))
        return True

    def _set_lr(self, value: float) -> None:
        if value != self._lr_value:
            self._lr.fill_(value)
            self._lr_value = value

    def _weighted_mean(self, pushes: list[Push], samples: int) -> Tensor:
        """The mean over samples, summed in worker order so that it is the same in every process."""
        first, *rest = pushes
        if all(push.samples == first.samples for push in rest):
            torch.add(first.update, rest[0].update, out=self._mean)
            for push in rest[1:]:
                self._mean.add_(push.update)
            return self._mean.div_(len(pushes))
        torch.mul(first.update, first.samples / samples, out=self._mean)
        for push in rest:
            self._mean.add_(push.update, alpha=push.samples / samples)
        return self._mean

    def _finish(self) -> tuple[Reply, ...]:
        self.over = True
        self._forget_held()
        waiting = [worker for worker, member in sorted(self.members.items()) if member.live and member.waiting]
        return tuple(self._answer(worker, over=True) for worker in waiting)

    def _answer(self, worker: int, over: bool = False) -> Reply:
        member = self.members[worker]
        member.waiting = False
        member.serial += 1
        self.replies += 1
        member.version = self.version
        if self.deals is not None and not over:
            self._deal(worker, member, self.deals)
        if self.inside is not None:
            self._deal_steps(worker, member, self.inside)
        return self._reply(worker, member, over)

    def _deal(self, worker: int, member: Member, deals: Deals) -> None:
        """Let the worker know its share of the data; the first answer after a change of membership deals anew."""
        if not self._is_dealt:
            deals.look(tuple(w for w, m in sorted(self.members.items()) if m.live and not (m.done or m.draining)))
            self._is_dealt = True
        deals.tell(worker, member.accepted)

    def _deal_steps(self, worker: int, member: Member, inside: Inside) -> None:
        """How many batches the worker is to step on by itself; the last of its quota are fewer."""
        left = inside.steps if member.quota is None else member.quota - member.accepted
        member.steps = max(0, min(self.steps.get(worker, inside.steps), left))
        member.lr = self.lr_inside

    def _reply(self, worker: int, member: Member, over: bool) -> Reply:
        deal, before = self.deals.told(worker) if self.deals is not None else (None, 0)
        named = (worker, member.incarnation, member.serial, member.version)
        return Reply(*named, member.accepted - before, over, member.steps, member.lr, deal)

    def last_answer(self, worker: int) -> Reply:
        """What `worker` was told last."""
        member = self.members[worker]
        return self._reply(worker, member, self.over or member.done)

    @property
    def can_be_cut(self) -> bool:
        """Whether this is a moment between updates, with no push held that a checkpoint would lose."""
        return not self._held

    def facts(self) -> dict[str, Any]:
        """Everything but tensors that is needed to go on from here, as JSON values."""
        assert self.can_be_cut, "a cut is taken between updates, when no push is held"
        return {
            "rule": self.rule.name,
            "version": self.version,
            "samples": self.samples,
            "dropped": self.dropped,
            "late": self.late,
            "lost": self.lost,
            "pushes": self.pushes,
            "replies": self.replies,
            "bytes_pushed": self.bytes_pushed,
            "bytes_pulled": self.bytes_pulled,
            "codecs": self.codecs.names,
            "over": self.over,
            "staleness": sorted(self.staleness.items()),
            "members": {str(worker): asdict(member) for worker, member in self.members.items()},
            "awaited": sorted(self._awaited),
            "policy": self.policy.facts(),
            "steps": sorted(self.steps.items()),
            **({"lr_factor": self.lr_factor} if self.lr_factor != 1.0 else {}),
            **({"deals": self.deals.facts()} if self.deals is not None else {}),
        }

    def restore(self, facts: dict[str, Any], weights: Tensor, rule_state: dict[str, Tensor]) -> None:
        """Become the server that `facts`, `weights` and `rule_state` were taken from."""
        self.weights.copy_(weights)
        for name, tensor in self.rule_state.items():
            tensor.copy_(rule_state[name])
        self.version, self.samples = facts["version"], facts["samples"]
        self.dropped, self.late, self.over = facts["dropped"], facts["late"], facts["over"]
        self.lost = facts.get("lost", 0)
        self.pushes, self.replies = facts["pushes"], facts["replies"]
        self.bytes_pushed = facts.get("bytes_pushed", self.pushes * self.nbytes)
        self.bytes_pulled = facts.get("bytes_pulled", self.replies * self.nbytes)
        self.staleness = Counter({int(value): count for value, count in facts["staleness"]})
        self.members = {int(worker): Member(**fields) for worker, fields in facts["members"].items()}
        self._awaited = set(facts["awaited"])
        self.steps = dict(facts.get("steps", ()))
        self.lr_factor = facts.get("lr_factor", 1.0)
        self._count_again()
        if self.deals is not None:
            self.deals.restore(facts["deals"])
        self.policy.restore(facts["policy"])
