"""The state machine: one input in, replies out. No clock, no socket, no random number: equal inputs, equal weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch import Tensor

from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import (
    Discard,
    Disposition,
    Drain,
    Expel,
    Input,
    Join,
    Leave,
    Outcome,
    Push,
    Reply,
    Resume,
    SetLocalSteps,
    SkipBatch,
    Stop,
)
from paceline.core.own_loop.settings import OwnLoops
from paceline.core.schedules import Training
from paceline.core.server.guard import Guard, NormHistory
from paceline.core.server.roster import Roster
from paceline.core.server.updates import RECOMPUTE_EVERY, AppliedUpdate, Divergence, Exchange, Updater
from paceline.interfaces import Decision, Policy, Rule


class Server:
    """Turns pushes into weights: the policy says when, the rule says how.

    The `roster` knows the workers and their work; the `updater` owns the weights and applies pushes to them.
    """

    def __init__(
        self,
        weights: Tensor,
        rule: Rule,
        policy: Policy,
        training: Training,
        roster: Roster,
        exchange: Exchange | None = None,
    ) -> None:
        self.policy, self.training, self.roster = policy, training, roster
        self.budget, self.inside = training.budget, training.inner
        self.num_workers, self.max_workers = roster.num_workers, roster.max_workers
        self.members, self.assignments, self.steps = roster.members, roster.assignments, roster.steps
        self.updater = Updater(weights, rule, exchange or Exchange(), roster.max_workers)
        self.weights, self.rule_state = self.updater.weights, self.updater.rule_state
        self.codecs, self.nbytes, self.differences = self.updater.codecs, self.updater.nbytes, self.updater.differences
        self.own_loops = (exchange.own_loops if exchange is not None else None) or OwnLoops()
        self.worker_states: dict[int, Tensor] = {}
        self.own_states: dict[int, Tensor] = {}  # by worker, what its next incarnation begins with after a resume
        self.version = self.samples = 0
        self.pushes = self.replies = self.bytes_pushed = self.bytes_pulled = 0
        self.dropped = self.late = self.lost = self.skipped = 0
        """Pushes that were never applied; lost ones were taken before a crash and not computed again. Skipped ones
        have weight 0: a user's `GradScaler` found an infinity."""
        self.taken = 0  # pushes that are part of an update, or skipped; a push of H local steps counts H
        self.staleness: Counter[int] = Counter()
        self.finished = False
        self.divergence: Divergence | None = None
        self.held: dict[int, Push] = {}  # by worker, taken pushes that wait for their round to close
        self.norms = NormHistory()
        self.guard: Guard | None = None  # judges each push before it counts; a replay needs none: verdicts are inputs
        self.on_update: Callable[[AppliedUpdate], None] | None = None  # called after every update
        self.by_optimizer: tuple[Server, ...] = (self,)  # several in an `OptimizersServer`

    @property
    def rule(self) -> Rule:
        return self.updater.rule

    @property
    def num_live(self) -> int:
        """How many workers are connected and have work left."""
        return len(self.roster.at_work)

    @property
    def started(self) -> bool:
        """Whether every expected worker has joined, or is known never to join."""
        return not self.roster.pending

    @property
    def pending_workers(self) -> list[int]:
        """Workers that the start barrier still waits for."""
        return sorted(self.roster.pending)

    @property
    def can_checkpoint(self) -> bool:
        """Whether a checkpoint can be taken now: no push is held that it would lose."""
        return not self.held

    @property
    def evaluated(self) -> Tensor:
        """The weights to evaluate and to save: the live ones, unless the rule averages."""
        return self.rule.evaluated(self.weights, self.rule_state)

    @property
    def lr(self) -> float:
        """The learning rate of the next update, if the first live worker takes part in it."""
        return self.training.lr(self.samples, self.version) * self.own_loops.lr(self.roster.at_work)

    @property
    def lr_inside(self) -> float:
        """The learning rate of the batches that workers compute now: of local steps, if there are some."""
        return self.training.lr(self.samples, self.version, local=True) * self.own_loops.lr(self.roster.at_work)

    def last_answer(self, worker: int) -> Reply:
        """Build the newest reply to a worker again."""
        return self._reply(worker, self.finished or self.members[worker].inactive, again=True)

    def send_weights(self, reply: Reply, memory: WorkerBuffers) -> None:
        """Write what a reply promises into its worker's memory; once per reply.

        The first reply holds all weights. With a pull codec, each later one holds how the worker's weights change.
        """
        updater = self.updater
        if reply.serial and updater.codecs.pull is not None:
            memory.nbytes = updater.write_difference(reply.worker, memory)
        else:
            memory.nbytes = updater.nbytes
            if self.weights.numel():
                updater.rule.reply_weights(self.weights, self.rule_state, reply.worker, memory.weights)
            if not reply.serial:
                self.own_loops.bring_back(reply.worker, memory, is_elastic=self.assignments is not None)
                memory.bring_own_state(self.own_states.pop(reply.worker, None))
                memory.bring_state(self.roster.state_for(reply.worker, self.worker_states))
            if updater.differences is not None:
                updater.differences.begin(reply.worker, memory.weights)
        self.bytes_pulled += memory.nbytes

    def handle(self, message: Input) -> Outcome:
        """Take one input; return what became of it and the replies to send, in order."""
        match message:
            case Push():
                return self._push(message)
            case Join():
                return self._join(message)
            case Leave():
                return self._leave(message)
            case Expel() | Discard():
                return self._turn_down(message)
            case SkipBatch() | SetLocalSteps():
                self._set(message)
            case Drain(worker):
                return self._drain(worker)
            case Stop():
                return Outcome(Disposition.TAKEN, self._finish())
            case Resume(_, lost):
                self._resume(lost)
        return Outcome(Disposition.TAKEN)

    def _set(self, message: SkipBatch | SetLocalSteps) -> None:
        match message:
            case SkipBatch(worker, batch):
                self.roster.skip(worker, batch)
            case SetLocalSteps(worker, steps):
                self.roster.steps[worker] = steps

    def _push(self, push: Push) -> Outcome:
        worker, updater, member = push.worker, self.updater, self.members.get(push.worker)
        if member is None or not member.live or push.incarnation != member.incarnation:
            return Outcome(Disposition.REJECTED)
        if push.seq <= member.seq:
            is_unanswered = member.waiting or push.seq < member.seq
            return Outcome(Disposition.REPEATED, () if is_unanswered else (self.last_answer(worker),))
        if member.waiting or push.reply != member.serial:
            return Outcome(Disposition.REJECTED)  # one reply allows one push
        nbytes = updater.push_nbytes if updater.decoder is None else updater.nbytes_of(push)
        if updater.decoder is not None and not self.finished:
            push = push._replace(update=updater.decoder.decode(push.update))  # it may raise: change nothing before
        if self.guard is not None and not self.finished and (verdict := self.guard(push)) is not None:
            updater.free([push])
            return Outcome(verdict)
        self.pushes, self.bytes_pushed = self.pushes + 1, self.bytes_pushed + nbytes
        member.record_push(self.version)
        member.seq, member.waiting, member.pushes = push.seq, True, member.pushes + 1
        member.samples += push.samples
        if push.state.numel():
            self.worker_states[worker] = push.state.clone()
        if self.finished:
            self.late += 1
            return Outcome(Disposition.LATE, (self._reply(worker, finished=True),))
        decision = self.policy.push(worker, self.version - member.version)
        self.held[worker] = push
        if decision.dropped:
            member.discarded += 1
            self._drop([worker])
            member.dropped += member.own_loop
            self.own_loops.remember(push)  # it is a step of the loop all the same
        replies = self._carry_out(decision)
        if self.divergence is not None and self.divergence.worker == worker:
            return Outcome(Disposition.REJECTED, replies)
        return Outcome(Disposition.DROPPED if decision.dropped else Disposition.TAKEN, replies)

    def _turn_down(self, message: Expel | Discard) -> Outcome:
        """Take the input that stands for a push which its guard turned down."""
        worker, member = message.worker, self.members.get(message.worker)
        if self.finished or member is None or not member.live or message.incarnation != member.incarnation:
            return Outcome(Disposition.REJECTED)
        if isinstance(message, Expel):
            member.expelled = True
            return self._leave(Leave(worker, message.incarnation))
        if member.waiting or message.seq != member.serial:
            return Outcome(Disposition.REJECTED)
        self.pushes, self.dropped = self.pushes + 1, self.dropped + 1
        self.bytes_pushed += self.updater.push_nbytes
        member.record_push(self.version)
        member.seq, member.waiting, member.pushes = message.seq, True, member.pushes + 1
        member.discarded, member.dropped = member.discarded + 1, member.dropped + member.own_loop
        return Outcome(Disposition.TAKEN, self._carry_out(Decision(release=(worker,))))

    def _join(self, join: Join) -> Outcome:
        was_started = self.started
        member = self.roster.admit(join)
        if member is None:
            return Outcome(Disposition.REJECTED)
        if not member.inactive:
            self.rule.join(self.rule_state, join.worker)
        if self.finished or member.inactive:
            over = self._reply(join.worker, finished=True)
            return Outcome(Disposition.TAKEN, (over, *self._open_barrier(was_started)))
        decision = self.policy.join(join.worker)
        return Outcome(Disposition.TAKEN, self._carry_out(decision) if was_started else self._open_barrier(was_started))

    def _open_barrier(self, was_started: bool) -> tuple[Reply, ...]:
        """Reply to every worker, in worker order, once the last expected one has joined; to none before."""
        opens = self.started and not was_started
        return tuple(self._reply(worker) for worker in self.roster.waiting()) if opens else ()

    def _leave(self, leave: Leave) -> Outcome:
        worker, member = leave.worker, self.members.get(leave.worker)
        if member is not None and leave.incarnation < member.incarnation + (not member.live):
            return Outcome(Disposition.REJECTED)  # an earlier incarnation
        was_started, was_returning, returning = self.started, worker in self.roster.returning, self.roster.returning
        self.roster.pending.discard(worker)
        (returning.add if leave.returns else returning.discard)(worker)
        if member is not None and not self.finished:
            member.departed = not member.quota_reached
        if member is None or not member.live:
            if was_returning and any(other.quota_reached for other in self.members.values()):
                self._finish_if_done()  # the others have done their work and waited for this one
            return Outcome(Disposition.TAKEN, self._open_barrier(was_started))
        had_work = not member.inactive
        self._disconnect(worker)
        member.released = member.released or leave.done
        self.updater.recompute_sums()
        if worker in self.held:
            self._drop([worker])
        if not had_work or self.finished:
            return Outcome(Disposition.TAKEN)
        replies = self._carry_out(self.policy.leave(worker))
        return Outcome(Disposition.TAKEN, (*replies, *self._open_barrier(was_started)))

    def _disconnect(self, worker: int) -> None:
        """Mark a worker as gone: the rule and the reply encoder forget it."""
        member = self.members[worker]
        if member.live and not member.inactive:
            self.rule.leave(self.rule_state, worker)
        member.live = member.waiting = False
        self.roster.changed(worker)
        if self.updater.differences is not None:
            self.updater.differences.forget(worker)

    def _drain(self, worker: int) -> Outcome:
        """Let `worker` finish: its next reply says that it is over, at once if it has nothing left to push."""
        member = self.members.get(worker)
        if self.finished or member is None or not member.live or member.inactive or member.draining:
            return Outcome(Disposition.REJECTED)
        member.draining = True
        self.roster.changed(worker)
        if not member.waiting or worker in self.held:
            return Outcome(Disposition.TAKEN)
        return Outcome(Disposition.TAKEN, self._carry_out(Decision(release=(worker,))))

    def _resume(self, lost: int) -> None:
        """Go on after a stop or a crash: every worker is gone, held pushes are dropped, the start barrier is back."""
        self.lost += lost
        for worker in self.members:
            self._disconnect(worker)
        self.updater.recompute_sums()
        self._drop(self.held)
        self.policy.clear()
        self.roster.expect_again()
        self.finished = self._exhausted or self.roster.all_quotas_reached

    @property
    def _exhausted(self) -> bool:
        return self.budget.exhausted(self.samples, self.version, self.taken)

    def _drop(self, workers: Iterable[int]) -> None:
        """Drop held pushes of `workers`: they are never applied, and no reply says that they count."""
        pushes = [self.held.pop(worker) for worker in tuple(workers)]
        self.dropped += len(pushes)
        self.updater.free(pushes)

    def _carry_out(self, decision: Decision) -> tuple[Reply, ...]:
        """Make the update, reply to the workers that are released, then dismiss those that have finished their work."""
        if decision.apply and (not self._apply(decision.apply) or self._exhausted):
            return self._finish()
        members = self.members
        answered = dict.fromkeys((*decision.apply, *decision.release))
        finished = [w for w in answered if (m := members[w]).draining or (m.quota is not None and m.quota_reached)]
        for worker in finished:
            members[worker].released = members[worker].departed = members[worker].draining
            self.roster.changed(worker)
        replies = [self._reply(worker) for worker in decision.release if worker not in finished]
        for worker in finished:
            replies.append(self._reply(worker, finished=True))
            self.rule.leave(self.rule_state, worker)
            self.updater.recompute_sums()
            replies.extend(self._carry_out(self.policy.leave(worker)))
        if any(members[worker].quota_reached for worker in finished):
            self._finish_if_done()
        return tuple(replies)

    def _finish_if_done(self) -> None:
        """End training if no worker has work left, none is expected and none may come back."""
        if not self.num_live and self.started and not self.roster.returning:
            self.finished = True

    def _apply(self, workers: tuple[int, ...]) -> bool:
        """Make one update of the held pushes of `workers`; False, and no change, if it diverged."""
        pushes = self._without_skipped([self.held.pop(worker) for worker in workers])
        if not pushes:
            return True
        workers = tuple(push.worker for push in pushes)
        samples = sum(push.samples for push in pushes)
        staleness = [self.version - self.members[worker].version for worker in workers]
        lr = self.training.lr(self.samples, self.version)
        num_live, present = len(self.roster.at_work), self.roster.present
        self.own_loops.follow(pushes, self.roster.at_work)
        broken = self.updater.apply(pushes, samples, max(staleness), lr, num_live, present)
        if broken is not None:
            batch, is_finite = self.members[broken.worker].accepted, bool(broken.update.isfinite().all())
            self.divergence = Divergence(broken.worker, self.version, broken.loss, is_finite, batch)
            return False
        self.version += 1
        self.samples += samples
        for worker, age in zip(workers, staleness, strict=True):
            self.staleness[age] += 1
            member = self.members[worker]
            member.accepted = self.roster.past_skipped(worker, member.accepted + max(1, member.steps))
            member.settled = member.saved
        if self.weights.numel():  # check one worker per update, round robin: if it is silent, its gradient expires
            checked = self.roster.order[self.version % len(self.members)]
            member = self.members[checked]
            if not member.waiting and member.fell_silent(self.version, num_live):
                self.rule.expire(self.rule_state, checked)
                self.updater.recompute_sums()
        if self.version % RECOMPUTE_EVERY == 0:
            self.updater.recompute_sums()
        if self.on_update is not None:
            self.on_update(AppliedUpdate(pushes, staleness, lr, num_live, present))
        return True

    def _without_skipped(self, pushes: list[Push]) -> list[Push]:
        """Count the pushes of an update, and what their loops say; return those that no `GradScaler` has skipped."""
        for push in pushes:
            self.taken += max(1, self.members[push.worker].steps)
            self.own_loops.remember(push)
            if push.weight == 0.0:
                self.skipped += 1
                self.members[push.worker].accepted += 1
                self.updater.free([push])
        return [push for push in pushes if push.weight != 0.0]

    def _finish(self) -> tuple[Reply, ...]:
        """End training: drop held pushes and tell every waiting worker that it is over."""
        self.finished = True
        self._drop(self.held)
        return tuple(self._reply(worker, finished=True) for worker in self.roster.waiting())

    def _reply(self, worker: int, finished: bool = False, again: bool = False) -> Reply:
        """Send a worker on, with the newest weights and its next batch; or tell it that it is over.

        With `again`, build its newest reply once more.
        """
        member, assignments = self.members[worker], self.assignments
        if not again:
            member.waiting, member.serial, member.version = False, member.serial + 1, self.version
            self.replies += 1
            if assignments is not None and not finished:
                self.roster.assign_data(worker, assignments)
            if self.inside is not None:
                steps = self.budget.local_steps(self.inside.steps, self.taken, self.num_live)
                self.roster.set_local_steps(worker, steps, self.lr_inside)
        assignment, before = assignments.told(worker) if assignments is not None else (None, 0)
        named = (worker, member.incarnation, member.serial, member.version)
        work = member.accepted - before * (not member.own_loop), finished, member.steps, member.lr
        is_released = member.released and finished and not self.finished
        return Reply(*named, *work, assignment, member.dropped, member.discarded, released=is_released)
