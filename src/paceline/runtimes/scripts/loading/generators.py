"""Random generators: those of the user's loop, and of a sampler or stream, which draws without touching the former."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paceline.assembly.task import seed_generators
from paceline.models.dropout import AddressedDropout
from paceline.randomness import mix64

_STEP, _GENERATOR = 0x57E9, 0x6E4A7  # purposes of random keys


class StepSeeds:
    """The randomness of one worker's loop: of each step and batch, and of the generators that it asked for."""

    def __init__(self, seed: int, worker: int) -> None:
        self._seed, self._worker = seed, worker
        self._generators: list[torch.Generator] = []
        self.dropouts: list[AddressedDropout] = []

    def new_generator(self, step: int) -> torch.Generator:
        """Return a generator that is seeded before every step."""
        self._generators.append(torch.Generator())
        self.seed_generators(step)
        return self._generators[-1]

    def seed_generators(self, step: int) -> None:
        """Seed the generators that the loop asked for by a step."""
        for number, generator in enumerate(self._generators):
            generator.manual_seed(mix64(self._seed, self._worker, step, number, _GENERATOR))

    def begin_step(self, step: int) -> None:
        """Seed all randomness by a step."""
        self.seed(mix64(self._seed, self._worker, step, _STEP))
        self.seed_generators(step)

    def seed(self, key: int) -> None:
        """Seed all randomness but the loop's own generators by a key."""
        seed_generators(key)
        for module in self.dropouts:
            module.key = key


class DrawingState:
    """The state of the global generators, and of some of torch, while something draws. It begins seeded by `key`."""

    def __init__(self, key: int, generators: list[torch.Generator]) -> None:
        self._key, self._generators = key, [torch.default_generator, *generators]
        self._kept: tuple[Any, ...] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, the generators go on where the last drawing ended. Afterwards each has the state of before."""
        before = self._states()
        if self._kept is None:
            self._seed()
        else:
            self._restore(self._kept)
        try:
            yield
        finally:
            self._kept = self._states()
            self._restore(before)

    def _seed(self) -> None:
        for generator in self._generators:
            generator.manual_seed(self._key)
        random.seed(self._key)
        np.random.seed(self._key & 0xFFFFFFFF)

    def _states(self) -> tuple[Any, ...]:
        states = [generator.get_state() for generator in self._generators]
        return random.getstate(), np.random.get_state(), states

    def _restore(self, states: tuple[Any, ...]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for generator, state in zip(self._generators, states[2], strict=True):
            generator.set_state(state)


def generators_in(*things: Any) -> list[torch.Generator]:
    """Return torch's generators among the attributes of some objects, each once."""
    found = {
        id(value): value
        for thing in things
        for value in getattr(thing, "__dict__", {}).values()
        if isinstance(value, torch.Generator)
    }
    return list(found.values())
