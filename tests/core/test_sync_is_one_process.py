"""The backbone: sync with n workers is one plain loop that averages the same n batches in worker order, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.assembly.core import make_model
from paceline.assembly.run import make_join, make_server, make_worker, work_of
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.core.messages import Reply
from paceline.core.server import Server
from paceline.core.worker import LocalWorker
from paceline.data.datasets import Dataset
from paceline.settings.resolve import resolve

MOMENTUM, LR = 0.9, 0.05


def sync_config(workers: int, batch_size: int = 8, shard_weights: list[float] | None = None) -> RunConfig:
    return resolve(
        RunConfig(
            strategy="sync", workers=workers, batch_size=batch_size, lr=LR, momentum=MOMENTUM, epochs=50.0, threads=1,
            shard_weights=shard_weights, seed=3,
        )
    )  # fmt: skip


def deliver(server: Server, instances: dict[int, LocalWorker], replies: tuple[Reply, ...]) -> None:
    for reply in replies:
        server.updater.reply_weights(reply.worker, instances[reply.worker].memory.weights)
        instances[reply.worker].pending = reply


def train_in_sync(config: RunConfig, dataset: Dataset, rounds: int) -> dict[str, Tensor]:
    """Server and seats, the pushes of a round in an order that changes from round to round."""
    task = make_task(config, dataset)
    work = work_of(task, config)
    server = make_server(config, task, work)
    instances: dict[int, LocalWorker] = {}
    for worker in range(config.workers or 1):
        join = make_join(config, work, worker, 0)
        instances[worker] = make_worker(config, make_task(config, dataset), work, join)
        deliver(server, instances, server.handle(join).replies)
    for number in range(rounds):
        order = sorted(instances, key=lambda worker: (worker + number) % len(instances))
        pushes = [instances[worker].push() for worker in order]
        for push in pushes:
            assert push is not None
            deliver(server, instances, server.handle(push).replies)
    assert server.version == rounds
    return task.flat.state_dict(server.weights, None)


class PlainLoop:
    """One model, torch autograd, and momentum written out; nothing of Paceline's core.

    A multiply and an add are one operation of torch here as they are there: a processor may round the pair only once.
    """

    def __init__(self, config: RunConfig, dataset: Dataset) -> None:
        task = make_task(config, dataset)
        self.model = make_model("lenet5", dataset.info.image_shape)
        self.model.load_state_dict(task.flat.state_dict(task.initial(), None))
        self.parameters = dict(self.model.named_parameters())
        self.velocity = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        work = work_of(task, config)
        self.batches = [work.batches(worker, config) for worker in range(config.workers or 1)]
        self.images, self.labels = task.train
        assert task.transform is not None
        self.transform: Callable[[Tensor], Tensor] = task.transform

    def batch(self, worker: int, number: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(self.batches[worker].indices(number))
        return self.transform(self.images[rows]), self.labels[rows]

    def gradient(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = F.nll_loss(self.model(inputs), labels)
        return dict(zip(self.parameters, torch.autograd.grad(loss, list(self.parameters.values())), strict=True))

    @torch.no_grad()
    def step(self, gradient: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            self.velocity[name] = torch.addcmul(gradient[name], self.velocity[name], torch.tensor(MOMENTUM))
            parameter.addcmul_(self.velocity[name], torch.tensor(LR), value=-1.0)

    def averaged(self, number: int) -> dict[str, Tensor]:
        """The mean over samples of every worker's batch `number`, summed in worker order; equal batches count alike."""
        batches = [self.batch(worker, number) for worker in range(len(self.batches))]
        total = sum(len(labels) for _, labels in batches)
        if len({len(labels) for _, labels in batches}) == 1:
            gradients = [self.gradient(*batch) for batch in batches]
            return {name: sum(g[name] for g in gradients) / len(batches) for name in self.parameters}  # type: ignore[misc]
        parts = [(self.gradient(*batch), len(batch[1]) / total) for batch in batches]
        mean = {name: value * parts[0][1] for name, value in parts[0][0].items()}
        for gradient, share in parts[1:]:
            for name in mean:
                mean[name] = mean[name].add(gradient[name], alpha=share)
        return mean

    def whole(self, number: int) -> dict[str, Tensor]:
        """The gradient of all workers' batches `number` as one batch."""
        batches = [self.batch(worker, number) for worker in range(len(self.batches))]
        return self.gradient(torch.cat([inputs for inputs, _ in batches]), torch.cat([labels for _, labels in batches]))


@pytest.mark.parametrize(
    ("workers", "num_train", "shard_weights"),
    [(1, 20, None), (2, 40, None), (2, 61, [1.0, 2.0]), (3, 75, None), (3, 90, [1.0, 2.0, 1.5])],
)
def test_sync_is_a_plain_loop_over_the_same_batches_bit_for_bit(
    make_dataset: Callable[..., Dataset], workers: int, num_train: int, shard_weights: list[float] | None
) -> None:
    config, dataset = sync_config(workers, shard_weights=shard_weights), make_dataset(num_train)
    found = train_in_sync(config, dataset, rounds=10)
    loop = PlainLoop(config, dataset)
    sizes = {len(loop.batches[worker].indices(number)) for worker in range(workers) for number in range(10)}
    assert len(sizes) > 1, "the case must hold batches of unequal size"
    for number in range(10):
        loop.step(loop.averaged(number))
    for name, expected in loop.model.state_dict().items():
        assert torch.equal(found[name], expected), f"{name} differs by {(found[name] - expected).abs().max()}"


@pytest.mark.parametrize("workers", [2, 3])
def test_sync_is_closely_one_batch_n_times_as_large(make_dataset: Callable[..., Dataset], workers: int) -> None:
    config, dataset = sync_config(workers, shard_weights=[1.0, 2.0, 1.5][:workers]), make_dataset(70)
    found = train_in_sync(config, dataset, rounds=4)
    loop = PlainLoop(config, dataset)
    for number in range(4):
        loop.step(loop.whole(number))
    for name, expected in loop.model.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)
