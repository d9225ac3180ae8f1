"""Dropout whose mask is an integer hash of its address: the same bits on CPU, on GPU and in a replay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.randomness import halves, mix64, scramble


def keep_mask(counter: Tensor, key: int | Tensor, probability: float) -> Tensor:
    """Return True for each int32 in `counter` that is kept: a hash under `key`, with probability 1 - `probability`."""
    bits = scramble(counter, key, torch.empty_like(counter), torch.empty_like(counter))
    return bits >= -(1 << 31) + round(probability * (1 << 32))


class AddressedDropout(nn.Module):
    """Zero each value with `probability` during training, and scale up the rest.

    Set `key` before each batch. It is stored in a tensor, so that a compiled or captured step reads the current value.
    `first` is the index of the first sample in its batch: above 0 if a batch is computed in parts.
    """

    halves: Tensor

    def __init__(self, probability: float, layer: int) -> None:
        super().__init__()
        if not 0.0 <= probability < 1.0:
            raise UserError(f"dropout probability {probability}: give at least 0 and below 1")
        self.probability, self.layer, self.first = probability, layer, 0
        self.register_buffer("halves", torch.zeros(2, dtype=torch.int32), persistent=False)
        self.key = 0
        self.counter = torch.empty(0, dtype=torch.int32)

    @property
    def key(self) -> int:
        """The 64-bit address of the batch."""
        return self._key

    @key.setter
    def key(self, key: int) -> None:
        self._key = key
        for half, value in zip(self.halves, halves(mix64(key, self.layer)), strict=True):
            half.fill_(value)

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return values
        start = self.first * (values.numel() // max(1, len(values)))
        end = start + values.numel()
        if self.counter.numel() < end or self.counter.device != values.device:
            self.counter = torch.arange(end, dtype=torch.int32, device=values.device)
        counter = self.counter[start:end].view(values.shape)
        keep = keep_mask(counter, self.halves, self.probability)
        return values * (keep.to(values.dtype) * (1.0 / (1.0 - self.probability)))


def address_dropout(model: nn.Module, key: int) -> None:
    """Set the key of the next batch in each `AddressedDropout` of `model`."""
    for module in model.modules():
        if isinstance(module, AddressedDropout):
            module.key = key
