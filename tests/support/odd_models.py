"""Models with what plain ones have not: tied, frozen, sparse and unused parameters, buffers of every kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.tasks.supervised import SupervisedTask

VOCABULARY, WIDTH = 12, 6


class Tied(nn.Module):
    """The output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(self.embedding(ids).mean(1))))


class Frozen(Tied):
    """A part is not trained: neither its weights nor a table of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden.requires_grad_(False)
        self.register_buffer("order", torch.arange(WIDTH).flip(0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(self.embedding(ids).mean(1)[:, self.order])))


class Unused(Tied):
    """Two branches, of which a batch takes one: the other's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        branch = self.other if int(ids[0, 0]) % 2 else self.hidden
        return self.output(torch.tanh(branch(self.embedding(ids).mean(1))))


class Sparse(nn.Module):
    """An embedding whose gradient names only the rows it touches."""

    sparse = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=self.sparse)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.embedding(ids).mean(1))


class Dense(Sparse):
    """The same with all rows, for comparison."""

    sparse = False


class Buffered(nn.Module):
    """Running statistics, a constant that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.BatchNorm1d(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("shift", torch.ones(WIDTH), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.norm(self.embedding(ids).mean(1)) * self.scale + self.shift)


class FrozenHalf(Frozen):
    """The frozen part is bf16, as a large pretrained one may be."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden.bfloat16()

    def forward(self, ids: Tensor) -> Tensor:
        mean = self.embedding(ids).mean(1)[:, self.order]
        return self.output(torch.tanh(self.hidden(mean.bfloat16()).float()))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "tied": (Tied, Tied),
    "frozen": (Frozen, Frozen),
    "frozen_half": (FrozenHalf, FrozenHalf),
    "unused": (Unused, Unused),
    "sparse": (Sparse, Dense),
    "buffered": (Buffered, Buffered),
}
"""Each with the model that a plain loop trains for comparison."""


def token_data(count: int = 44) -> tuple[Tensor, Tensor]:
    """Sentences of four words, and the word that follows."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, VOCABULARY, (count, 5), generator=generator)
    return words[:, :4], words[:, 4]


def task_of(model: nn.Module) -> SupervisedTask:
    return SupervisedTask(model, nn.functional.cross_entropy, token_data(), token_data(20))


def tied() -> SupervisedTask:
    return task_of(Tied())


def frozen() -> SupervisedTask:
    return task_of(Frozen())


def frozen_half() -> SupervisedTask:
    return task_of(FrozenHalf())


def unused() -> SupervisedTask:
    return task_of(Unused())


def sparse() -> SupervisedTask:
    return task_of(Sparse())


def buffered() -> SupervisedTask:
    return task_of(Buffered())
