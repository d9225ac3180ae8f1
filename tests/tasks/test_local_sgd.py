"""Local steps over the star: against plain loops by hand, with schedules inside, quotas, and the worker's own state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.assembly.core import make_model
from paceline.assembly.run import make_join, make_server, make_steps, make_worker, work_of
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.core.messages import Reply, SetLocalSteps
from paceline.core.server import Server, restore_server, server_facts
from paceline.core.worker import LocalBatches, LocalWorker
from paceline.data.datasets import Dataset
from paceline.settings.resolve import resolve

MakeDataset = Callable[..., Dataset]
LR = 0.05


def local_config(strategy: str, **settings: Any) -> RunConfig:
    fixed: dict[str, Any] = {"workers": 2, "batch_size": 8, "lr": LR, "epochs": 50.0, "threads": 1, "seed": 3}
    return resolve(RunConfig(strategy=strategy, **{**fixed, **settings}))


class InRounds:
    """A server and its seats, driven round by round."""

    def __init__(self, config: RunConfig, dataset: Dataset) -> None:
        self.task = make_task(config, dataset)
        self.work = work_of(self.task, config)
        self.server: Server = make_server(config, self.task, self.work)
        self.instances: dict[int, LocalWorker] = {}
        self.replies: list[Reply] = []
        for worker in range(config.workers or 1):
            join = make_join(config, self.work, worker, 0)
            self.instances[worker] = make_worker(config, make_task(config, dataset), self.work, join)
            self._deliver(self.server.handle(join).replies)

    def _deliver(self, replies: tuple[Reply, ...]) -> None:
        for reply in replies:
            self.replies.append(reply)
            self.server.send_weights(reply, self.instances[reply.worker].memory)
            self.instances[reply.worker].pending = reply

    def rounds(self, number: int) -> Tensor:
        for _ in range(number):
            pushes = [instance.push() for instance in self.instances.values()]
            for push in pushes:
                assert push is not None
                self._deliver(self.server.handle(push).replies)
        return self.server.weights


def by_hand(
    config: RunConfig, dataset: Dataset, steps: int, rounds: int, outer: dict[str, Any], lrs: list[float] | None = None
) -> dict[str, Tensor]:
    """DiLoCo's algorithm 1 (arXiv 2311.08105) with torch's own optimizers, inner ones kept from round to round."""
    task = make_task(config, dataset)
    start = task.flat.state_dict(task.initial(), None)
    workers = range(config.workers or 1)
    models = [make_model("lenet5", dataset.info.image_shape) for _ in workers]
    lr = config.lr or 0.0
    inner: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr, config.momentum) for model in models]
    if config.optimizer == "adam":
        inner = [torch.optim.Adam(model.parameters(), lr) for model in models]
    main = make_model("lenet5", dataset.info.image_shape)
    main.load_state_dict(start)
    outer_optimizer = torch.optim.SGD(main.parameters(), **outer)
    batches = [work_of(task, config).batches(worker, config) for worker in workers]
    assert task.transform is not None
    for round_ in range(rounds):
        counts = []
        for model, optimizer, local_state in zip(models, inner, batches, strict=True):
            model.load_state_dict(main.state_dict())
            optimizer.param_groups[0]["lr"] = lrs[round_] if lrs is not None else lr
            rows = [torch.from_numpy(local_state.indices(round_ * steps + step)) for step in range(steps)]
            counts.append(sum(map(len, rows)))
            for some in rows:
                optimizer.zero_grad()
                F.nll_loss(model(task.transform(task.train[0][some])), task.train[1][some]).backward()
                optimizer.step()
        for name, parameter in main.named_parameters():
            drifts = [(parameter - dict(model.named_parameters())[name]).detach() for model in models]
            parameter.grad = sum(d * (c / sum(counts)) for d, c in zip(drifts, counts, strict=True))  # type: ignore[assignment]
        outer_optimizer.step()
    return main.state_dict()


def close(found: InRounds, expected: dict[str, Tensor]) -> None:
    named = found.task.flat.state_dict(found.server.weights, None)
    for name, tensor in expected.items():
        torch.testing.assert_close(named[name], tensor, rtol=1e-4, atol=1e-5)


MEAN = {"lr": 1.0}
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
PUBLISHED: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_warmup": 0}


@pytest.mark.parametrize(
    ("strategy", "outer", "optimizer", "momentum"),
    [
        ("local:3", MEAN, "sgd", 0.0),
        ("local:3", MEAN, "sgd", 0.9),
        ("diloco:3", NESTEROV, "sgd", 0.9),
        ("diloco:2", NESTEROV, "adam", 0.9),
    ],
)
def test_rounds_of_local_steps_are_a_plain_loop_by_hand(
    make_dataset: MakeDataset, strategy: str, outer: dict[str, Any], optimizer: str, momentum: float
) -> None:
    lr = LR if optimizer == "sgd" else 0.001
    published = PUBLISHED if outer is NESTEROV else {}
    config = local_config(strategy, optimizer=optimizer, momentum=momentum, lr=lr, **published)
    found, dataset = InRounds(config, make_dataset(61)), make_dataset(61)
    found.rounds(5)
    close(found, by_hand(config, dataset, int(strategy[-1]), 5, outer))


def test_one_local_step_without_momentum_is_closely_sync(make_dataset: MakeDataset) -> None:
    """Closely: a drift is the difference of weights before and after, rounded where a gradient is not."""
    dataset = make_dataset(61)
    local = InRounds(local_config("local:1", momentum=0.0), dataset).rounds(8)
    sync = InRounds(local_config("sync", momentum=0.0), dataset).rounds(8)
    torch.testing.assert_close(local, sync, rtol=1e-5, atol=1e-6)


def test_schedules_and_warm_up_go_on_inside_the_steps(make_dataset: MakeDataset) -> None:
    settings = {"schedule": "cosine", "warmup": 0.2, "epochs": 6.0, "scale_lr": "2"}
    config, dataset = local_config("diloco:3", momentum=0.9, **settings, **PUBLISHED), make_dataset(64)
    found = InRounds(config, dataset)
    found.rounds(6)
    lrs = [reply.lr for reply in found.replies if reply.worker == 0]
    assert lrs[0] < lrs[1] < lrs[2] and lrs[3] > lrs[4] > lrs[5] and max(lrs) < 2 * LR
    assert found.server.lr == 0.7
    close(found, by_hand(config, dataset, 3, 6, NESTEROV, lrs))


def test_what_was_sent_stays_as_it_was_and_own_state_changes_in_place(make_dataset: MakeDataset) -> None:
    config, dataset = local_config("diloco:2", momentum=0.9), make_dataset(40)
    task = make_task(config, dataset)
    computing, loader = make_steps(config, task, work_of(task, config), 0)
    assert set(computing.local_state) == {"velocity"} and not task.local_state
    weights, drift = task.initial(), torch.zeros(task.layout.size)
    computing.bind(weights, drift, torch.zeros(task.state_size))
    before, velocity = weights.clone(), computing.local_state["velocity"]
    stretch = LocalBatches(loader, 0, 2, LR)
    computing.gradient(stretch)
    assert stretch.samples == 16
    assert torch.equal(weights, before) and drift.any() and velocity.any()
    first, kept = drift.clone(), velocity.clone()
    computing.gradient(LocalBatches(loader, 0, 2, LR))
    assert not torch.equal(drift, first), "the momentum of the first push is still there"
    velocity.zero_()
    computing.gradient(LocalBatches(loader, 0, 2, LR))
    assert torch.equal(drift, first) and torch.equal(velocity, kept), "a push is a function of what `local_state` holds"


def test_the_last_steps_of_a_quota_are_fewer(make_dataset: MakeDataset) -> None:
    config = local_config("local:3", epoch_mode="own", epochs=1.0, batch_size=10)
    found = InRounds(config, make_dataset(80))  # 4 batches each
    found.rounds(2)
    assert [(reply.batch, reply.steps, reply.finished) for reply in found.replies if reply.worker == 0] == [
        (0, 3, False),
        (3, 1, False),
        (4, 0, True),
    ]
    assert found.server.samples == 80 and found.server.finished


def test_a_worker_told_to_make_fewer_steps_counts_for_fewer_samples(make_dataset: MakeDataset) -> None:
    found = InRounds(local_config("local:4", momentum=0.0), make_dataset(640))
    found.server.handle(SetLocalSteps(1, 2))
    found.rounds(2)
    assert found.server.samples == 2 * 4 * 8 + (4 + 2) * 8
    assert [(r.batch, r.steps) for r in found.replies if r.worker == 1] == [(0, 4), (4, 2), (6, 2)]
    again = InRounds(local_config("local:4", momentum=0.0), make_dataset(640)).server
    restore_server(again, server_facts(found.server), found.server.weights, found.server.rule_state)
    assert server_facts(again) == server_facts(found.server) and again.last_answer(1) == found.replies[-1]
