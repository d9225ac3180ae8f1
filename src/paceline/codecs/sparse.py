"""The codec that sends the largest values and where they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.codecs.flat import FlatCodec, floats
from paceline.errors import ProtocolError
from paceline.interfaces import Layout, State
from paceline.randomness import mix64, scramble

NUM_PROBES = 1 << 16
"""Places at which a threshold is guessed."""
ENTRY_NBYTES = 8
LEAST = torch.finfo(torch.float32).smallest_normal
"""Smaller values are never sent: an update of zeros is an empty payload."""


class TopK(FlatCodec):
    """sent = the k = F P values of v that are largest in magnitude;  e = v - sent, with v = u + e.

    A threshold guessed from addressed places, a little too low, leaves few candidates, of which the k largest are the k
    largest of all; where it was too high, all are looked through. At most 8 F P bytes to a server; by gather on a ring,
    (n - 1) times that. (arXiv 1809.07599)

    >>> from paceline.interfaces import pack
    >>> codec = TopK(pack([("w", (2000,), True)]), 0.01)
    >>> codec.name, codec.capacity, codec.ring_nbytes(3)
    ('topk:0.01', 160, 320)
    """

    def __init__(self, layout: Layout, fraction: float, device: torch.device | None = None) -> None:
        super().__init__(layout, device)
        self._fraction = fraction
        self._most = max(1, math.floor(fraction * self.size))
        self._first = layout.parameters[0].offset if layout.parameters else 0
        self._magnitudes, self._large = self._scratch(), self._scratch(torch.bool)
        counter = torch.arange(NUM_PROBES, dtype=torch.int32)
        hashed = scramble(counter, mix64(self.size), torch.empty_like(counter), torch.empty_like(counter)).long()
        self._places = ((hashed + (1 << 31)) * self.size >> 32).sort().values.to(self.device)
        expected = self._most / self.size * NUM_PROBES
        self._rank = NUM_PROBES + 1 - min(NUM_PROBES, math.ceil(expected + 5 * math.sqrt(expected) + 5))

    @property
    def name(self) -> str:
        return f"topk:{self._fraction:g}"

    @property
    def capacity(self) -> int:
        return ENTRY_NBYTES * self._most

    def _encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        error = memory["error"]
        threshold = max(self._guess(update, error), LEAST)
        found = torch.cat([self._add(update, error, begin, end, threshold) for begin, end in self._spans()])
        if len(found) < self._most and threshold > LEAST:
            found = (error.abs() >= LEAST).nonzero().flatten()
        values = error.index_select(0, found)
        if len(found) > self._most:
            largest = torch.topk(values.abs(), self._most, sorted=False).indices
            found, values = found.index_select(0, largest), values.index_select(0, largest)
        num = len(found)
        out[: 4 * num].view(torch.int32).copy_(found)
        floats(out, 4 * num, num).copy_(values)
        error.index_fill_(0, found, 0.0)
        return ENTRY_NBYTES * num

    def _guess(self, update: Tensor, error: Tensor) -> float:
        """A magnitude that a few more than k values reach, most likely."""
        probes = update.index_select(0, self._places).add_(error.index_select(0, self._places)).abs_()
        return probes.kthvalue(self._rank).values.item()

    def _add(self, update: Tensor, error: Tensor, begin: int, end: int, threshold: float) -> Tensor:
        """Add a chunk of the update to the memory; the places that reach the threshold."""
        values = error[begin:end].add_(update[begin:end])
        magnitudes = torch.abs(values, out=self._magnitudes[: end - begin])
        large = self._large[: -(-(end - begin) // 8) * 8]
        torch.ge(magnitudes, threshold, out=large[: end - begin])
        large[end - begin :].zero_()
        groups = large.view(torch.int64)
        eights = groups.nonzero().flatten()  # most groups of eight hold none: look into the others
        rows, columns = groups.index_select(0, eights).view(torch.bool).view(-1, 8).nonzero().unbind(1)
        return eights.index_select(0, rows).mul_(8).add_(columns).add_(begin)

    def _spoil(self, out: Tensor) -> int:
        out[:4].view(torch.int32).fill_(self._first)
        floats(out, 4, 1).fill_(math.nan)
        return ENTRY_NBYTES

    def _check(self, nbytes: int) -> None:
        if nbytes % ENTRY_NBYTES or nbytes > self.capacity:
            raise ProtocolError(f"a push of {nbytes} bytes by codec {self.name}: at most {self.capacity} are expected")

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        num = payload.numel() // ENTRY_NBYTES
        places = payload[: 4 * num].view(torch.int32).long()
        if num and not 0 <= places.amin().item() <= places.amax().item() < self.size:
            raise ProtocolError(f"a push by codec {self.name} names a place beyond the {self.size} there are")
        out.zero_().index_copy_(0, places, floats(payload, 4 * num, num))
