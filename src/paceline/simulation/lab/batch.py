"""A batch of runs with the same kind of update: weights [R, P], one pass updates all runs.

On a GPU the updates are captured as CUDA graphs and replayed; a counter on the device selects the update.
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
from paceline.core.rules.plain import StatelessHooks
from paceline.core.rules.wrapper import RuleWrapper
from paceline.core.server import RECOMPUTE_EVERY
from paceline.interfaces import Arrival, Layout, Rule
from paceline.randomness import mix64_array
from paceline.settings.preprocessing import ways_of
from paceline.simulation.lab.arrival_order import NO_WORKER, ArrivalOrder
from paceline.simulation.lab.gradients import gradients_for
from paceline.simulation.lab.inputs import BatchInputs, Gradients, Images, RunInputs
from paceline.simulation.lab.models import DROPOUT_LAYERS
from paceline.tasks.augmentation import PURPOSE

WARM_UP = 3
LENGTH_TOLERANCE = 0.05  # runs whose lengths differ by at most this share end together
UNROLL = 10  # updates in the longer CUDA graph, launched at once


@dataclass(frozen=True, eq=False)
class LabRun:
    """One run in the lab: its config, arrival order, inputs and initial weights."""

    config: RunConfig
    trace: ArrivalOrder
    feed: RunInputs
    initial: Tensor
    layout: Layout
    skew: float = 0.0


class RunBatch:
    """Runs that share model, rule, optimizer and pushes per update, from update `begin` until the first of them end.

    Runs of nearly equal length end together: the batch saves each run's weights at its last update and goes on.
    """

    def __init__(self, rows: list[LabRun], data: Images, begin: int = 0, max_workers: int | None = None) -> None:
        config, layout = rows[0].config, rows[0].layout
        self.rows, self.layout, self.data, self.begin = rows, layout, data, begin
        device, lengths = data.images.device, [len(row.trace) for row in rows]
        self.weights = torch.stack([row.initial for row in rows]).to(device)
        self.end = max(length for length in lengths if length <= min(lengths) * (1.0 + LENGTH_TOLERANCE))
        self.num_updates = self.end - begin
        self.ended = [number for number, length in enumerate(lengths) if length <= self.end]
        self.final: dict[int, tuple[Tensor, Tensor]] = {}  # evaluated and live weights of each run at its end
        self._in_rounds = rows[0].trace.workers.shape[1] > 1
        self._many_released = not self._in_rounds and max(row.trace.released.shape[1] for row in rows) > 1
        self.max_workers = max_workers or max(row.config.workers or 1 for row in rows) + self._many_released
        self.rule: Rule = make_rule(config, layout, self.max_workers, rows[0].skew)
        self.state = self.rule.start(self.weights)
        self._ahead = None if sends_live_weights(self.rule) else torch.empty_like(self.weights)
        self._gradient = torch.zeros_like(self.weights)
        self.losses = torch.zeros(len(rows), device=device)
        self.held = self.weights if self._in_rounds else self.weights.repeat_interleave(self.max_workers, 0)
        self._inputs = self._load_inputs(device)
        self._find_gradients: Gradients = gradients_for(config.model, self._inputs, layout, self._gradient, self.losses)
        self._stops = self._find_stops()
        self.done = 0
        self._num_eager = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._queued: list[torch.cuda.Event] = []
        self._wait_for_current_stream()

    def _load_inputs(self, device: torch.device) -> BatchInputs:
        rows, span = self.rows, slice(self.begin, self.end)
        pushes = max(row.trace.workers.shape[1] for row in rows)

        def stacked(arrays: list[NDArray[Any]], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.stack([_long(array, self.num_updates) for array in arrays], 1)).to(device, dtype)

        traces = [row.trace for row in rows]
        columns = [(one.staleness, one.lr, one.num_live, one.present) for one in traces]
        numbers = [np.stack([column[span] for column in each], 1) for each in columns]
        self._numbers = stacked(numbers, torch.float32)

        def halves(purpose: int) -> tuple[Tensor, Tensor]:
            found = [_wide(mix64_array(row.feed.keys[span], purpose).astype(np.int64), pushes) for row in rows]
            both = stacked(found, torch.int64)
            return both.to(torch.int32), (both >> 32).to(torch.int32)

        config = rows[0].config
        keys, ways = [halves(layer) for layer in DROPOUT_LAYERS[config.model]], ways_of(config)
        self._base = torch.arange(len(rows), device=device) * self.max_workers
        self._worker: Tensor | None = None
        owner, self._released = torch.arange(len(rows), device=device)[None], []
        if not self._in_rounds:
            self._worker = stacked([row.trace.workers[span, 0] for row in rows], torch.int64)
            owner = self._worker + self._base
            self._released = [owner]
        if self._many_released:
            most = max(row.trace.released.shape[1] for row in rows)
            free = stacked([_wide(row.trace.released[span], most, NO_WORKER) for row in rows], torch.int64)
            free = torch.where(free == NO_WORKER, self.max_workers - 1, free) + self._base[:, None]  # padding
            self._released = list(free.unbind(-1))
        at = torch.zeros(1, dtype=torch.int64, device=device)
        samples = stacked([_wide(row.feed.samples[span], pushes) for row in rows], torch.int32).flatten(2)
        weights = stacked([_wide(row.feed.weights[span], pushes) for row in rows], torch.float32).flatten(2)
        choices = halves(PURPOSE) if ways else None
        return BatchInputs(self.data, at, samples, weights, keys, owner, self.held, config.batch_size, ways, choices)

    def _find_stops(self) -> dict[int, list[tuple[int, int]]]:
        """Return the updates after which a worker leaves (run, worker) or a run ends (run, NO_WORKER)."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, row in enumerate(self.rows):
            if not self._in_rounds:
                for update, worker in row.trace.left.tolist():
                    if self.begin <= update < self.end:
                        found.setdefault(update + 1 - self.begin, []).append((number, worker))
            if number in self.ended:
                found.setdefault(len(row.trace) - self.begin, []).append((number, NO_WORKER))
        return found

    def _update(self) -> None:
        """Make one update of every run, the one that the counter selects."""
        at = self._inputs.at
        self._find_gradients()
        with torch.no_grad():
            numbers = self._numbers.index_select(0, at)[0]
            worker = None if self._worker is None else self._worker.index_select(0, at)[0]
            arrival = Arrival(worker, *torch.split(numbers, 1, -1))
            self.rule.apply(self.weights, self.state, self._gradient, arrival)
            for released in self._released:
                place = released.index_select(0, at)[0]
                if self._ahead is not None:
                    self.rule.reply_weights(self.weights, self.state, place - self._base, self._ahead)
                self.held.index_copy_(0, place, self.weights if self._ahead is None else self._ahead)
            at += 1

    @property
    def gradients_done(self) -> int:
        """Gradients of all runs so far."""
        pushes: int = sum(row.trace.workers.shape[1] for row in self.rows)
        return (self.begin + self.done) * pushes

    @property
    def left(self) -> int:
        """Updates until the first runs end."""
        return self.num_updates - self.done

    def advance(self, updates: int) -> int:
        """Make at most `updates` updates and return how many; on a GPU they are only queued."""
        number = min(updates, self.left)
        target = self.done + number
        while self.done < target:
            stop = next((place for place in range(self.done + 1, target) if self._is_stop(place)), target)
            if self._stream is None:
                for _ in range(stop - self.done):
                    self._update()
                self._stop_at(stop)
            else:
                with torch.cuda.stream(self._stream):
                    self._replay(stop - self.done)
                    self._stop_at(stop)
            self.done = stop
        if self._stream is not None and number:
            self._queued.append(self._stream.record_event())
        return number

    @property
    def num_queued(self) -> int:
        """Calls of `advance` whose updates the device has not finished."""
        while self._queued and self._queued[0].query():  # type: ignore[no-untyped-call]
            del self._queued[0]
        return len(self._queued)

    def _is_stop(self, place: int) -> bool:
        return place in self._stops or (self.begin + place) % RECOMPUTE_EVERY == 0

    def _stop_at(self, place: int) -> None:
        """Recompute sums over workers when due, remove workers that left, and save the weights of runs that ended."""
        if (self.begin + place) % RECOMPUTE_EVERY == 0:
            self.rule.recompute_sums(self.state)
        for number, worker in self._stops.get(place, ()):
            if worker == NO_WORKER:
                evaluated = self.rule.evaluated(self.weights, self.state)
                self.final[number] = evaluated[number].clone(), self.weights[number].clone()
            else:
                state = {name: tensor[number] for name, tensor in self.state.items()}
                self.rule.leave(state, worker)
                self.rule.recompute_sums(state)

    def _replay(self, number: int) -> None:
        while number:
            if self._num_eager < WARM_UP or self.num_updates <= 2 * WARM_UP:
                self._update()
                self._num_eager += 1
                self.done, number = self.done + 1, number - 1
                continue
            size = UNROLL if number >= UNROLL else 1
            if size not in self._graphs:
                self._graphs[size] = self._captured(size)
            self._graphs[size].replay()
            self.done, number = self.done + size, number - size

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        """Capture `size` updates as a CUDA graph without executing them; no old graph may be freed meanwhile."""
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

    def tensors(self) -> dict[str, Tensor]:
        """Return copies on the CPU of everything that updates read and change; wait for the queued ones first."""
        if self._stream is not None:
            self._stream.synchronize()
        found = {"weights": self.weights, "held": self.held}
        found |= {f"rule.{name}": tensor for name, tensor in self.state.items()}
        none = torch.full_like(self.weights, torch.nan)
        for place, name in enumerate(("evaluated", "live")):
            rows = [self.final[number][place] if number in self.final else none[0] for number in range(len(self.rows))]
            found[f"final.{name}"] = torch.stack(rows)
        found["ended"] = torch.tensor([number in self.final for number in range(len(self.rows))])
        return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in found.items()}

    def restore(self, tensors: dict[str, Tensor], done: int) -> None:
        """Continue after `done` updates with the tensors of another batch of the same runs."""
        self.weights.copy_(tensors["weights"])
        self.held.copy_(tensors["held"])  # the same memory in rounds
        for name, tensor in self.state.items():
            tensor.copy_(tensors[f"rule.{name}"])
        for number in tensors["ended"].nonzero().flatten().tolist():
            pair = (tensors[f"final.{name}"][number].to(self.weights.device) for name in ("evaluated", "live"))
            self.final[number] = next(pair), next(pair)
        self.done = done
        self._inputs.at.fill_(done)
        self._wait_for_current_stream()

    def remaining(self) -> list[RunBatch]:
        """Return a batch of the runs that have updates left, with their current state, or nothing."""
        keep = [number for number in range(len(self.rows)) if number not in self.ended]
        if not keep:
            return []
        rest = RunBatch([self.rows[number] for number in keep], self.data, self.end, self.max_workers)
        rest.weights.copy_(self.weights[keep])
        for name, tensor in rest.state.items():
            tensor.copy_(self.state[name][keep])
        if not self._in_rounds:
            rest.held.copy_(self.held.view(len(self.rows), self.max_workers, -1)[keep].flatten(0, 1))
        rest._wait_for_current_stream()
        return [rest]

    def _wait_for_current_stream(self) -> None:
        """Make this batch's stream wait for the work queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.weights.device))


def sends_live_weights(rule: Rule) -> bool:
    """Return whether the rule sends plain copies of the live weights and keeps no record of them."""
    while isinstance(rule, RuleWrapper):
        rule = rule.rule
    return getattr(type(rule), "reply_weights", None) is StatelessHooks.reply_weights


def _long(array: NDArray[Any], updates: int) -> NDArray[Any]:
    """Repeat the last entry of a run that ends before the others."""
    return array if len(array) == updates else np.concatenate([array, array[-1:].repeat(updates - len(array), 0)])


def _wide(array: NDArray[Any], pushes: int, filler: float = 0) -> NDArray[Any]:
    """Pad the second axis to `pushes`."""
    missing = pushes - array.shape[1]
    if not missing:
        return array
    return np.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)], constant_values=filler)
