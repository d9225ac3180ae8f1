"""Evaluate a run's weights during training and after it, on all cores while no worker is served."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from paceline.assembly.work import WorkAssignment
from paceline.config import RunConfig, is_simulated
from paceline.core.server import Server
from paceline.interfaces import Report, Scores
from paceline.runs.events import EventLog
from paceline.runs.folder import ALL_GONE, NOT_COME, RAISED
from paceline.runs.result import finite, is_averaged, shared_state
from paceline.runs.snapshots import BestWeights
from paceline.runtimes.server.timing import TimingCollector, TrainingClock
from paceline.settings.stopping import chosen_part
from paceline.system.cpu import cores
from paceline.system.signals import INTERRUPTED, TERMINATED
from paceline.tasks.nested import device_of, num_samples
from paceline.tasks.supervised import SupervisedTask


class Evaluator:
    """Scores the weights that the server would publish now."""

    def __init__(
        self,
        server: Server,
        task: SupervisedTask | None,
        work: WorkAssignment | None,
        config: RunConfig,
        events: EventLog,
        clock: TrainingClock,
        timings: TimingCollector,
        report: Report,
        best: BestWeights | None,
    ) -> None:
        self._server, self._task, self._work, self._config = server, task, work, config
        self._events, self._clock, self._timings, self._report = events, clock, timings, report
        self._best, self._part = best, chosen_part(config)
        self._cores = os.sched_getaffinity(0)
        self.next_samples = self._next_after(server.samples)
        """How many samples have been processed when the next evaluation is due."""

    def _next_after(self, samples: int) -> float:
        if self._config.eval_every is None or self._task is None:
            return math.inf
        if self._part == "test" and self._task.test is None:
            return math.inf
        step = self._config.eval_every * self._server.budget.epoch_samples
        return (math.floor(samples / step) + 1) * step

    def evaluate(self) -> Scores:
        """Score the data to choose by, write and report the scores, and keep the weights if they are the best."""
        server, part = self._server, self._part
        self.next_samples = self._next_after(server.samples)
        began = time.perf_counter()
        scores = self._score(part)
        seconds = {} if is_simulated(self._config) else {f"{part}_seconds": round(time.perf_counter() - began, 3)}
        assert scores is not None, "an evaluation is only due if there is data to score"
        if self._best is not None:
            self._best.save_if_best(server, scores)
        found = _columns(part, scores)
        if self._config.eval_train and (train := self._score("train")) is not None:
            found |= _columns("train", train)
        at = {"updates": server.version, "samples": server.samples}
        self._events.write("evaluation", self._clock.now(), **at, **found, **seconds)
        epochs = server.samples / server.budget.epoch_samples
        accuracy = f"{part} accuracy {scores.accuracy:.2f} %, " if scores.per_class else ""
        metrics = "".join(f", {name} {value:.4g}" for name, value in scores.metrics.items())
        text = f"epoch {epochs:.2f}: {accuracy}{part} loss {scores.loss:.4f}{metrics}"
        self._report({"kind": "note", "text": text})
        return scores

    def final_scores(self, diverged: bool, stop_reason: str | None) -> dict[str, Scores | None]:
        """Score the weights of a run that has ended, on the parts of the data that are worth the time.

        If they are averaged, score the live ones too, on the test and validation data.
        """
        scores: dict[str, Scores | None] = {}
        for which in self._final_parts(diverged, stop_reason):
            self._report({"kind": "scoring", "which": which})
            scores[which] = self._score(which)
            if which != "train" and is_averaged(self._server):
                scores[f"live_{which}"] = self._score(which, live=True)
        if self._best is not None and (last := scores.get(self._part)) is not None:
            self._best.save_if_best(self._server, last)
        return scores

    def _final_parts(self, diverged: bool, stop_reason: str | None) -> Iterator[str]:
        """Every part after a finished run, the test data after Ctrl-C, nothing if the machine is being taken away."""
        if self._task is None or diverged or stop_reason in (ALL_GONE, NOT_COME, TERMINATED):
            return
        if self._config.score == "none" or (stop_reason or "").startswith(RAISED):
            return
        last = "test" if self._config.fold is None else "validation"
        is_whole = stop_reason != INTERRUPTED and self._config.score != "test"
        if is_whole:
            yield "train"
        if last != "validation" and (is_whole or (self._best is not None and self._part == "validation")):
            yield "validation"
        yield last

    def _score(self, which: str, live: bool = False) -> Scores | None:
        """Score the train, validation or test data; None if there is none."""
        assert self._task is not None, "only a task with data can be scored"
        task, work = self._task, self._work
        data = task.test if which == "test" else task.train
        rows = None
        if work is not None and which != "test":
            rows = work.train if which == "train" else work.validation
        if data is None or (which == "validation" and (rows is None or not len(rows))):
            return None
        is_part = rows is not None and len(rows) < num_samples(data[0])
        indices = torch.from_numpy(rows).to(device_of(data)) if rows is not None and is_part else None
        self._events.write("scoring", self._clock.now(), which=which)
        os.sched_setaffinity(0, self._cores)  # a worker may have lent the server its core
        before = torch.get_num_threads()
        torch.set_num_threads(cores())
        try:
            with self._timings.scoring():
                weights = self._server.weights if live else self._server.evaluated
                return task.evaluate(weights, shared_state(self._server, task, weights), data, indices)
        finally:
            torch.set_num_threads(before)


def _columns(part: str, scores: Scores) -> dict[str, Any]:
    """Scores under the names that event rows use."""
    found: dict[str, Any] = {f"{part}_accuracy": scores.value("accuracy"), **finite({f"{part}_loss": scores.loss})}
    return found | ({f"{part}_metrics": finite(scores.metrics)} if scores.metrics else {})
