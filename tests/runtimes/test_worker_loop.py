"""The worker's loop on a transport of the test's own: what it sends, how long it sleeps, and when it ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Join, Push, Reply
from paceline.core.worker import LocalBatches, LocalWorker
from paceline.interfaces import Batch, State, pack
from paceline.runtimes.worker_loop import StepTimer, WorkerLoop
from paceline.transports.protocol import Timing

CONFIG = RunConfig(strategy="async", workers=2, delay=["2s", "3s@1"])


class CountingTask:
    """A task whose gradient is its batch's number; local steps count their batches."""

    layout, state_size = pack([("line", (2,), True)]), 0

    def __init__(self) -> None:
        self.local_state: State = {}

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._gradient = gradient

    def initial(self) -> Tensor:
        return torch.zeros(self.layout.size)

    def batch(self, number: int) -> Batch:
        return Batch(None, None, 1, number)

    def gradient(self, batch: Batch) -> float:
        key = len(list(batch)) if isinstance(batch, LocalBatches) else batch.key
        self._gradient.fill_(key)
        return float(key)


class Scripted:
    """A transport that returns prepared replies and records what it was sent."""

    def __init__(self, replies: list[Reply | None]) -> None:
        self.replies, self.joins = replies, list[Join]()
        self.losses, self.timings = list[float](), list[Timing]()

    def hello(self, join: Join, memory: WorkerBuffers, facts: dict[str, Any]) -> Reply | None:
        self.joins.append(join)
        return self.replies.pop(0)

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        self.losses.append(push.loss)
        self.timings.append(timing)
        return self.replies.pop(0)

    def report(self, figures: dict[str, float]) -> None:
        raise AssertionError(f"the loop measures nothing: {figures}")

    def close(self) -> None:
        raise AssertionError("the caller closes it")


def reply(serial: int, **fields: Any) -> Reply:
    return Reply(1, 0, serial, serial, 10 + serial, **fields)


def loop_of(config: RunConfig) -> WorkerLoop:
    task = CountingTask()
    return WorkerLoop(LocalWorker(task, task, Join(1, 0)), config)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("last", [reply(2, finished=True), None], ids=["over", "server gone"])
def test_a_worker_pushes_once_per_reply_until_the_last(last: Reply | None) -> None:
    transport = Scripted([reply(0), reply(1), last])
    loop = loop_of(replace(CONFIG, delay=None))
    assert loop.run(transport, {}) is last
    assert transport.joins == [Join(1, 0)]
    assert transport.losses == [10.0, 11.0]


def test_a_worker_without_a_server_pushes_nothing() -> None:
    transport = Scripted([None])
    assert loop_of(CONFIG).run(transport, {}) is None and not transport.losses


def test_a_worker_sleeps_for_its_own_delay_once_per_local_step(slept: list[float]) -> None:
    transport = Scripted([reply(0), reply(1, steps=4, lr=0.1), reply(2, finished=True)])
    loop_of(CONFIG).run(transport, {})
    assert slept == [3.0, 12.0]
    assert transport.losses == [10.0, 4.0]


def test_the_wait_ends_when_the_reply_arrives_even_if_its_step_begins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "process_time", lambda: 2 * now)
    timer = StepTimer(replace(CONFIG, delay=None), 0)
    now = 101.0
    assert timer.end(100.0, 200.0, 0, 0) == Timing(2.0, 1.0, 0.0)
    now = 104.0
    timer.arrived()
    now = 110.0
    assert timer.end(109.0, 218.0, 1, 0) == Timing(2.0, 1.0, 3.0)
