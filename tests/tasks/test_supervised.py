"""The supervised task: gradients by address, and evaluation that leaves everything as it was."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.assembly.run import work_of
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.data.datasets import Dataset
from paceline.data.sampler import Batches
from paceline.errors import UserError
from paceline.models.dropout import AddressedDropout
from paceline.settings.resolve import resolve
from paceline.tasks.supervised import Normalise, SupervisedTask

pytestmark = pytest.mark.long  # left to `make test`


class OwnDropout(nn.Module):
    """A model with torch's own dropout as well as the addressed one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.torch_dropout, self.addressed = nn.Dropout(0.4), AddressedDropout(0.3, layer=1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.addressed(self.torch_dropout(F.relu(self.first(inputs)))))


def small_task() -> SupervisedTask:
    """The same task in every process."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    data = torch.randn(30, 6, generator=generator), torch.randint(0, 3, (30,), generator=generator)
    return SupervisedTask(OwnDropout(), F.cross_entropy, data, data)


def digest_of(task: SupervisedTask, numbers: list[int]) -> dict[int, str]:
    """A hash of batch and gradient for each address, asked for in this order."""
    weights, gradient = task.initial(), torch.zeros(task.layout.size)
    task.bind(weights, gradient, torch.zeros(task.state_size))
    loader = task.loader(Batches(torch.arange(30).numpy(), 4, 5, 2), 5, 2)
    found = {}
    for number in numbers:
        batch = loader.batch(number)
        loss = task.gradient(batch)
        content = batch.inputs.numpy().tobytes() + batch.targets.numpy().tobytes() + gradient.numpy().tobytes()
        found[number] = hashlib.sha256(content + f"{batch.key} {loss!r}".encode()).hexdigest()
    return found


def test_a_gradient_is_a_function_of_its_address_in_any_order_of_asking() -> None:
    forwards = digest_of(small_task(), [0, 1, 2, 9, 30])
    torch.rand(11)
    assert digest_of(small_task(), [30, 2, 9, 0, 1, 1]) == forwards
    assert len(set(forwards.values())) == len(forwards)


@pytest.mark.parametrize("hash_seed", ["4242"])
def test_a_gradient_is_the_same_in_another_process(hash_seed: str) -> None:
    script = (
        "import torch; torch.set_num_threads(1)\n"
        f"from {__name__} import digest_of, small_task\n"
        "print(sorted(digest_of(small_task(), [9, 0, 2]).items()))\n"
    )
    folders = [str(Path(__file__).parents[2]), str(Path(paceline.__file__).parent.parent)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(folders)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(sorted(digest_of(small_task(), [0, 2, 9]).items()))


def test_the_published_net_is_back_in_training_with_dropout_on_after_an_evaluation(
    make_dataset: Callable[..., Dataset],
) -> None:
    """A published parameter server called eval() once and trained without dropout ever after."""
    config = resolve(RunConfig(strategy="classic", model="cnn", batch_size=4, threads=1))
    task = make_task(config, make_dataset(20, 10))
    weights, gradient = task.initial(), torch.zeros(task.layout.size)
    task.bind(weights, gradient, torch.zeros(0))
    batch = task.loader(work_of(task, config).batches(0, config), config.seed, 0).batch(0)
    task.gradient(batch)
    before = gradient.clone()
    assert task.test is not None
    first, second = task.evaluate(weights, None, task.test), task.evaluate(weights, None, task.test)
    assert first == second
    assert all(module.training for module in task.model.modules())
    task.gradient(batch)
    assert torch.equal(gradient, before)
    task.model.eval()
    task.gradient(batch)
    assert not torch.equal(gradient, before), "with dropout off the gradient must differ, or this test shows nothing"


def test_a_module_the_user_put_in_evaluation_mode_stays_there() -> None:
    task = small_task()
    task.model.torch_dropout.eval()  # type: ignore[union-attr]
    task.evaluate(task.initial(), None, task.train)
    assert [module.training for module in task.model.modules()] == [True, True, True, False, True]


def test_evaluation_counts_every_sample_once_by_class() -> None:
    task = small_task()
    scores = task.evaluate(task.initial(), None, task.train)
    model = task.model.eval()
    outputs = model(task.train[0])
    right = outputs.argmax(1) == task.train[1]
    assert (scores.correct, scores.total) == (int(right.sum()), 30)
    assert scores.loss == pytest.approx(F.cross_entropy(outputs, task.train[1]).item(), rel=1e-6)
    for number, accuracy in enumerate(scores.per_class):
        members = task.train[1] == number
        assert accuracy == pytest.approx(100 * right[members].float().mean().item(), abs=1e-4)


def test_evaluation_of_more_than_one_batch_and_of_some_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(1203, 6, generator=generator), torch.randint(0, 3, (1203,), generator=generator)
    task = small_task()
    whole = task.evaluate(task.initial(), None, data)
    rows = torch.arange(0, 1203, 2)
    half = task.evaluate(task.initial(), None, data, rows)
    other = task.evaluate(task.initial(), None, data, torch.arange(1, 1203, 2))
    assert (whole.total, half.total) == (1203, 602)
    assert half.correct + other.correct == whole.correct
    assert half.loss * 602 + other.loss * 601 == pytest.approx(whole.loss * 1203, rel=1e-5)


def test_targets_that_are_no_classes_give_a_loss_and_no_accuracy() -> None:
    data = torch.randn(10, 3), torch.randn(10, 1)
    task = SupervisedTask(nn.Linear(3, 1), F.mse_loss, data)
    scores = task.evaluate(task.initial(), None, data)
    assert scores.per_class == ()
    assert scores.loss > 0


def test_unequal_inputs_and_targets_are_refused() -> None:
    with pytest.raises(UserError, match="9 inputs but 10 targets"):
        SupervisedTask(nn.Linear(3, 1), F.mse_loss, (torch.randn(9, 3), torch.randn(10, 1)))


def test_bytes_are_normalised_by_channel() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = [0.1, 0.5, 0.9], [0.2, 0.3, 0.4]
    expected = (images / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(Normalise(mean, std)(images), expected, rtol=1e-5, atol=1e-6)


def test_the_seed_fixes_the_initial_weights(make_dataset: Callable[..., Dataset]) -> None:
    dataset = make_dataset(20)
    first = make_task(RunConfig(seed=1), dataset).initial()
    assert torch.equal(make_task(RunConfig(seed=1), dataset).initial(), first)
    assert not torch.equal(make_task(RunConfig(seed=2), dataset).initial(), first)
