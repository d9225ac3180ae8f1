"""Top-k codec: send the values of largest magnitude and their indices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.codecs.flat import FlatCodec, floats
from paceline.errors import ProtocolError
from paceline.interfaces import Layout, State
from paceline.randomness import mix64, scramble

NUM_PROBES = 1 << 16  # values sampled to estimate the threshold
ENTRY_NBYTES = 8
MIN_MAGNITUDE = torch.finfo(torch.float32).smallest_normal
"""Smaller values are never sent: an update of zeros is an empty payload."""


class TopK(FlatCodec):
    """sent = the k = F P values of v that are largest in magnitude;  e = v - sent, with v = u + e.

    A threshold estimated from a fixed sample, slightly too low, leaves few candidates, which include the k largest. If
    the estimate was too high, all values are searched. At most 8 F P bytes to a server; (n - 1) times that on a ring,
    by gather. (arXiv 1809.07599)

    >>> from paceline.interfaces import pack
    >>> codec = TopK(pack([("w", (2000,), True)]), 0.01)
    >>> codec.name, codec.capacity, codec.ring_nbytes(3)
    ('topk:0.01', 160, 320)
    """

    def __init__(self, layout: Layout, fraction: float, device: torch.device | None = None) -> None:
        super().__init__(layout, device)
        self._fraction = fraction
        self._k = max(1, math.floor(fraction * self.size))
        self._first = layout.parameters[0].offset if layout.parameters else 0
        self._magnitudes, self._large = self._scratch(), self._scratch(torch.bool)
        counter = torch.arange(NUM_PROBES, dtype=torch.int32)
        hashed = scramble(counter, mix64(self.size), torch.empty_like(counter), torch.empty_like(counter)).long()
        self._probes = ((hashed + (1 << 31)) * self.size >> 32).sort().values.to(self.device)
        expected = self._k / self.size * NUM_PROBES
        self._rank = NUM_PROBES + 1 - min(NUM_PROBES, math.ceil(expected + 5 * math.sqrt(expected) + 5))

    @property
    def name(self) -> str:
        return f"topk:{self._fraction:g}"

    @property
    def capacity(self) -> int:
        return ENTRY_NBYTES * self._k

    def _encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        error = memory["error"]
        threshold = max(self._estimate(update, error), MIN_MAGNITUDE)
        found = torch.cat([self._add(update, error, begin, end, threshold) for begin, end in self._spans()])
        if len(found) < self._k and threshold > MIN_MAGNITUDE:
            found = (error.abs() >= MIN_MAGNITUDE).nonzero().flatten()
        values = error.index_select(0, found)
        if len(found) > self._k:
            largest = torch.topk(values.abs(), self._k, sorted=False).indices
            found, values = found.index_select(0, largest), values.index_select(0, largest)
        num = len(found)
        out[: 4 * num].view(torch.int32).copy_(found)
        floats(out, 4 * num, num).copy_(values)
        error.index_fill_(0, found, 0.0)
        return ENTRY_NBYTES * num

    def _estimate(self, update: Tensor, error: Tensor) -> float:
        """Return a magnitude that very likely a few more than k values reach."""
        magnitudes = update.index_select(0, self._probes).add_(error.index_select(0, self._probes)).abs_()
        return magnitudes.kthvalue(self._rank).values.item()

    def _add(self, update: Tensor, error: Tensor, begin: int, end: int, threshold: float) -> Tensor:
        """Add a chunk of the update to the error; return the indices that reach the threshold."""
        values = error[begin:end].add_(update[begin:end])
        magnitudes = torch.abs(values, out=self._magnitudes[: end - begin])
        large = self._large[: -(-(end - begin) // 8) * 8]
        torch.ge(magnitudes, threshold, out=large[: end - begin])
        large[end - begin :].zero_()
        groups = large.view(torch.int64)
        eights = groups.nonzero().flatten()  # most groups of eight are empty: search only the others
        rows, columns = groups.index_select(0, eights).view(torch.bool).view(-1, 8).nonzero().unbind(1)
        return eights.index_select(0, rows).mul_(8).add_(columns).add_(begin)

    def _poison(self, out: Tensor) -> int:
        out[:4].view(torch.int32).fill_(self._first)
        floats(out, 4, 1).fill_(math.nan)
        return ENTRY_NBYTES

    def _check(self, nbytes: int) -> None:
        if nbytes % ENTRY_NBYTES or nbytes > self.capacity:
            raise ProtocolError(f"a push of {nbytes} bytes by codec {self.name}: at most {self.capacity} are expected")

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        num = payload.numel() // ENTRY_NBYTES
        indices = payload[: 4 * num].view(torch.int32).long()
        if num and not 0 <= indices.amin().item() <= indices.amax().item() < self.size:
            raise ProtocolError(f"a push by codec {self.name} has an index beyond the {self.size} values of the layout")
        out.zero_().index_copy_(0, indices, floats(payload, 4 * num, num))
