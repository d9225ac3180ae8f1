"""`session.epochs(n)`: the epochs that a worker has left, one for each pass over its loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

from paceline.errors import UserError
from paceline.runtimes.scripts.loading.loader import WorkerLoader
from paceline.system.terminal import counted


class Epochs:
    """The numbers of the epochs of `num` that a worker has left: in each, its loop makes one pass over its loaders."""

    def __init__(self, num: Any, loaders: Sequence[Any], is_over: Callable[[], bool], with_end: bool = False) -> None:
        """`is_over` says whether training is; `with_end`: as for `WorkerLoader.finished_ahead`."""
        if not isinstance(num, Integral) or num < 0:
            raise UserError(f"session.epochs({num!r}): give a whole number, as to range(...)")
        if not loaders or not all(getattr(loader, "in_passes", True) for loader in loaders):
            found = "one loop over this data goes on until training ends: give session.prepare(...) epochs=N"
            none = "session.prepare(...) got none: give it one, or count steps from session.iteration"
            raise UserError(f"session.epochs({num}) counts passes over the loader, and {found if loaders else none}")
        self._num, self._is_over, self._with_end = int(num), is_over, with_end
        self._loaders = [loader for loader in loaders if isinstance(loader, WorkerLoader)]

    def _first(self) -> int:
        """The epoch of the loader that is ahead; the next one if no loader has a batch left in it."""
        ahead = max((loader.finished_ahead(False) for loader in self._loaders), default=0)
        if self._with_end and self._loaders and all(one.finished_ahead(True) > ahead for one in self._loaders):
            ahead += 1
        return min(self._num, ahead)

    def __len__(self) -> int:
        return self._num - self._first()

    def __iter__(self) -> Iterator[int]:
        first = self._first()
        for loader in self._loaders:
            if loader.passes > loader.begun:
                loader.leave_out(first)
        begun = [loader.begun for loader in self._loaders]
        for epoch in range(first, self._num):
            if self._is_over():
                return
            yield epoch
            if not self._is_over():
                made = [loader.begun - before for loader, before in zip(self._loaders, begun, strict=True)]
                self._require_one_pass(made, epoch - first + 1)

    def _require_one_pass(self, made: list[int], epochs: int) -> None:
        """Raise UserError if the loop has not made one pass in each epoch: where it is could not be told by its passes.

        A loader behind the first one may stay unused.
        """
        wrong = next((n for n, count in enumerate(made) if count != epochs and (count or not n)), None)
        if wrong is not None:
            which = f"loader {wrong + 1}" if len(made) > 1 else "the loader"
            what = f"{counted(made[wrong], 'pass')} over {which} in {counted(epochs, 'epoch')}"
            raise UserError(f"session.epochs({self._num}): {what}, and each epoch is one: loop over range({self._num})")
