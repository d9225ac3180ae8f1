"""The lab's numbers are the simulator's: the same order of updates, the same weights up to rounding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.data.datasets import Dataset, load, locate
from paceline.errors import UserError
from paceline.settings.resolve import resolve
from paceline.simulation.lab import packing as room
from paceline.simulation.lab.batch import RunBatch
from paceline.simulation.lab.packing import memory_of
from paceline.simulation.lab.run import LabTimes, images_of, run_rows
from tests.support.lab_runs import row_of, silent, simulated_server
from tests.support.rings import long_but


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load(locate("fashion-mnist-sample", None))


CASES = [
    ("lenet5", "async", 3, "sgd"),
    pytest.param("lenet5", "sync", 3, "sgd", marks=pytest.mark.real),
    pytest.param("lenet5", "backup:1", 3, "sgd", marks=pytest.mark.real),
    pytest.param("lenet5", "bounded:1", 3, "sgd", marks=pytest.mark.real),
    pytest.param("lenet5", "async", 2, "adam", marks=pytest.mark.real),
    ("cnn", "async", 2, "sgd"),
    pytest.param("cnn", "sync", 2, "adam", marks=pytest.mark.real),
]


@pytest.mark.long
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
        warmup=0.0,  # close to the initial weights many units are at the kink of their ReLU
    )
    configs = [resolve(dataclasses.replace(settings, seed=seed)) for seed in (0, 1)]
    family = RunBatch([row_of(config, dataset) for config in configs], images_of(dataset, True, torch.device("cpu")))
    assert family.advance(10_000) == updates
    for found, config in zip(family.weights, configs, strict=True):
        expected = simulated_server(config, dataset).weights
        moved = (expected - make_task(config, dataset).initial()).norm()
        assert (found - expected).norm() < 2e-3 * moved


RULES = [
    "plain",
    "damped",
    "gap",
    "compensated",
    "dana",
    "dana-slim",
    "cached",
    "ringleader",
    "ringmaster:3",
    "buffered:3",
    "foresight-cached",
    "foresight",
    "plain-early",
    "foresight-fair",
    "auto",
]


@pytest.mark.parametrize("strategy", ["async", pytest.param("bounded:2", marks=pytest.mark.real)])
@pytest.mark.parametrize("rule", long_but(["foresight"], RULES))
def test_every_rule_equals_the_simulators(dataset: Dataset, rule: str, strategy: str) -> None:
    """Over some 50 updates, workers that finish early and the running mean of the weights included."""
    if rule == "ringmaster:3" and strategy != "async":
        pytest.skip("ringmaster answers every push at once")
    dataset = shortened(dataset, 100, 10)
    settings = RunConfig(
        dataset="fashion-mnist-sample",
        strategy=strategy,
        workers=4,
        rule=rule,
        average="on",
        momentum=0.5,
        lr=0.01,
        epochs=2.0,
        epoch_mode="own",
        batch_size=4,
        speeds="lognormal:1s,.5",
    )
    configs = [resolve(dataclasses.replace(settings, seed=seed)) for seed in (0, 2)]  # 1 meets a kink of the loss
    found = list(run_rows(configs, dataset, torch.device("cpu"), lambda text, share: None))
    assert min(one.result["updates"] for one in found) >= 50
    for one in found:
        expected = simulated_server(one.config, dataset)
        moved = (expected.weights - make_task(one.config, dataset).initial()).norm()
        assert (one.live - expected.weights).norm() < 1e-4 * moved
        assert (one.weights - expected.evaluated).norm() < 1e-4 * moved
        assert one.result["dropped_pushes"] == expected.dropped


@pytest.mark.parametrize("optimizer", ["adam", "lars"])
def test_rounds_and_other_optimizers_equal_the_simulators(dataset: Dataset, optimizer: str) -> None:
    dataset = shortened(dataset, 120, 10)
    settings = RunConfig(
        dataset="fashion-mnist-sample",
        strategy="sync",
        workers=3,
        optimizer=optimizer,
        average="20",
        weight_decay=0.001,
        batch_size=4,
        steps=15,
    )
    (found,) = run_rows([resolve(settings)], dataset, torch.device("cpu"), lambda text, share: None)
    expected = simulated_server(found.config, dataset)
    moved = (expected.weights - make_task(found.config, dataset).initial()).norm()
    assert (found.live - expected.weights).norm() < 2e-3 * moved
    assert (found.weights - expected.evaluated).norm() < 2e-3 * moved


def shortened(dataset: Dataset, num_train: int, num_test: int) -> Dataset:
    return dataclasses.replace(
        dataset,
        train_images=dataset.train_images[:num_train],
        train_labels=dataset.train_labels[:num_train],
        test_images=dataset.test_images[:num_test],
        test_labels=dataset.test_labels[:num_test],
    )


@pytest.mark.long
def test_rows_of_unequal_length_end_when_they_should(dataset: Dataset) -> None:
    """A family goes on without those that have ended; each row is what it is alone."""
    dataset = shortened(dataset, 600, 200)
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


@pytest.mark.long
def test_rows_take_turns_where_there_is_no_room_for_all(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into families that wait for each other, the results are the same."""
    dataset = shortened(dataset, 200, 50)
    settings = RunConfig(
        dataset="fashion-mnist-sample", strategy="async", workers=2, batch_size=8, steps=6, rule="plain"
    )
    configs = [resolve(dataclasses.replace(settings, seed=seed)) for seed in range(5)]
    device, spent, cramped = torch.device("cpu"), LabTimes(), LabTimes()
    wanted = {one.config.seed: one.weights for one in run_rows(configs, dataset, device, silent, spent)}
    each = memory_of([row_of(configs[0], dataset)], device)
    monkeypatch.setattr(room, "CPU_MEMORY", 2.5 * each)
    for one in run_rows(configs, dataset, device, silent, cramped):
        assert torch.allclose(one.weights, wanted[one.config.seed], atol=1e-6)
    assert (spent.num_batches, cramped.num_batches) == (1, 3)
    assert "split to fit memory" in cramped.line() and "split" not in spent.line()
    monkeypatch.setattr(room, "CPU_MEMORY", 0.5 * each)
    with pytest.raises(UserError, match=r"one run of lenet5 with 2 workers needs about .* use fewer workers"):
        list(run_rows(configs, dataset, device, silent))
