"""What a user's own loop sends with each push: where it is, its optimizer's settings, and which gradients it has."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Push


class Number(NamedTuple):
    """One number among the settings of a parameter group; of a tuple (`betas`), the one at `place`."""

    group: int
    setting: str
    place: int | None = None


@dataclass(frozen=True)
class LoopLayout:
    """The parts of the vector: `num_places` numbers for the worker itself, the settings, a flag for each parameter.

    `groups` holds the numbers of the parameters of each group, in the order of the model's layout. A flag is 1 if the
    parameter has a gradient. The server keeps the newest vector of each worker for the worker's next incarnation.
    """

    num_places: int
    numbers: tuple[Number, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return self.num_places + len(self.numbers) + self.num_parameters

    @property
    def num_parameters(self) -> int:
        return sum(map(len, self.groups))

    def to_facts(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {"places": self.num_places, "numbers": list(map(list, self.numbers)), "groups": list(self.groups)}

    @staticmethod
    def from_facts(facts: dict[str, Any]) -> LoopLayout:
        """Build a layout from the result of `to_facts`."""
        numbers = tuple(Number(int(group), str(setting), index) for group, setting, index in facts["numbers"])
        return LoopLayout(int(facts["places"]), numbers, tuple(tuple(map(int, group)) for group in facts["groups"]))


class FollowsLoop(Protocol):
    """Steps the weights with settings that change from push to push."""

    def follow(self, settings: Sequence[float], has_gradient: Sequence[float]) -> None:
        """Use these settings, in the order of the layout's numbers, and skip parameters without a gradient."""


class SettingsDisagreement(NamedTuple):
    """Two workers of one round whose loops have different optimizer settings: the round used those of `used`."""

    used: int
    other: int
    setting: str
    values: tuple[float, float]


class OwnLoops:
    """What users' own loops said with their newest pushes, and the optimizers that follow it.

    Without `layout` and `targets`, the config's optimizer steps and follows nothing.
    """

    def __init__(self, layout: LoopLayout | None = None, targets: Sequence[FollowsLoop] = ()) -> None:
        self.layout, self.targets = layout or LoopLayout(0, (), ()), targets
        self.newest: dict[int, Tensor] = {}  # by worker
        self.disagreement: SettingsDisagreement | None = None  # the first one within a round
        self._begin = self.layout.num_places
        self._end = self._begin + len(self.layout.numbers)
        self._lrs = [place for place, number in enumerate(self.layout.numbers) if number.setting == "lr"]

    def remember(self, push: Push) -> None:
        """Keep what a loop says with a push."""
        if push.loop is not None and push.loop.numel():
            self.newest[push.worker] = push.loop.clone()

    def bring_back(self, worker: int, memory: WorkerBuffers, is_elastic: bool = False) -> None:
        """Tell a worker that joins again where its loop was at its last push.

        One that joins an elastic run in the middle hears it of the lowest-numbered worker instead.
        """
        found = worker if worker in self.newest else min(self.newest, default=None) if is_elastic else None
        if found is not None:
            kept = self.newest[found]
            memory.loop[: kept.numel()].copy_(kept)

    def next_pass(self) -> int:
        """The first pass over its data that no loop will have begun by its next push.

        In a run whose workers may join and leave, a loop with a loader says its pass, its batch, and the newest pass
        that it will have begun by then.
        """
        return max((int(loop[2]) + 1 for loop in self.newest.values()), default=0)

    def follow(self, pushes: list[Push], at_work: AbstractSet[int]) -> None:
        """Use the settings of the loop that pushed, or in a round those of the lowest-numbered live worker.

        A parameter has a gradient if one of the pushes has one for it.
        """
        workers = [push.worker for push in pushes if push.worker in self.newest]
        if not self.targets or not workers:
            return
        first = workers[0]
        if len(pushes) > 1:
            first = min(at_work & self.newest.keys(), default=min(workers))
            for other in sorted(workers) if self.disagreement is None else ():
                self.disagreement = self.disagreement or self._disagreement(first, other)
        flags: list[float] = []
        for push in pushes:
            if push.loop is not None:
                found = push.loop[self._end : self.layout.size].tolist()
                flags = list(map(max, flags, found)) if flags else found
        settings = self._settings(first)
        for target in self.targets:
            target.follow(settings, flags)

    def _settings(self, worker: int) -> list[float]:
        found: list[float] = self.newest[worker][self._begin : self._end].tolist()
        return found

    def lr(self, at_work: AbstractSet[int]) -> float:
        """The learning rate of the first group of the first live worker that has pushed; 1 if none has one."""
        if not self._lrs or not self.newest:
            return 1.0
        first = min(self.newest.keys() & at_work, default=min(self.newest))
        return self._settings(first)[self._lrs[0]]

    def _disagreement(self, used: int, other: int) -> SettingsDisagreement | None:
        """The first setting in which two workers differ."""
        values = zip(self._settings(used), self._settings(other), strict=True)
        for number, (one, another) in zip(self.layout.numbers, values, strict=True):
            if one != another:
                return SettingsDisagreement(used, other, number.setting, (one, another))
        return None
