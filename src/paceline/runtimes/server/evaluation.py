"""Evaluate a run's weights during training and after it, on all cores while no worker is served."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.analysis.collapse import COLLAPSED, why_collapsed, why_untrained
from paceline.assembly.non_finite import notes_on_data, why_not_finite
from paceline.assembly.work import WorkAssignment, scored_train
from paceline.config import RunConfig, is_simulated
from paceline.core.server import Server
from paceline.interfaces import Report, Scores
from paceline.runs.events import EventLog
from paceline.runs.folder import ALL_GONE, NOT_COME, RAISED
from paceline.runs.result import finite, is_averaged, shared_state
from paceline.runs.snapshots import BestWeights
from paceline.runtimes.server.timing import TimingCollector, TrainingClock
from paceline.settings.preprocessing import train_score_of
from paceline.settings.stopping import chosen_part
from paceline.system.cpu import cores
from paceline.system.signals import INTERRUPTED, TERMINATED
from paceline.tasks.nested import device_of, num_samples
from paceline.tasks.supervised import Pair, SupervisedTask

States = dict[bool, Tensor | None]
"""Running statistics, by whether they belong to the live weights."""


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
        parts = [self._pass(part), *([self._pass("train")] if self._config.eval_train else [])]
        progress = ScoringProgress(self._report, sum(one.num_samples for one in parts if one is not None))
        states: States = {}
        scores = self._score(parts[0], progress, states)
        seconds = {} if is_simulated(self._config) else {f"{part}_seconds": round(time.perf_counter() - began, 3)}
        assert scores is not None, "an evaluation is only due if there is data to score"
        if self._best is not None:
            self._best.save_if_best(server, scores)
        found = _columns(part, scores)
        for train in parts[1:]:
            if (on_train := self._score(train, progress, states)) is not None:
                found |= _columns("train", on_train)
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
        passes = {}
        for which in self._final_parts(diverged, stop_reason):
            passes[which] = self._pass(which, is_final=True)
            if which != "train" and is_averaged(self._server):
                passes[f"live_{which}"] = self._pass(which, live=True)
        progress = ScoringProgress(self._report, sum(one.num_samples for one in passes.values() if one is not None))
        states: States = {}
        scores = {name: self._score(one, progress, states) for name, one in passes.items()}
        if self._best is not None and (last := scores.get(self._part)) is not None:
            self._best.save_if_best(self._server, last)
        return scores

    def judge(
        self, scores: dict[str, Scores | None], stop_reason: str | None, losses: Callable[[], Sequence[float]]
    ) -> dict[str, str]:
        """Return status and reason of a finished run that failed, by its scores and pushes, for its result; else empty.

        Say which samples are to blame if a loss is not finite and the weights are not.
        """
        config, server, task = self._config, self._server, self._task
        if task is not None and (why := why_not_finite(config, server, task, scores)) is not None:
            return {"status": "diverged", "reason": why}
        for text in notes_on_data(task, scores):
            self._report({"kind": "note", "text": text})
        why = why_untrained(config, server) or why_collapsed(config, server, stop_reason, scores, losses)
        return {"status": COLLAPSED, "reason": why} if why is not None else {}

    def chosen_on(self, was_met: bool) -> str | None:
        """The data by which the best weights were chosen, or the run ended as its target `was_met`; None: nothing."""
        has_data = self._task is not None and (self._part != "test" or self._task.test is not None)
        return self._part if has_data and (self._best is not None or was_met) else None

    def _final_parts(self, diverged: bool, stop_reason: str | None) -> Iterator[str]:
        """Every part after a finished run, the test data after Ctrl-C, nothing if the machine is being taken away."""
        if self._task is None or diverged or stop_reason in (ALL_GONE, NOT_COME, TERMINATED):
            return
        if self._config.score == "none" or (stop_reason or "").startswith(RAISED):
            return
        last = "test" if self._config.fold is None else "validation"
        is_whole = stop_reason != INTERRUPTED and self._config.score != "test"
        if is_whole and train_score_of(self._config) != 0:
            yield "train"
        if last != "validation" and (is_whole or (self._best is not None and self._part == "validation")):
            yield "validation"
        yield last

    def _pass(self, part: str, live: bool = False, is_final: bool = False) -> ScoringPass | None:
        """Return what to score of the train, validation or test data; None if there is none."""
        assert self._task is not None, "only a task with data can be scored"
        task, work = self._task, self._work
        data = task.test if part == "test" else task.train
        if data is None or (part == "validation" and (work is None or not len(work.validation))):
            return None
        rows, whole = None, num_samples(data[0])
        if part != "test":
            rows = np.arange(whole) if work is None else work.validation if part == "validation" else work.train
            if part == "train" and is_final:
                rows = scored_train(rows, self._config)
        return ScoringPass(part, live, data, rows if rows is not None and len(rows) < whole else None)

    def _score(self, one: ScoringPass | None, progress: ScoringProgress, states: States) -> Scores | None:
        """Make one pass; `states` keeps the running statistics of live and of published weights for the next one."""
        if one is None:
            return None
        assert self._task is not None
        task, server = self._task, self._server
        indices = torch.from_numpy(one.rows).to(device_of(one.data)) if one.rows is not None else None
        self._events.write("scoring", self._clock.now(), which=one.part)
        os.sched_setaffinity(0, self._cores)  # a worker may have lent the server its core
        before = torch.get_num_threads()
        torch.set_num_threads(cores())
        progress.begin(one)
        try:
            with self._timings.scoring():
                weights = server.weights if one.live else server.evaluated
                if one.live not in states:
                    states[one.live] = shared_state(server, task, weights)
                return task.evaluate(weights, states[one.live], one.data, indices, progress.add)
        finally:
            torch.set_num_threads(before)


@dataclass(frozen=True)
class ScoringPass:
    """One pass over a part of the data, or over these rows of it, with the published or the live weights."""

    part: str
    live: bool
    data: Pair
    rows: NDArray[np.int64] | None

    @property
    def num_samples(self) -> int:
        return num_samples(self.data[0]) if self.rows is None else len(self.rows)


SILENT_SECONDS, REPORT_SECONDS = 1.0, 0.25


class ScoringProgress:
    """Reports the scored share of all samples and the time left: nothing in the first second, then now and then."""

    def __init__(self, report: Report, total: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._report, self._total, self._clock = report, total, clock
        self._done, self._what, self._next = 0, "", clock() + SILENT_SECONDS
        self._first: tuple[float, int] | None = None  # after the first batch, before which statistics are estimated

    def begin(self, one: ScoringPass) -> None:
        """Name what is scored from now on."""
        self._what = f"scoring the {one.part} data" + (" with the live weights" if one.live else "")

    def add(self, samples: int) -> None:
        """Count samples, and report if it is time to."""
        self._done, now = self._done + samples, self._clock()
        if self._first is None:
            self._first = now, self._done
        elif now >= self._next and self._done < self._total:
            self._next = now + REPORT_SECONDS
            began, before = self._first
            left = (now - began) * (self._total - self._done) / (self._done - before)
            row = {"text": self._what, "fraction": round(self._done / self._total, 6), "seconds_left": round(left, 1)}
            self._report({"kind": "scoring", **row})


def _columns(part: str, scores: Scores) -> dict[str, Any]:
    """Scores under the names that event rows use."""
    found: dict[str, Any] = {f"{part}_accuracy": scores.value("accuracy"), **finite({f"{part}_loss": scores.loss})}
    return found | ({f"{part}_metrics": finite(scores.metrics)} if scores.metrics else {})
