"""Applying updates: decode a push, average the pushes of a round, and step the weights by the rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from paceline.core.buffers import WorkerBuffers
from paceline.core.compression import DENSE, Codecs, DeltaEncoder, PushDecoder
from paceline.core.messages import Push
from paceline.core.own_loop.settings import OwnLoops
from paceline.core.server.aggregation import TrimmedMean
from paceline.interfaces import Arrival, Codec, Rule

RECOMPUTE_EVERY = 256  # updates after which sums over all workers are recomputed

Mean: TypeAlias = Callable[[list[Push], int], Tensor]  # averages the pushes of a round over that many samples


@dataclass(frozen=True)
class Exchange:
    """What crosses between the workers and the server; by default weights and gradients as they are."""

    codecs: Codecs = DENSE
    nbytes: int | None = None
    """Bytes of all weights; None: of the weights that the server has. A timing-only server has none."""
    mean: Mean | None = None  # returns the mean of a round that a ring all-reduce has already computed
    aggregate: TrimmedMean | None = None  # combines the pushes of a round; None: their mean, by samples
    decoder: PushDecoder | None = None
    """Takes the place of the push codec's decoder, if a shard decodes its part of a push on arrival."""
    own_loops: OwnLoops | None = None
    """Brings the settings of users' own loops to the optimizer."""


@dataclass(frozen=True)
class Divergence:
    """The push that ended a run: it, or the loss of its worker, held a NaN or an infinity. It was not applied."""

    worker: int
    version: int
    loss: float
    is_update_finite: bool = False
    batch: int = 0  # the number of its batch, as replies count them; of local steps, the first


class AppliedUpdate(NamedTuple):
    """One update, as an observer of the server sees it."""

    pushes: list[Push]
    staleness: list[int]
    lr: float
    num_live: int
    present: float


class Updater:
    """Owns the weights and every tensor of their size: the rule's state, the mean, decoded pushes, sent weights.

    Weights without elements make a timing-only server: updates are counted and nothing is computed.
    """

    def __init__(self, weights: Tensor, rule: Rule, exchange: Exchange, max_workers: int) -> None:
        self.weights, self.rule, self.rule_state = weights, rule, rule.start(weights)
        self.codecs = exchange.codecs
        self.nbytes = exchange.nbytes if exchange.nbytes is not None else weights.nbytes
        push, pull = self.codecs.push, self.codecs.pull
        self.push_nbytes = push.capacity if push is not None else self.nbytes
        """Bytes of a push that is not decoded here."""
        self.encoded_nbytes = pull.capacity if pull is not None and not weights.numel() else None
        """Bytes to count for an encoded reply; None: as many as the codec writes."""
        self.decoder = PushDecoder(push, weights) if push is not None and weights.numel() else exchange.decoder
        """Decodes pushes; None: they are gradients already, or the server is timing-only."""
        self.differences = (
            DeltaEncoder(pull, self.codecs.key, weights) if pull is not None and weights.numel() else None
        )
        """Encodes replies as differences; None: replies are weights, or the server is timing-only."""
        self.checks_sums = True
        """Whether `apply` looks for a NaN or an infinity; not if a guard has measured every push on arrival."""
        self._lr, self._lr_value = torch.zeros((), device=weights.device), 0.0
        self._aggregate, combines = exchange.aggregate, exchange.mean or exchange.aggregate
        self._mean = torch.empty_like(weights) if max_workers > 1 and combines is None else weights
        self._mean_of: Mean = combines or self._weighted_mean

    def restrict_to(self, rule: Rule, span: slice, decoder: PushDecoder | None, pull: Codec | None) -> None:
        """Become the first of several servers: pushes, `rule` and the codec `pull` now cover `span` alone."""
        self.rule, self.decoder = rule, decoder
        self._mean = torch.empty_like(self.weights[span])
        if self.differences is not None:
            assert pull is not None and self.codecs.pull is not None and not self.differences.held
            self.differences.restrict_to(pull, span)
            self.encoded_nbytes = self.codecs.pull.capacity  # other servers write the rest

    def nbytes_of(self, push: Push) -> int:
        """Return how many bytes a push takes on the wire."""
        if self.codecs.push is None or self.decoder is None:
            return self.push_nbytes
        return self.decoder.nbytes_of(push.update)

    def apply(
        self, pushes: list[Push], samples: int, staleness: int, lr: float, num_live: int, present: float
    ) -> Push | None:
        """Make one update of one push or of the mean of several.

        If a push holds a NaN or an infinity, or its loss is known and not finite, return it and change nothing; but
        not if the way in which a round is combined leaves out that many pushes.
        """
        if not self.weights.numel():
            return None
        update = pushes[0].update if len(pushes) == 1 else self._mean_of(pushes, samples)
        if self.checks_sums and not math.isfinite(update.sum().item()):
            broken = [push for push in pushes if not torch.isfinite(push.update).all()]
            if broken:
                return next((push for push in broken if not math.isfinite(push.loss)), broken[0])
        lost = [push for push in pushes if push.loss == math.inf]
        if len(lost) > (self._aggregate.tolerates(len(pushes)) if self._aggregate is not None else 0):
            return lost[0]
        if lr != self._lr_value:
            self._lr.fill_(lr)
            self._lr_value = lr
        worker = pushes[0].worker if len(pushes) == 1 else None
        arrival = Arrival(worker, staleness, self._lr, num_live, present)
        self.rule.apply(self.weights, self.rule_state, update, arrival)
        if self.decoder is not None:
            self.free(pushes)
        return None

    def recompute_sums(self) -> None:
        """Recompute the rule's sums over all workers: after every departure, and every `RECOMPUTE_EVERY` updates."""
        if self.weights.numel():
            self.rule.recompute_sums(self.rule_state)

    def _weighted_mean(self, pushes: list[Push], samples: int) -> Tensor:
        """Average over samples, or weights; the sum runs in worker order, so every process gets the same bits."""
        first, *rest = pushes
        weights = [push.samples if push.weight is None else push.weight for push in pushes]
        if all(weight == weights[0] for weight in weights):
            torch.add(first.update, rest[0].update, out=self._mean)
            for push in rest[1:]:
                self._mean.add_(push.update)
            return self._mean.div_(len(pushes))
        total = sum(weights)
        torch.mul(first.update, weights[0] / total, out=self._mean)
        for push, weight in zip(rest, weights[1:], strict=True):
            self._mean.add_(push.update, alpha=weight / total)
        return self._mean

    def free(self, pushes: Iterable[Push]) -> None:
        """Reuse the memory that these pushes were decoded into."""
        if self.decoder is not None:
            for push in pushes:
                self.decoder.free(push.update)

    def reply_weights(self, worker: int, out: Tensor) -> None:
        """Write the weights that `worker` computes on next."""
        if self.weights.numel():
            self.rule.reply_weights(self.weights, self.rule_state, worker, out)

    def write_difference(self, worker: int, memory: WorkerBuffers) -> int:
        """Encode how the worker's weights change since its last reply; return the bytes to count."""
        written = 0
        if self.differences is not None:
            written = self.differences.encode(worker, lambda out: self.reply_weights(worker, out), memory.pulled)
            memory.num_pulled = written
        return written if self.encoded_nbytes is None else self.encoded_nbytes
