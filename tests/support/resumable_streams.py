"""Streams that keep a state, complete or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset


class Lines(IterableDataset[Tensor]):
    """40 samples in an order of its own for each epoch, with noise from torch's generator; it counts what it reads."""

    def __init__(self) -> None:
        self.place, self.epoch, self.reads = 0, 0, 0
        self.order = self._shuffled()

    def _shuffled(self) -> Tensor:
        return torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch))

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < 40:
            self.reads, self.place = self.reads + 1, self.place + 1
            yield torch.tensor([float(self.order[self.place - 1]), torch.rand(())])
        self.place, self.epoch = 0, self.epoch + 1
        self.order = self._shuffled()

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "epoch": self.epoch, "order": self.order, "more": [None, float("inf"), "é", {}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["more"] == [None, float("inf"), "é", {}]
        self.place, self.epoch, self.order = state["place"], state["epoch"], state["order"]


class Forgetful(Lines):
    """Its order comes from torch's generator at the start of a pass, and is no part of its state."""

    def __iter__(self) -> Iterator[Tensor]:
        self.order = torch.randperm(40)
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.epoch = state["place"], state["epoch"]
