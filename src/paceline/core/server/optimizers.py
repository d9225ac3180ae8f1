"""A server of several optimizers (a GAN, an actor and a critic): each has a span of the weights and a server for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Input, Outcome, Push, Reply, Stop
from paceline.core.schedules import Training
from paceline.core.server.roster import Roster
from paceline.core.server.server import Server
from paceline.core.server.updates import Exchange
from paceline.interfaces import Policy, Rule


class OptimizersServer(Server):
    """The server of the first optimizer, which leads, with the servers of the others.

    A push and its reply concern one optimizer: each has its own version, staleness, rounds and rule state. Everything
    else concerns all. The leader's pushes count towards the budget; when it is used up, all are over.

    Workers may step one optimizer more often than another, or come back between the steps of two. If then each waits
    for one that waits at another optimizer, the rounds of the optimizers after the leader close with those who came.
    """

    def __init__(
        self,
        weights: Tensor,
        rule: Rule,
        policy: Policy,
        training: Training,
        roster: Roster,
        exchange: Exchange,
        others: Sequence[Server],
    ) -> None:
        """`others` have the weights after the leader's, each a view into `weights`."""
        sizes = [other.weights.numel() for other in others]
        super().__init__(weights[: weights.numel() - sum(sizes)], rule, policy, training, roster, exchange)
        self.by_optimizer = (self, *others)
        self.weights = weights
        ends = torch.tensor([self.updater.weights.numel(), *sizes]).cumsum(0).tolist()
        self._spans = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        self._evaluated = torch.empty(0)

    def handle(self, message: Input) -> Outcome:
        """Take one input; return what became of it and the replies to send, in order."""
        outcome = self._push_to(message.optimizer, message) if isinstance(message, Push) else self._tell_all(message)
        return outcome._replace(replies=(*outcome.replies, *self._unblock_others()))

    def _tell_all(self, message: Input) -> Outcome:
        outcome = super().handle(message)
        replies = list(outcome.replies)
        for number, other in enumerate(self.by_optimizer[1:], start=1):
            found = other.handle(message).replies
            replies += [
                reply._replace(optimizer=number) for reply in found if reply.serial
            ]  # the first has all weights
        return outcome._replace(replies=(*replies, *self._end_others()))

    def _push_to(self, number: int, push: Push) -> Outcome:
        other = self.by_optimizer[number]
        if other.updater.decoder is None:  # else the push holds the encoded gradient of this optimizer alone
            push = push._replace(update=push.update[self._spans[number]])
        if not number:
            outcome = super().handle(push)
            return outcome._replace(replies=(*outcome.replies, *self._end_others()))
        before = other.bytes_pushed
        outcome = other.handle(push._replace(state=push.state[:0]))
        self.bytes_pushed += other.bytes_pushed - before
        if push.state.numel() and not self.finished:
            self.worker_states[push.worker] = push.state.clone()
        self._end_if_diverged(other)
        return outcome._replace(replies=tuple(reply._replace(optimizer=number) for reply in outcome.replies))

    def _end_if_diverged(self, other: Server) -> None:
        if other.divergence is not None and self.divergence is None:
            self.divergence = other.divergence
            super().handle(Stop())

    def _unblock_others(self) -> list[Reply]:
        """Close rounds of the others, the last one's first, until a worker goes on."""
        replies: list[Reply] = []
        for number in reversed(range(1, len(self.by_optimizer))):
            if not replies and not self.finished and self.started and self._all_wait:
                other = self.by_optimizer[number]
                replies += [r._replace(optimizer=number) for r in other._carry_out(other.policy.unblock())]
                self._end_if_diverged(other)
        return replies

    @property
    def _all_wait(self) -> bool:
        """Whether each worker at work waits for a reply of one of the optimizers."""
        at_work, servers = self.roster.at_work, self.by_optimizer
        return bool(at_work) and all(any(one.members[w].waiting for one in servers) for w in at_work)

    def _end_others(self) -> list[Reply]:
        """End the others with the leader; return the replies to workers that wait for one of them."""
        replies = []
        for number, other in enumerate(self.by_optimizer[1:], start=1):
            if self.finished and not other.finished:
                found = other.handle(Stop()).replies
                replies += [reply._replace(optimizer=number) for reply in found if reply.serial]
        return replies

    @property
    def can_checkpoint(self) -> bool:
        return not any(server.held for server in self.by_optimizer)

    @property
    def evaluated(self) -> Tensor:
        parts = [server.rule.evaluated(server.updater.weights, server.rule_state) for server in self.by_optimizer]
        if all(part is server.updater.weights for part, server in zip(parts, self.by_optimizer, strict=True)):
            return self.weights
        if self._evaluated.shape != self.weights.shape:
            self._evaluated = torch.empty_like(self.weights)
        for part, span in zip(parts, self._spans, strict=True):
            self._evaluated[span].copy_(part)
        return self._evaluated

    def send_weights(self, reply: Reply, memory: WorkerBuffers) -> None:
        """Write the weights of the reply's optimizer into its worker's memory; the first reply has all weights."""
        numbers = [reply.optimizer] if reply.serial else range(len(self.by_optimizer))
        memory.nbytes = 0
        for number in numbers:
            updater, span = self.by_optimizer[number].updater, self._spans[number]
            if reply.serial and updater.differences is not None:
                memory.nbytes += updater.write_difference(reply.worker, memory)
                continue
            updater.reply_weights(reply.worker, memory.weights[span])
            memory.nbytes += updater.nbytes
            if updater.differences is not None:
                updater.differences.begin(reply.worker, memory.weights[span])
        if not reply.serial:
            self.own_loops.bring_back(reply.worker, memory, is_elastic=self.assignments is not None)
            memory.bring_state(self.roster.state_for(reply.worker, self.worker_states))
        self.bytes_pulled += memory.nbytes
