"""The lab's numbers are the simulator's: the same order of updates, the same weights up to rounding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.assemble import resolve
from paceline.clusters import cluster_of
from paceline.config import RunConfig
from paceline.core.messages import Join
from paceline.core.worker import Seat
from paceline.crew import make_seat, make_server, make_task, work_of
from paceline.data.datasets import Dataset, load, locate
from paceline.lab.family import Family, Row
from paceline.lab.feed import feed_of
from paceline.lab.rows import images_of, run_rows
from paceline.lab.trace import trace_of
from paceline.runtimes.agenda import Agenda
from paceline.runtimes.simulated import Simulation
from paceline.runtimes.unlogged import Unlogged


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load(locate("fashion-mnist-sample", None))


def simulated(config: RunConfig, dataset: Dataset) -> torch.Tensor:
    """The weights that the pure server and workers come to under the simulator."""
    task = make_task(config, dataset)
    work = work_of(task, config)
    sides: list[Unlogged] = []

    def start() -> Unlogged:
        sides.append(Unlogged(make_server(config, task, work)))
        return sides[-1]

    def come(worker: int, incarnation: int) -> Seat:
        return make_seat(config, make_task(config, dataset), work, Join(worker, incarnation, work.quotas[worker]))

    cluster = cluster_of(config, task.layout.size)
    Simulation(Agenda(), cluster, config.workers or 1, come, start).run()
    return sides[-1].server.weights


def row_of(config: RunConfig, dataset: Dataset) -> Row:
    task = make_task(config, dataset)
    work = work_of(task, config)
    trace = trace_of(config, work, task.layout.size)
    return Row(config, trace, feed_of(trace, work, config), task.initial(), task.layout)


CASES = [
    ("lenet5", "async", 3, "sgd"),
    ("lenet5", "sync", 3, "sgd"),
    ("lenet5", "backup:1", 3, "sgd"),
    ("lenet5", "bounded:1", 3, "sgd"),
    ("lenet5", "async", 2, "adam"),
    ("cnn", "async", 2, "sgd"),
    ("cnn", "sync", 2, "adam"),
]


@pytest.mark.parametrize(("model", "strategy", "workers", "optimizer"), CASES)
def test_fifty_updates_equal_the_simulators(
    dataset: Dataset, model: str, strategy: str, workers: int, optimizer: str
) -> None:
    updates = 50 if model == "lenet5" else 12
    settings = RunConfig(
        dataset="fashion-mnist-sample",
        model=model,
        strategy=strategy,
        workers=workers,
        optimizer=optimizer,
        steps=updates,
        batch_size=8,
        speeds="lognormal:1s,.5",
    )
    configs = [resolve(dataclasses.replace(settings, seed=seed)) for seed in (0, 1)]
    family = Family([row_of(config, dataset) for config in configs], images_of(dataset, True, torch.device("cpu")))
    assert family.advance(10_000) == updates
    for found, config in zip(family.weights, configs, strict=True):
        expected = simulated(config, dataset)
        moved = (expected - make_task(config, dataset).initial()).norm()
        assert (found - expected).norm() < 2e-3 * moved


def test_rows_of_unequal_length_end_when_they_should(dataset: Dataset) -> None:
    """A family goes on without those that have ended; each row is what it is alone."""
    train, test = slice(0, 600), slice(0, 200)
    dataset = dataclasses.replace(
        dataset,
        train_images=dataset.train_images[train],
        train_labels=dataset.train_labels[train],
        test_images=dataset.test_images[test],
        test_labels=dataset.test_labels[test],
    )
    settings = RunConfig(
        dataset="fashion-mnist-sample", strategy="async", workers=2, batch_size=8, speeds="lognormal:1s,.5"
    )
    configs = [resolve(dataclasses.replace(settings, steps=steps, seed=steps)) for steps in (9, 4, 14)]
    seen: list[float] = []
    found = list(run_rows(configs, dataset, torch.device("cpu"), lambda text, share: seen.append(share)))
    assert [one.result["updates"] for one in found] == [4, 9, 14]
    for one in found:
        (alone,) = run_rows([one.config], dataset, torch.device("cpu"), lambda text, share: None)
        assert torch.allclose(one.weights, alone.weights, atol=1e-6)
        assert one.result["test_accuracy"] == pytest.approx(alone.result["test_accuracy"], abs=1.0)
        assert one.result["staleness"] == alone.result["staleness"]
    assert max(seen) <= 1.0
