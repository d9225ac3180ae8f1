"""Scores of a run's weights on the way and at its end, on all cores, while nobody trains."""

from __future__ import annotations

import os
from typing import Any

import torch

from paceline.assembly.work import Work
from paceline.core.server import Server
from paceline.interfaces import Scores
from paceline.runs.events import EventLog
from paceline.runs.result import finite, shared_state
from paceline.runtimes.server.timing import Timekeeper, TrainingClock
from paceline.system.cpu import cores
from paceline.tasks.nested import device_of, num_samples
from paceline.tasks.supervised import SupervisedTask


def named(part: str, scores: Scores) -> dict[str, Any]:
    """Scores as rows and results name them."""
    found: dict[str, Any] = {f"{part}_accuracy": scores.value("accuracy"), f"{part}_loss": scores.loss}
    return found | ({f"{part}_metrics": finite(scores.metrics)} if scores.metrics else {})


class Scorer:
    """Scores what the server would evaluate now."""

    def __init__(
        self, server: Server, work: Work | None, events: EventLog, clock: TrainingClock, timekeeper: Timekeeper
    ) -> None:
        self._server, self._work, self._events = server, work, events
        self._clock, self._timekeeper = clock, timekeeper
        self._cores = os.sched_getaffinity(0)

    def score(self, task: SupervisedTask, which: str) -> Scores | None:
        """On the train, validation or test data; None where there is none."""
        data = task.test if which == "test" else task.train
        rows = None
        if self._work is not None and which != "test":
            rows = self._work.train if which == "train" else self._work.validation
        if data is None or (which == "validation" and (rows is None or not len(rows))):
            return None
        part = rows is not None and len(rows) < num_samples(data[0])
        indices = torch.from_numpy(rows).to(device_of(data)) if rows is not None and part else None
        self._events.write("scoring", self._clock.now(), which=which)
        os.sched_setaffinity(0, self._cores)  # a worker may have lent its core last
        before = torch.get_num_threads()
        torch.set_num_threads(cores())
        try:
            with self._timekeeper.scoring():
                return task.evaluate(self._server.evaluated, shared_state(self._server, task), data, indices)
        finally:
            torch.set_num_threads(before)
