"""Runs that make the same kind of step, side by side: weights [R, P], every update one pass over all of them.

On a GPU updates are captured as graphs and replayed; a counter on the device says which update is next.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.assemble import make_rule
from paceline.config import RunConfig
from paceline.core.rules.averaged import Averaged
from paceline.core.rules.per_worker import Live
from paceline.interfaces import Arrival, Layout, Rule
from paceline.lab.batched import BATCHED, DROPOUT_LAYERS
from paceline.lab.feed import Feed, mix64
from paceline.lab.steps import Gradients, Images, Inputs, gradients_for, views
from paceline.lab.trace import NOBODY, Trace

WARM_UP = 3
UNROLL = 10
"""Updates of the longer graph: one launch by the host for so many."""


@dataclass(frozen=True, eq=False)
class Row:
    """One run of a family: its settings, its order of updates, what it reads, and where it starts."""

    config: RunConfig
    trace: Trace
    feed: Feed
    initial: Tensor
    layout: Layout


class Family:
    """Rows that share model, rule, optimizer and pushes an update, from update `begin` until the first of them ends."""

    def __init__(self, rows: list[Row], data: Images, begin: int = 0, places: int | None = None) -> None:
        config, layout = rows[0].config, rows[0].layout
        self.rows, self.layout, self.data = rows, layout, data
        device = data.images.device
        self.weights = torch.stack([row.initial for row in rows]).to(device)
        self._begin, self.end = begin, min(len(row.trace) for row in rows)
        self.num_updates = self.end - begin
        self._in_rounds = rows[0].trace.workers.shape[1] > 1
        self._several = not self._in_rounds and max(row.trace.released.shape[1] for row in rows) > 1
        self.places = places or max(row.config.workers or 1 for row in rows) + self._several
        self.rule: Rule = make_rule(config, layout, self.places)
        self.state = self.rule.start(self.weights)
        self._ahead = None if hands_out_live(self.rule) else torch.empty_like(self.weights)
        self._gradient = torch.zeros_like(self.weights)
        self.losses = torch.zeros(len(rows), device=device)
        self.held = self.weights if self._in_rounds else self.weights.repeat_interleave(self.places, 0)
        self._inputs = self._bring(device)
        self._find_gradients: Gradients = gradients_for(config.model, self._inputs, layout, self._gradient, self.losses)
        self._leaves = self._find_leaves()
        self._done = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._queued: list[torch.cuda.Event] = []
        self._begin_after_this()

    def _bring(self, device: torch.device) -> Inputs:
        """What the rows read onto the device, one entry an update."""
        rows, span = self.rows, slice(self._begin, self.end)
        pushes = max(row.trace.workers.shape[1] for row in rows)

        def stacked(arrays: list[NDArray[Any]], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.stack(arrays, 1)).to(device, dtype)

        traces = [row.trace for row in rows]
        numbers = [np.stack([one.staleness[span], one.lr[span], one.num_live[span]], 1) for one in traces]
        self._numbers = stacked(numbers, torch.float32)
        keys = []
        for layer in DROPOUT_LAYERS[rows[0].config.model]:
            found = [_wide(mix64(row.feed.keys[span], layer).astype(np.int64), pushes) for row in rows]
            both = torch.from_numpy(np.stack(found, 1)).to(device)
            keys.append((both.to(torch.int32), (both >> 32).to(torch.int32)))
        self._base = torch.arange(len(rows), device=device) * self.places
        self._worker: Tensor | None = None
        self._released: list[Tensor] = []
        owner = torch.arange(len(rows), device=device)[None]
        if not self._in_rounds:
            self._worker = stacked([row.trace.workers[span, 0] for row in rows], torch.int64)
            owner = self._worker + self._base
            self._released = [owner] if not self._several else self._several_released(span, device)
        return Inputs(
            self.data,
            torch.zeros(1, dtype=torch.int64, device=device),
            stacked([_wide(row.feed.samples[span], pushes) for row in rows], torch.int32).flatten(2),
            stacked([_wide(row.feed.weights[span], pushes) for row in rows], torch.float32).flatten(2),
            keys,
            owner,
            self.held,
            rows[0].config.batch_size,
        )

    def _several_released(self, span: slice, device: torch.device) -> list[Tensor]:
        """Who is answered at each update, one tensor for each of the most that ever are; nobody is the last place."""
        most = max(row.trace.released.shape[1] for row in self.rows)
        free = np.stack([_wide(row.trace.released[span], most, NOBODY) for row in self.rows], 1)
        free = np.where(free == NOBODY, self.places - 1, free)
        return [torch.from_numpy(free[..., number]).to(device, torch.int64) + self._base for number in range(most)]

    def _find_leaves(self) -> dict[int, list[tuple[int, int]]]:
        """After which updates the rule must forget whom: (row, worker)."""
        found: dict[int, list[tuple[int, int]]] = {}
        if self._in_rounds:
            return found
        for number, row in enumerate(self.rows):
            for update, worker in row.trace.left.tolist():
                if self._begin <= update < self.end:
                    found.setdefault(update + 1 - self._begin, []).append((number, worker))
        return found

    def _update(self) -> None:
        """One update of every row, at the place the counter names."""
        at = self._inputs.at
        self._find_gradients()
        with torch.no_grad():
            numbers = self._numbers.index_select(0, at)[0]
            worker = None if self._worker is None else self._worker.index_select(0, at)[0]
            arrival = Arrival(worker, numbers[:, 0:1], numbers[:, 1:2], numbers[:, 2:3])
            self.rule.apply(self.weights, self.state, self._gradient, arrival)
            for released in self._released:
                place = released.index_select(0, at)[0]
                sent = self.weights
                if self._ahead is not None:
                    sent = self._ahead
                    self.rule.weights_for(self.weights, self.state, place - self._base, sent)
                self.held.index_copy_(0, place, sent)
            at += 1

    @property
    def left(self) -> int:
        """Updates until the first row ends."""
        return self.num_updates - self._done

    def advance(self, updates: int) -> int:
        """Make so many updates, or those that are left; on a GPU they are only queued. Returns how many."""
        number = min(updates, self.left)
        target = self._done + number
        while self._done < target:
            stop = next((place for place in range(self._done + 1, target) if place in self._leaves), target)
            if self._stream is None:
                for _ in range(stop - self._done):
                    self._update()
                self._forget(stop)
            else:
                with torch.cuda.stream(self._stream):
                    self._replay(stop - self._done)
                    self._forget(stop)
            self._done = stop
        if self._stream is not None and number:
            self._queued.append(self._stream.record_event())
        return number

    @property
    def num_queued(self) -> int:
        """Calls of `advance` whose updates the device has not finished yet."""
        while self._queued and self._queued[0].query():  # type: ignore[no-untyped-call]
            del self._queued[0]
        return len(self._queued)

    def _forget(self, place: int) -> None:
        """Tell the rule who has left."""
        for number, worker in self._leaves.get(place, ()):
            self.rule.leave({name: tensor[number] for name, tensor in self.state.items()}, worker)

    def _replay(self, number: int) -> None:
        while number:
            if self._done < WARM_UP or self.num_updates <= 2 * WARM_UP:
                self._update()
                self._done, number = self._done + 1, number - 1
                continue
            size = UNROLL if number >= UNROLL else 1
            if size not in self._graphs:
                self._graphs[size] = self._captured(size)
            self._graphs[size].replay()
            self._done, number = self._done + size, number - size

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        """So many updates recorded; recording executes nothing. An old graph must not be freed meanwhile."""
        gc.collect()
        gc.disable()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                for _ in range(size):
                    self._update()
        finally:
            gc.enable()
        return graph

    def without_the_ended(self) -> list[Family]:
        """The rows that have updates left, where they are now, as a family of their own."""
        keep = [number for number, row in enumerate(self.rows) if len(row.trace) > self.end]
        if not keep:
            return []
        rest = Family([self.rows[number] for number in keep], self.data, self.end, self.places)
        rest.weights.copy_(self.weights[keep])
        for name, tensor in rest.state.items():
            tensor.copy_(self.state[name][keep])
        if not self._in_rounds:
            rest.held.copy_(self.held.view(len(self.rows), self.places, -1)[keep].flatten(0, 1))
        rest._begin_after_this()
        return [rest]

    def _begin_after_this(self) -> None:
        """What was queued so far on the usual stream comes before this family's own."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.weights.device))

    def ended(self) -> list[int]:
        """Places of the rows that have made their last update."""
        return [number for number, row in enumerate(self.rows) if len(row.trace) == self.end]

    @property
    def evaluated(self) -> Tensor:
        """The weights of every row that are scored: the live ones, unless the rule averages."""
        return self.rule.evaluated(self.weights, self.state)

    def scores(self, data: Images, chunk: int = 500) -> tuple[Tensor, Tensor, Tensor]:
        """Of every row on `data`: mean loss, share of right answers, and that share for each class."""
        total, num_rows = len(data.labels), len(self.rows)
        device = data.labels.device
        num_classes = int(data.labels.max()) + 1
        loss = torch.zeros(num_rows, device=device)
        right = torch.zeros(num_rows, num_classes, device=device)
        seen = torch.bincount(data.labels, minlength=num_classes)
        logits, parameters = BATCHED[self.rows[0].config.model], views(self.layout, self.evaluated)
        with torch.no_grad():
            for start in range(0, total, chunk):
                rows = torch.arange(start, min(start + chunk, total), device=device, dtype=torch.int32)
                images, labels = data.take(rows)
                shared = images.expand(num_rows, *images.shape).contiguous()
                found = logits(parameters, shared, None)
                every = labels.expand(num_rows, -1)
                loss -= found.gather(-1, every[..., None]).sum((1, 2))
                right.scatter_add_(1, every, (found.argmax(-1) == every).float())
        return loss / total, right.sum(1) / total, right / seen


def hands_out_live(rule: Rule) -> bool:
    """Whether workers are sent plain copies of the live weights, and nothing is written down of it."""
    inner = rule.rule if isinstance(rule, Averaged) else rule
    return getattr(type(inner), "weights_for", None) is Live.weights_for


def _wide(array: NDArray[Any], pushes: int, filler: float = 0) -> NDArray[Any]:
    """Pad the second axis to `pushes`."""
    missing = pushes - array.shape[1]
    if not missing:
        return array
    return np.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)], constant_values=filler)
