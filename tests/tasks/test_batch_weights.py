"""A mean loss over tokens: wherever batches are averaged, each counts by its tokens, not by its sentences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.assembly.run import make_join, make_server, make_worker, work_of
from paceline.config import RunConfig
from paceline.core.messages import Push, Reply
from paceline.core.worker import LocalWorker
from paceline.errors import UserError
from paceline.interfaces import Batch
from paceline.runtimes.ring.ddp import SampleWeightedLoader
from paceline.runtimes.scripts.standalone import InProcessClient
from paceline.settings.resolve import resolve
from paceline.studies.landscape.losses import Losses
from paceline.tasks.step import StepSettings
from paceline.tasks.supervised import SupervisedTask
from paceline.transports.protocol import Timing

PADDING, WORDS, LENGTH, LR = 0, 11, 9, 0.5


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def num_tokens(targets: Tensor) -> Tensor:
    return (targets != PADDING).sum()


def sentences(count: int) -> tuple[Tensor, Tensor]:
    """Short sentences first and long ones last, so that batches have very different numbers of tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
    lengths = 1 + torch.arange(count) * LENGTH // count
    return ids, ids.masked_fill(torch.arange(LENGTH) >= lengths[:, None], PADDING)


def language_task(count: int = 40, weight: Any = num_tokens) -> SupervisedTask:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS))
    return paceline.Task(model, token_loss, sentences(count), sentences(count), weight=weight)


def gradient_of(task: SupervisedTask, inputs: Tensor, targets: Tensor) -> Tensor:
    """Plain autograd over all these sentences at the initial weights, flat."""
    flat = torch.zeros(task.layout.size)
    model = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS))
    model.load_state_dict(task.flat.state_dict(task.initial(), None))
    token_loss(model(inputs), targets).backward()
    for name, view in task.layout.views(flat).items():
        gradient = dict(model.named_parameters())[name].grad
        assert gradient is not None
        view.copy_(gradient)
    return flat


def config_of(**settings: Any) -> RunConfig:
    given = {"strategy": "sync", "workers": 2, "batch_size": 5, "lr": LR, "momentum": 0.0, "task": "a:b", **settings}
    return resolve(RunConfig(**given))


def test_sync_of_two_workers_is_the_mean_over_all_their_tokens() -> None:
    config, task = config_of(), language_task()
    work = work_of(task, config)
    server, workers = make_server(config, task, work), dict[int, LocalWorker]()
    start = server.weights.clone()
    for number in range(2):
        join = make_join(config, work, number, 0)
        workers[number] = make_worker(config, language_task(), work, join)
        for reply in server.handle(join).replies:
            server.send_weights(reply, workers[reply.worker].memory)
            workers[reply.worker].pending = reply
    for worker in workers.values():
        push = worker.push()
        assert push is not None
        server.handle(push)
    rows = [torch.from_numpy(work.batches(worker, config).indices(0)) for worker in range(2)]
    tokens = [int(num_tokens(task.train[1][part])) for part in rows]
    assert len(rows[0]) == len(rows[1]) and tokens[0] != tokens[1], "the case must hold uneven token counts"
    together = torch.cat(rows)
    expected = start - LR * gradient_of(task, task.train[0][together], task.train[1][together])
    assert server.samples == 10, "budgets go by samples"
    torch.testing.assert_close(server.weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_batch_in_parts_is_the_mean_over_its_tokens(accumulate: int) -> None:
    task = language_task()
    task.configure_step(StepSettings(accumulate=accumulate))
    gradient = torch.zeros(task.layout.size)
    task.bind(task.initial(), gradient, torch.zeros(task.state_size))
    inputs, targets = task.train
    loss = task.gradient(Batch(inputs, targets, len(inputs), 1))
    torch.testing.assert_close(gradient, gradient_of(task, inputs, targets), rtol=1e-5, atol=1e-6)
    assert loss == pytest.approx(token_loss(task.model(inputs), targets).item(), rel=1e-5)


def test_evaluations_and_landscapes_average_over_tokens() -> None:
    task = language_task(1203)  # three batches of an evaluation
    inputs, targets = task.train
    expected = token_loss(task.model(inputs), targets).item()
    assert task.evaluate(task.initial(), None, task.train).loss == pytest.approx(expected, rel=1e-5)
    losses = Losses(task, task.train, 1203)
    losses._batch = 100
    assert losses([(task.initial(), None)]).item() == pytest.approx(expected, rel=1e-5)


def test_ranks_weigh_their_losses_by_tokens() -> None:
    config, task = config_of(), language_task()
    work = work_of(task, config)
    factors, tokens = [], []
    for worker in range(2):
        loader = task.loader(work.batches(worker, config), config.seed, worker)
        batch = SampleWeightedLoader(loader, task, work, config, worker).batch(1)
        factors.append(task.loss_weight)
        tokens.append(float(num_tokens(batch.targets)))
        assert batch.weight == tokens[-1]
    assert factors == pytest.approx([2 * count / sum(tokens) for count in tokens]) and factors[0] != factors[1]


@pytest.mark.parametrize("value", [0, math.nan, -3, math.inf])
def test_a_weight_that_is_no_count_is_refused_in_one_line(value: float) -> None:
    task = language_task(weight=lambda targets: value)
    with pytest.raises(UserError, match=r"^weight\(targets\) returned .* for a batch of 40 samples: return how many"):
        task.evaluate(task.initial(), None, task.train)


def test_captured_parts_are_refused() -> None:
    with pytest.raises(UserError, match="--capture --accumulate"):
        language_task().configure_step(StepSettings(capture=True, accumulate=2))


def test_an_own_loop_says_the_weight_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, exchange = list[float | None](), InProcessClient.exchange

    def noted(self: InProcessClient, push: Push, timing: Timing) -> Reply | None:
        weights.append(push.weight)
        return exchange(self, push, timing)

    monkeypatch.setattr(InProcessClient, "exchange", noted)
    with paceline.join(RunConfig(strategy="classic", steps=2)) as session:
        model, loader = session.prepare(nn.Linear(3, 1), torch.ones(8, 3), batch_size=4)
        for number, inputs in enumerate(loader):
            loss = model(inputs).mean()
            loss.backward()
            if not number:
                with pytest.raises(UserError, match=r"weight=0\): give how many items"):
                    session.step(loss, weight=0)
            session.step(loss, weight=torch.tensor(7) if number else None)
    assert weights == [None, 7.0]
