"""Simulate the arrival orders of many configs in parallel; configs with equal timing share one."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from numpy.typing import NDArray

from paceline.assembly.task import class_labels, make_task
from paceline.assembly.work import divide_work
from paceline.config import RunConfig, to_toml
from paceline.data.datasets import Dataset
from paceline.settings.rules import rule_of
from paceline.simulation.lab.arrival_order import ArrivalOrder, trace_of
from paceline.simulation.lab.batch import LabRun
from paceline.simulation.lab.inputs import RunInputs, feed_of
from paceline.system.cpu import cores
from paceline.system.process import safe_path
from paceline.tasks.nested import num_samples

PARALLEL_THRESHOLD = 200_000  # minimum pushes to trace in parallel: with fewer, starting processes takes longer
_ANY = RunConfig(rule="plain")
_NOT_TIMES = (
    "model", "optimizer", "momentum", "nesterov", "betas", "weight_decay", "clip", "name", "runs", "rule", "average"
)  # fmt: skip
Traced = tuple[ArrivalOrder, RunInputs, float]  # with the skew of the classes


def traced(configs: list[RunConfig], dataset: Dataset, progress: Callable[[str, float], None]) -> list[LabRun]:
    """Return the runs of all configs, in their order."""
    wanted: dict[str, tuple[RunConfig, int]] = {}
    tasks = [make_task(config, dataset) for config in configs]
    for config, task in zip(configs, tasks, strict=True):
        timing = _timing_settings(config)
        wanted.setdefault(to_toml(timing), (timing, task.layout.size))
    labels = class_labels(tasks[0].train[1], num_samples(tasks[0].train[0]), configs[0])
    found: dict[str, Traced] = {}
    for key, one in zip(wanted, _all_traces(list(wanted.values()), labels), strict=True):
        found[key] = one
        progress(f"tracing {len(found)} of {len(wanted)}", 0.0)
    rows = []
    for config, task in zip(configs, tasks, strict=True):
        trace, feed, skew = found[to_toml(_timing_settings(config))]
        own = dataclasses.replace(trace, lr=trace.lr * np.float32(config.lr or 0.0))
        rows.append(LabRun(config, own, feed, task.initial(), task.layout, skew))
    return rows


def _timing_settings(config: RunConfig) -> RunConfig:
    """Return the config reduced to the settings that determine the arrival order, with lr 1."""
    changes = {name: getattr(_ANY, name) for name in _NOT_TIMES}
    if config.link is not None:
        del changes["model"]  # its bytes take time
    if rule_of(config).traits.drops:
        del changes["rule"]
    return dataclasses.replace(config, **changes, lr=1.0)


def _all_traces(wanted: list[tuple[RunConfig, int]], labels: NDArray[np.int64]) -> Iterator[Traced]:
    size = sum(config.epochs * len(labels) / config.batch_size * (config.workers or 1) for config, _ in wanted)
    if len(wanted) < 2 or size < PARALLEL_THRESHOLD or cores() < 2:
        yield from (_one_trace(config, num_floats, labels) for config, num_floats in wanted)
        return
    context = multiprocessing.get_context("spawn")
    ignore_interrupts = signal.signal, (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(min(cores(), len(wanted)), context, *ignore_interrupts) as pool:
        with safe_path():
            futures = [pool.submit(_one_trace, config, num_floats, labels) for config, num_floats in wanted]
        try:
            yield from (future.result() for future in futures)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _one_trace(config: RunConfig, num_floats: int, labels: NDArray[np.int64]) -> Traced:
    work = divide_work(labels, config)
    trace = trace_of(config, work, num_floats)
    return trace, feed_of(trace, work, config), work.skew
