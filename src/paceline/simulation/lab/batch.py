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

from paceline.assembly.core import make_rule
from paceline.config import RunConfig
from paceline.core.rules.worker_rows import Live
from paceline.core.rules.wrapper import Around
from paceline.interfaces import Arrival, Layout, Rule
from paceline.randomness import mix64_array
from paceline.simulation.lab.arrival_order import NOBODY, Trace
from paceline.simulation.lab.gradients import gradients_for
from paceline.simulation.lab.inputs import Feed, Gradients, Images, Inputs
from paceline.simulation.lab.models import DROPOUT_LAYERS

WARM_UP = 3
TOGETHER = 0.05
"""Rows whose lengths differ by less than this share of them end together."""
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
    skew: float = 0.0


class Family:
    """Rows that share model, rule, optimizer and pushes an update, from update `begin` until the first of them end.

    Rows that end within a few updates of each other end together: what each came to is kept at its own last update, and
    what it goes on to do meanwhile counts for nothing.
    """

    def __init__(self, rows: list[Row], data: Images, begin: int = 0, places: int | None = None) -> None:
        config, layout = rows[0].config, rows[0].layout
        self.rows, self.layout, self.data = rows, layout, data
        device = data.images.device
        self.weights = torch.stack([row.initial for row in rows]).to(device)
        lengths = [len(row.trace) for row in rows]
        self._begin = begin
        self.end = max(length for length in lengths if length <= min(lengths) * (1.0 + TOGETHER))
        self.num_updates = self.end - begin
        self.ended = [number for number, length in enumerate(lengths) if length <= self.end]
        self.final: dict[int, tuple[Tensor, Tensor]] = {}
        """Of each row that has made its last update: the weights that are scored, and the live ones."""
        self._in_rounds = rows[0].trace.workers.shape[1] > 1
        self._several = not self._in_rounds and max(row.trace.released.shape[1] for row in rows) > 1
        self.places = places or max(row.config.workers or 1 for row in rows) + self._several
        self.rule: Rule = make_rule(config, layout, self.places, rows[0].skew)
        self.state = self.rule.start(self.weights)
        self._ahead = None if hands_out_live(self.rule) else torch.empty_like(self.weights)
        self._gradient = torch.zeros_like(self.weights)
        self.losses = torch.zeros(len(rows), device=device)
        self.held = self.weights if self._in_rounds else self.weights.repeat_interleave(self.places, 0)
        self._inputs = self._bring(device)
        self._find_gradients: Gradients = gradients_for(config.model, self._inputs, layout, self._gradient, self.losses)
        self._stops = self._find_stops()
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
            return torch.from_numpy(np.stack([_long(array, self.num_updates) for array in arrays], 1)).to(device, dtype)

        traces = [row.trace for row in rows]
        numbers = [np.stack([one.staleness[span], one.lr[span], one.num_live[span]], 1) for one in traces]
        self._numbers = stacked(numbers, torch.float32)
        keys = []
        for layer in DROPOUT_LAYERS[rows[0].config.model]:
            found = [_wide(mix64_array(row.feed.keys[span], layer).astype(np.int64), pushes) for row in rows]
            both = stacked(found, torch.int64)
            keys.append((both.to(torch.int32), (both >> 32).to(torch.int32)))
        self._base = torch.arange(len(rows), device=device) * self.places
        self._worker: Tensor | None = None
        self._released: list[Tensor] = []
        owner = torch.arange(len(rows), device=device)[None]
        if not self._in_rounds:
            self._worker = stacked([row.trace.workers[span, 0] for row in rows], torch.int64)
            owner = self._worker + self._base
            self._released = [owner]
        if self._several:
            most = max(row.trace.released.shape[1] for row in rows)
            free = stacked([_wide(row.trace.released[span], most, NOBODY) for row in rows], torch.int64)
            free = torch.where(free == NOBODY, self.places - 1, free) + self._base[:, None]  # nobody is the last place
            self._released = list(free.unbind(-1))
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

    def _find_stops(self) -> dict[int, list[tuple[int, int]]]:
        """After which updates something is due: a worker for the rule to forget, as (row, worker), or a row's end."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, row in enumerate(self.rows):
            if not self._in_rounds:
                for update, worker in row.trace.left.tolist():
                    if self._begin <= update < self.end:
                        found.setdefault(update + 1 - self._begin, []).append((number, worker))
            if number in self.ended:
                found.setdefault(len(row.trace) - self._begin, []).append((number, NOBODY))
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
        """Updates until the first rows end."""
        return self.num_updates - self._done

    def advance(self, updates: int) -> int:
        """Make so many updates, or those that are left; on a GPU they are only queued. Returns how many."""
        number = min(updates, self.left)
        target = self._done + number
        while self._done < target:
            stop = next((place for place in range(self._done + 1, target) if place in self._stops), target)
            if self._stream is None:
                for _ in range(stop - self._done):
                    self._update()
                self._stop_at(stop)
            else:
                with torch.cuda.stream(self._stream):
                    self._replay(stop - self._done)
                    self._stop_at(stop)
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

    def _stop_at(self, place: int) -> None:
        """Tell the rule who has left, and keep what rows came to."""
        for number, worker in self._stops.get(place, ()):
            if worker == NOBODY:
                evaluated = self.rule.evaluated(self.weights, self.state)
                self.final[number] = evaluated[number].clone(), self.weights[number].clone()
            else:
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
        keep = [number for number in range(len(self.rows)) if number not in self.ended]
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


def hands_out_live(rule: Rule) -> bool:
    """Whether workers are sent plain copies of the live weights, and nothing is written down of it."""
    inner = rule
    while isinstance(inner, Around):
        inner = inner.rule
    return getattr(type(inner), "weights_for", None) is Live.weights_for


def _long(array: NDArray[Any], updates: int) -> NDArray[Any]:
    """Repeat the last entry of a row that ends before the others."""
    return array if len(array) == updates else np.concatenate([array, array[-1:].repeat(updates - len(array), 0)])


def _wide(array: NDArray[Any], pushes: int, filler: float = 0) -> NDArray[Any]:
    """Pad the second axis to `pushes`."""
    missing = pushes - array.shape[1]
    if not missing:
        return array
    return np.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)], constant_values=filler)
