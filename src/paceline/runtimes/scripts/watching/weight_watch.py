"""Notice that a script has changed the weights itself: the server holds them, and would not see it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.interfaces import Layout

SAMPLED = 4
"""Elements of each parameter that are compared at every step; other ones at the next step."""
_STRIDE = 1_000_003  # a prime: the places of one step are far from those of the last
_DATA: Any = torch.Tensor.__dict__.get("data") or torch._C.TensorBase.__dict__["data"]  # torch's own property


class WeightWatch:
    """Compares the weights at a step with those after the last reply.

    Torch counts changes in place, but not those through `.data`. So reading `.data` of a parameter takes a checksum of
    it, and the step compares. For other ways past torch (an array of `numpy`, say) a few elements of each parameter are
    compared at every step, and all weights `fully` at some.
    """

    def __init__(self, parameters: Mapping[str, Tensor], layout: Layout, memory: Tensor | None) -> None:
        """`memory` holds all weights as `layout` says; None: parameters have memory of their own."""
        self._names, self._parameters, self._memory = list(parameters), list(parameters.values()), memory
        self._bits = memory.numpy().view(np.int32) if memory is not None and memory.device.type == "cpu" else None
        self._begins = np.array([[part.offset] for part in layout.parameters])
        self._sizes = np.array([[max(1, part.size)] for part in layout.parameters])
        self._steps = np.arange(SAMPLED) * (_STRIDE // SAMPLED)
        self._places: NDArray[np.int64] = np.zeros(0, np.int64)
        self._turn = 0
        self._marks: list[tuple[int, int]] = []
        self._whole: int | None = None
        self._elements = b""
        self._read: dict[int, int] = {}  # checksums of the parameters whose `.data` may be changed, by number
        self._aliases: dict[int, list[weakref.ref[Tensor]]] = {}  # what `.data` has returned, while the script has it
        self._watched = self._watch_data()

    def _watch_data(self) -> list[nn.Parameter]:
        """Put the parameters into a class whose `data` says when it is read; pickles and copies do not notice."""
        found = [one for one in self._parameters if type(one) is nn.Parameter]
        numbers = {id(one): number for number, one in enumerate(self._parameters)}

        def read(this: nn.Parameter) -> Tensor:
            number, data = numbers.get(id(this)), _DATA.__get__(this)
            if number is not None and not torch.compiler.is_compiling():
                self._read.setdefault(number, checksum(data))
                self._aliases.setdefault(number, []).append(weakref.ref(data))
            return data  # type: ignore[no-any-return]

        facts = {"data": property(read, lambda this, value: _DATA.__set__(this, value)), "__module__": "torch.nn"}
        kind = type("Parameter", (nn.Parameter,), facts)
        for one in found:
            one.__class__ = kind
        return found

    def release(self) -> None:
        """Give the parameters their own class back: nothing is compared any more."""
        for one in self._watched:
            one.__class__ = nn.Parameter
        self._watched.clear()

    def renew(self, fully: bool) -> None:
        """Remember the weights as they are now; `fully`: all of them."""
        self._turn += 1
        self._marks = self._current_marks()
        self._whole = self._current_whole() if fully else None
        self._places = self._next_places()
        self._elements = self._current_elements()
        alive = {number: [one for one in refs if one() is not None] for number, refs in self._aliases.items()}
        self._aliases = {number: refs for number, refs in alive.items() if refs}
        self._read = {number: checksum(_DATA.__get__(self._parameters[number])) for number in self._aliases}

    def require_unchanged(self) -> None:
        """Raise UserError if the script has changed the weights since `renew`."""
        marks = self._current_marks()
        if marks != self._marks:
            changed = next(place for place, mark in enumerate(marks) if mark != self._marks[place])
            self._refuse_parameter(changed)
        for number, before in self._read.items():
            if checksum(_DATA.__get__(self._parameters[number])) != before:
                self._refuse_parameter(number)
        is_whole = self._whole is None or self._current_whole() == self._whole
        if not is_whole or self._current_elements() != self._elements:
            _refuse("the model")

    def _refuse_parameter(self, number: int) -> None:
        _refuse(f"parameter {self._names[number]}", is_frozen=not self._parameters[number].requires_grad)

    def _current_marks(self) -> list[tuple[int, int]]:
        return [(one.data_ptr(), one._version) for one in self._parameters]

    def _current_whole(self) -> int:
        parts = [self._memory] if self._memory is not None else self._parameters
        return sum(map(checksum, parts))

    def _next_places(self) -> NDArray[np.int64]:
        """A few places in each parameter; other ones in each turn."""
        places: NDArray[np.int64] = (self._begins + (self._steps + self._turn * _STRIDE) % self._sizes).reshape(-1)
        return places

    def _current_elements(self) -> bytes:
        """The bits of the elements at the places of this turn; without common memory, of a few parameters."""
        if self._bits is not None:
            return self._bits[self._places].tobytes()
        if self._memory is not None:
            return self._memory[torch.from_numpy(self._places).to(self._memory.device)].cpu().numpy().tobytes()
        first = self._turn * SAMPLED
        chosen = [self._parameters[(first + number) % len(self._parameters)] for number in range(SAMPLED)]
        raws = [_bytes_of(one) for one in chosen if one.numel()]
        return bytes(int(raw[(self._turn * _STRIDE + 97 * k) % len(raw)]) for raw in raws for k in range(SAMPLED))


def _refuse(what: str, is_frozen: bool = False) -> None:
    why = "the server holds the weights, and only gradients reach it"
    steps = "let an optimizer step them (torch.optim.SGD for a step by hand), use no max_norm or clamping"
    instead = f"{steps}, and load saved weights after session.finish()"
    if is_frozen:  # the average of a teacher, say
        instead = "it needs no gradient, so leave it out of the optimizer: [p for p in ... if p.requires_grad]"
    raise UserError(f"{what} was changed or moved between two steps: {why}; {instead}")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> int:
    """The sum of a tensor's bits, as whole numbers: the change of any one element changes it.

    >>> checksum(torch.tensor([1.0, 2.0, 3.0])) == checksum(torch.tensor([1.0, 2.0, 3.0])), checksum(torch.zeros(3))
    (True, 0)
    """
    raw = _bytes_of(tensor)
    if raw.data_ptr() % 8:
        raw = raw.clone()
    whole = len(raw) // 8 * 8
    rest = int.from_bytes(bytes(raw[whole:].tolist()), "little")
    return int(raw[:whole].view(torch.int64).sum()) + rest
