"""Runs that make the same kind of step, side by side: weights [R, P], every update one pass over all of them.

On a GPU the update is captured once as a graph and replayed; a counter on the device says which row is next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.assemble import make_rule
from paceline.config import RunConfig
from paceline.interfaces import Arrival, Layout
from paceline.lab.batched import BATCHED, DROPOUT_LAYERS
from paceline.lab.feed import Feed, mix64
from paceline.lab.trace import NOBODY, Trace


@dataclass(frozen=True, eq=False)
class Row:
    """One run of a family: its settings, its order of updates, what it reads, and where it starts."""

    config: RunConfig
    trace: Trace
    feed: Feed
    initial: Tensor
    layout: Layout


@dataclass(frozen=True)
class Images:
    """A data set on the device, as bytes."""

    images: Tensor  # uint8 [N, H, W, C]
    labels: Tensor  # int64 [N]
    scale: Tensor
    shift: Tensor

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and labels of the samples `rows`, whatever its shape."""
        flat = rows.flatten()
        images = torch.addcmul(self.shift, self.images.index_select(0, flat).to(torch.float32), self.scale)
        return images.view(*rows.shape, *images.shape[1:]), self.labels.index_select(0, flat).view(rows.shape)


class Family:
    """Rows that share model, optimizer and pushes an update, from update `begin` until the first of them ends."""

    def __init__(self, rows: list[Row], data: Images, begin: int = 0) -> None:
        config, layout = rows[0].config, rows[0].layout
        self.rows, self.layout, self.data = rows, layout, data
        device = data.images.device
        self.weights = torch.stack([row.initial for row in rows]).to(device)
        self.rule = make_rule(config, layout)
        self.state = self.rule.start(self.weights)
        self._begin, self.end = begin, min(len(row.trace) for row in rows)
        self.num_updates = self.end - begin
        self._logits, self._layers = BATCHED[config.model], DROPOUT_LAYERS[config.model]
        pushes = max(row.trace.workers.shape[1] for row in rows)
        self._in_rounds = pushes > 1
        places = max(row.config.workers or 1 for row in rows)
        self.snapshots = self.weights if self._in_rounds else self.weights[:, None].repeat(1, places, 1)
        self._feed(rows, pushes, places, device)
        self._read = torch.empty_like(self.weights)
        self._gradient = torch.zeros_like(self.weights)
        self._leaves = {name: view.requires_grad_() for name, view in _views(layout, self._read).items()}
        self._targets = _views(layout, self._gradient)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._done = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._begin_after_this()
        self.losses = torch.zeros(len(rows), device=device)
        self._loss: Callable[..., Tensor] = self._plain_loss
        self.compiled = False

    def _feed(self, rows: list[Row], pushes: int, places: int, device: torch.device) -> None:
        """Bring what the rows read onto the device, one row an update."""
        span = slice(self._begin, self.end)

        def stacked(arrays: list[NDArray[Any]], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.stack(arrays, 1)).to(device, dtype)

        self._samples = stacked([_wide(row.feed.samples[span], pushes) for row in rows], torch.int32)
        self._sample_weights = stacked([_wide(row.feed.weights[span], pushes) for row in rows], torch.float32)
        self._lr = stacked([row.trace.lr[span] for row in rows], torch.float32)
        self._staleness = stacked([row.trace.staleness[span] for row in rows], torch.int32)
        self._live = stacked([row.trace.num_live[span] for row in rows], torch.int32)
        self._keys = []
        for layer in self._layers:
            keys = [_wide(mix64(row.feed.keys[span], layer).astype(np.int64), pushes) for row in rows]
            both = torch.from_numpy(np.stack(keys, 1)).to(device)
            self._keys.append((both.to(torch.int32), (both >> 32).to(torch.int32)))
        base = np.arange(len(rows))[None] * places
        if not self._in_rounds:
            owners = np.stack([row.trace.workers[span, 0] for row in rows], 1)
            self._owner = torch.from_numpy(owners + base).to(device)
            most = max(row.trace.released.shape[1] for row in rows)
            free = np.stack([_wide(row.trace.released[span], most, NOBODY) for row in rows], 1)
            self._released = None
            if most > 1 or not np.array_equal(free[..., 0], owners):
                hit = (free[..., None] == np.arange(places)).any(2)  # [T, R, places]
                self._released = torch.from_numpy(hit).to(device)

    def _plain_loss(
        self,
        leaves: dict[str, Tensor],
        images: Tensor,
        labels: Tensor,
        weights: Tensor,
        keys: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        found = self._logits(leaves, images, keys)
        chosen = found.gather(-1, labels[..., None]).squeeze(-1)
        return -(chosen * weights).sum(-1)

    def compile(self) -> None:
        """Let torch fuse the model's passes; worth it for thousands of updates on a GPU."""
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # a shape a family
        self.compiled = True
        self._loss = torch.compile(self._plain_loss, dynamic=False)

    def _update(self) -> None:
        """One update of every row, at the place the counter names."""
        at = self._at
        self._read_weights(at)
        samples = self._samples.index_select(0, at)[0]  # [R, pushes, B]
        images, labels = self.data.take(samples.flatten(1))
        weights = self._sample_weights.index_select(0, at)[0].flatten(1)
        keys = [(low.index_select(0, at)[0], high.index_select(0, at)[0]) for low, high in self._keys]
        losses = self._loss(self._leaves, images, labels, weights, keys)
        gradients = torch.autograd.grad(losses.sum(), list(self._leaves.values()))
        with torch.no_grad():
            self.losses.copy_(losses)
            for target, gradient in zip(self._targets.values(), gradients, strict=True):
                target.copy_(gradient)
            arrival = Arrival(
                None,
                self._staleness.index_select(0, at)[0][:, None],
                self._lr.index_select(0, at)[0][:, None],
                self._live.index_select(0, at)[0][:, None],
            )
            self.rule.apply(self.weights, self.state, self._gradient, arrival)
            self._hand_out(at)
            at += 1

    def _read_weights(self, at: Tensor) -> None:
        with torch.no_grad():
            if self._in_rounds:
                self._read.copy_(self.weights)
            else:
                owner = self._owner.index_select(0, at)[0]
                torch.index_select(self.snapshots.flatten(0, 1), 0, owner, out=self._read.detach())

    def _hand_out(self, at: Tensor) -> None:
        """Every worker that was answered holds the new weights now."""
        if self._in_rounds:
            return
        if self._released is None:
            owner = self._owner.index_select(0, at)[0]
            self.snapshots.flatten(0, 1).index_copy_(0, owner, self.weights)
        else:
            hit = self._released.index_select(0, at)[0]
            torch.where(hit[..., None], self.weights[:, None], self.snapshots, out=self.snapshots)

    @property
    def left(self) -> int:
        """Updates until the first row ends."""
        return self.num_updates - self._done

    def advance(self, updates: int) -> int:
        """Make so many updates, or those that are left; on a GPU they are only queued. Returns how many."""
        number = min(updates, self.left)
        if self._stream is None:
            for _ in range(number):
                self._update()
        else:
            with torch.cuda.stream(self._stream):
                for place in range(self._done, self._done + number):
                    self._update_on_gpu(place)
        self._done += number
        return number

    def _update_on_gpu(self, place: int) -> None:
        if place < WARM_UP or self.num_updates <= 2 * WARM_UP:
            self._update()
            return
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()

    def wait(self) -> None:
        """Until all that was queued is done."""
        if self._stream is not None:
            self._stream.synchronize()

    def _capture(self) -> None:
        """Record one update as a graph; recording executes nothing. An old graph must not be freed meanwhile."""
        gc.collect()
        gc.disable()
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._update()
        finally:
            gc.enable()

    def without_the_ended(self) -> list[Family]:
        """The rows that have updates left, where they are now, as a family of their own."""
        keep = [number for number, row in enumerate(self.rows) if len(row.trace) > self.end]
        if not keep:
            return []
        rest = Family([self.rows[number] for number in keep], self.data, self.end)
        places = rest.snapshots.shape[1] if not self._in_rounds else 0
        rest.weights.copy_(self.weights[keep])
        for name, tensor in rest.state.items():
            tensor.copy_(self.state[name][keep])
        if not self._in_rounds:
            rest.snapshots.copy_(self.snapshots[keep][:, :places])
        rest._begin_after_this()
        return [rest]

    def _begin_after_this(self) -> None:
        """What was queued so far on the usual stream comes before this family's own."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.weights.device))

    def ended(self) -> list[int]:
        """Places of the rows that have made their last update."""
        return [number for number, row in enumerate(self.rows) if len(row.trace) == self.end]

    def scores(self, data: Images, chunk: int = 500) -> tuple[Tensor, Tensor, Tensor]:
        """Of every row on `data`: mean loss, share of right answers, and that share for each class."""
        total, num_rows = len(data.labels), len(self.rows)
        device = data.labels.device
        num_classes = int(data.labels.max()) + 1
        loss = torch.zeros(num_rows, device=device)
        right = torch.zeros(num_rows, num_classes, device=device)
        seen = torch.bincount(data.labels, minlength=num_classes)
        parameters = _views(self.layout, self.weights)
        with torch.no_grad():
            for start in range(0, total, chunk):
                rows = torch.arange(start, min(start + chunk, total), device=device, dtype=torch.int32)
                images, labels = data.take(rows)
                shared = images.expand(num_rows, *images.shape).contiguous()
                found = self._logits(parameters, shared, None)
                every = labels.expand(num_rows, -1)
                loss -= found.gather(-1, every[..., None]).sum((1, 2))
                right.scatter_add_(1, every, (found.argmax(-1) == every).float())
        return loss / total, right.sum(1) / total, right / seen


WARM_UP = 3


def _views(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    """Each parameter of every row by name, as a view into `flat` [R, P]."""
    return {p.name: flat[:, p.offset : p.offset + p.size].view(-1, *p.shape) for p in layout.parameters}


def _wide(array: NDArray[Any], pushes: int, filler: float = 0) -> NDArray[Any]:
    """Pad the second axis to `pushes`."""
    missing = pushes - array.shape[1]
    if not missing:
        return array
    return np.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)], constant_values=filler)
