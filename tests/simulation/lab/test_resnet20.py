"""ResNet-20 in the lab: the simulator's gradients, augmentation, statistics and scores; and runs in several calls."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from paceline.assembly.run import work_of
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.data.datasets import Dataset
from paceline.errors import UserError
from paceline.settings.resolve import resolve
from paceline.simulation.lab import run as lab
from paceline.simulation.lab.batch import RunBatch
from paceline.simulation.lab.evaluation import buffers_of, estimated
from paceline.simulation.lab.run import LabResult, LabTimes, Pause, images_of, run_rows
from tests.conftest import MakeDataset
from tests.support.lab_runs import row_of, silent, simulated_server

CPU = torch.device("cpu")
SETTINGS = RunConfig(
    dataset="cifar10",
    model="resnet20",
    strategy="async",
    workers=3,
    rule="dana",
    average="on",
    lr=0.002,
    weight_decay=1e-4,
    schedule="steps:1,2",
    warmup=0.1,
    batch_size=8,
    steps=4,
    speeds="gamma:1s,.1,.6",
)


@pytest.fixture
def dataset(make_dataset: MakeDataset) -> Dataset:
    """Random images of 8 x 8 in three colours; 50 over 3 workers make batches of unequal size."""
    whole = make_dataset(50, 12, "cifar10")
    parts = {name: getattr(whole, name)[:, :, :8, :8].copy() for name in ("train_images", "test_images")}
    return dataclasses.replace(whole, info=dataclasses.replace(whole.info, image_shape=(3, 8, 8)), **parts)


def train(dataset: Dataset, *configs: RunConfig, pause: Pause | None = None) -> dict[int, LabResult]:
    found = run_rows([resolve(config) for config in configs], dataset, CPU, silent, None, ("test",), pause)
    return {one.config.seed: one for one in found}


@pytest.mark.parametrize("seed", [0, 2])
def test_the_first_gradient_is_torchs(dataset: Dataset, seed: int) -> None:
    config = resolve(dataclasses.replace(SETTINGS, seed=seed))
    row = row_of(config, dataset)
    batch = RunBatch([row], images_of(dataset, True, CPU))
    batch._find_gradients()
    worker = int(row.trace.workers[0, 0])
    task = make_task(config, dataset)
    work = work_of(task, config)
    expected = torch.zeros(row.layout.size)
    task.bind(row.initial.clone(), expected, torch.zeros(task.flat.state_layout.size))
    loss = task.gradient(task.loader(work.batches(worker, config), config.seed, worker).batch(0))
    assert batch.losses.item() == pytest.approx(loss, rel=1e-5)
    assert (batch._gradient[0] - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    "changes",
    [{}, {"strategy": "sync", "rule": "auto", "nesterov": True, "average": "none"}],
    ids=["async", "sync"],
)
def test_a_few_updates_equal_the_simulators(dataset: Dataset, changes: dict[str, object]) -> None:
    """Few, because a ReLU at its kink turns rounding into another gradient (seed 0 meets one); two runs at once."""
    settings = dataclasses.replace(SETTINGS, steps=6, **changes)  # type: ignore[arg-type]
    for one in train(dataset, *(dataclasses.replace(settings, seed=seed) for seed in (1, 4))).values():
        expected, task = simulated_server(one.config, dataset), make_task(one.config, dataset)
        moved = (expected.weights - task.initial()).norm()
        assert (one.live - expected.weights).norm() < 2e-4 * moved
        assert (one.weights - expected.evaluated).norm() < 2e-4 * moved


def test_statistics_and_scores_are_those_of_the_task(dataset: Dataset) -> None:
    (one,) = train(dataset, dataclasses.replace(SETTINGS, validation=0.2)).values()
    task = make_task(one.config, dataset)
    work_of(task, one.config)
    assert task.test is not None
    for weights, buffers, prefix in ((one.weights, one.buffers, ""), (one.live, one.live_buffers, "live_")):
        state = task.estimated(weights, torch.zeros(task.flat.state_layout.size))
        expected = task.state_dict(weights, state)
        assert {*buffers, *(p.name for p in one.layout.parameters)} == set(expected)
        for name, tensor in buffers.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
        scores = task.evaluate(weights, state, task.test)
        assert one.result[f"{prefix}test_loss"] == pytest.approx(scores.loss, rel=1e-3)
    assert not torch.equal(one.buffers["stem.norm.running_mean"], one.live_buffers["stem.norm.running_mean"])
    assert buffers_of("lenet5", estimated(RunConfig(), one.layout, one.weights, images_of(dataset, True, CPU))) == {}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_runs_in_several_calls_are_those_of_one(
    dataset: Dataset, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whichever of them end first, and the files go with the runs."""
    monkeypatch.setattr(lab, "CHUNK", 3)
    usual = dataclasses.replace(SETTINGS, strategy=strategy, rule="auto", model="resnet20")
    configs = [dataclasses.replace(usual, seed=seed, steps=steps) for seed, steps in ((0, 5), (1, 5), (2, 8))]
    whole, found, calls = train(dataset, *configs), dict[int, LabResult](), 0
    while len(found) < len(configs):
        spent, left = LabTimes(), [resolve(config) for config in configs if config.seed not in found]
        for one in run_rows(left, dataset, CPU, silent, spent, ("test",), Pause(tmp_path, at=0.0)):
            found[one.config.seed] = one
        assert spent.num_left == len(configs) - len(found) and bool(spent.num_left) == any(tmp_path.iterdir())
        calls += 1
    assert calls == 3
    for seed, one in whole.items():
        assert torch.equal(one.live, found[seed].live) and torch.equal(one.weights, found[seed].weights)
        assert one.result["test_loss"] == found[seed].result["test_loss"]


def test_a_damaged_state_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "batch-0.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"batch-0\.safetensors is damaged .*: remove it to start its runs again"):
        train(dataset, SETTINGS, pause=Pause(tmp_path))


def test_images_are_augmented_for_models_that_read_them_so(dataset: Dataset) -> None:
    with pytest.raises(UserError, match="the lab augments the images of resnet20 only: add --augment none"):
        train(dataset, dataclasses.replace(SETTINGS, model="lenet5"))
    plain, mirrored, both = (
        next(iter(train(dataset, dataclasses.replace(SETTINGS, augment=ways, steps=1)).values())).live
        for ways in ("none", "mirror", "crop,mirror")
    )
    assert not torch.equal(plain, mirrored) and not torch.equal(mirrored, both)
