"""What a user's own loop does, in one process with the server."""

from __future__ import annotations

import io
import math
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.config import RunConfig
from paceline.core.messages import Push
from paceline.core.server import AppliedUpdate
from paceline.core.server.updates import Updater
from paceline.errors import Diverged, UserError
from paceline.runs.result import why_diverged
from paceline.runtimes.scripts.serving.requests import FirstPushes
from paceline.runtimes.scripts.session import Session, TrainingOver
from paceline.settings.resolve import resolve
from tests.support.own_loops import OneServer

ALONE = RunConfig(strategy="classic")  # a server in this process; without settings nothing is served


def data(count: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


class Loop:
    """A plain loop with a schedule that halves the learning rate at each step."""

    def __init__(self, one: OneServer, worker: int, incarnation: int = 0, epochs: int | None = 1) -> None:
        torch.manual_seed(1)
        model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        self.scheduler: Any = LambdaLR(self.optimizer, lambda step: 0.5**step)
        self.session = one.session(worker, incarnation)
        loader = DataLoader(data(), batch_size=4, shuffle=True)
        self.model, _, _, self.loader = self.session.prepare(
            model, self.optimizer, self.scheduler, loader, epochs=epochs
        )
        self.batches = iter(self.loader)
        self.seen: list[Tensor] = []

    def step(self) -> None:
        self.train(*next(self.batches))

    def train(self, x: Tensor, y: Tensor) -> None:
        self.seen.append(x)
        self.optimizer.zero_grad()
        loss_of(self.model, x, y).backward()
        self.optimizer.step()
        self.scheduler.step()


def test_each_worker_follows_its_own_schedule(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=2, rule="plain", average="none")
    loops = [Loop(one, worker) for worker in range(2)]
    assert one.server is not None
    server, applied, last = one.server, [], one.server.weights.clone()

    def note(update: AppliedUpdate) -> None:
        """The learning rate, from how far the weights have moved."""
        (pushed,) = update.pushes
        moved = (last - server.weights).norm() / pushed.update.norm()
        applied.append((pushed.worker, round(moved.item(), 5)))
        last.copy_(server.weights)

    server.on_update = note
    for worker in (0, 0, 0, 1, 0, 1):
        loops[worker].step()
    assert applied == [(0, 0.25), (0, 0.125), (0, 0.0625), (1, 0.25), (0, 0.03125), (1, 0.125)]


def test_after_a_dropped_push_the_loader_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    """A pass has as many steps as the loader says, and the schedule one value for each of them."""
    one = OneServer(tmp_path, strategy="async", workers=2, rule="ringmaster:1", average="none")
    loops = [Loop(one, worker) for worker in range(2)]
    loops[1].step()
    for batch in loops[0].batches:
        loops[0].train(*batch)
    seen = loops[0].seen
    assert len(seen) == 4 == len(loops[0].loader) == loops[0].session.iteration
    assert not any(torch.equal(one, other) for one, other in pairwise(seen))
    assert one.server is not None and one.server.dropped == 1
    assert loops[0].optimizer.param_groups[0]["lr"] == 0.25 * 0.5**4


def test_a_worker_that_was_killed_goes_on_with_its_next_batch_and_learning_rate(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": "async", "workers": 2, "rule": "plain", "average": "none"}
    whole, broken = (OneServer(tmp_path / name, **settings) for name in ("whole", "broken"))
    undisturbed, first = Loop(whole, 0, epochs=3), Loop(broken, 0, epochs=3)
    for _ in range(3):
        undisturbed.step()
        first.step()
    broken.lose(0)
    second = Loop(broken, 0, incarnation=1, epochs=3)
    assert second.session.iteration == 3 and second.optimizer.param_groups[0]["lr"] == 0.25 * 0.5**3
    undisturbed.step()
    second.step()
    assert torch.equal(second.seen[0], undisturbed.seen[3]) and torch.equal(
        second.model.weight, undisturbed.model.weight
    )
    assert second.optimizer.param_groups[0]["lr"] == undisturbed.optimizer.param_groups[0]["lr"]


def test_passes_that_a_predecessor_has_finished_end_at_once_and_step_no_schedule(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=2, rule="plain", average="none")

    def loop(incarnation: int, stop_after: int) -> list[tuple[int, int, float]]:
        """A schedule by epoch; where each step was, and its learning rate."""
        found: list[tuple[int, int, float]] = []
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        session = one.session(0, incarnation)
        _, _, _, loader = session.prepare(
            model, optimizer, scheduler, DataLoader(data(), batch_size=4, shuffle=True), epochs=5
        )
        for epoch in range(5):
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                found.append((epoch, number, optimizer.param_groups[0]["lr"]))
                optimizer.step()
                if len(found) == stop_after:
                    return found
            scheduler.step()
        return found

    assert loop(0, 10)[-1] == (2, 1, 0.0625)  # a pass of one worker has 4 batches
    one.lose(0)
    found = loop(1, 100)
    assert found[0] == (2, 0, 0.0625) and len(found) == 10, "the loop counts from 0 again, its loader does not"
    assert {epoch: lr for epoch, _, lr in found} == {2: 0.0625, 3: 0.03125, 4: 0.015625}


def session_of(worker: int = 0, workers: int = 1, folder: Path = Path("unused"), **settings: Any) -> Session:
    """A session that has not prepared anything."""
    one = object.__new__(OneServer)
    one.config = resolve(RunConfig(strategy="async", workers=workers, task="script:own", **settings))
    return one.session(worker)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [7, 10, 100])
def test_parts_are_neighbours_cover_everything_and_differ_by_one(length: int, workers: int) -> None:
    sessions = [session_of(worker, workers) for worker in range(workers)]
    whole = list(range(length))
    lists = [session.split(whole) for session in sessions]
    assert list(chain(*lists)) == whole and max(map(len, lists)) - min(map(len, lists)) <= 1
    arrays = [session.split(np.arange(length)) for session in sessions]
    assert np.array_equal(np.concatenate(arrays), np.arange(length)) and isinstance(arrays[0], np.ndarray)
    rows = torch.arange(2.0 * length).reshape(length, 2)
    tensors = [session.split(rows) for session in sessions]
    assert torch.equal(torch.cat(tensors), rows) and list(map(len, tensors)) == list(map(len, lists))
    assert session_of(0, workers).split("x" * length) == "x" * len(lists[0])


def kind_of(value: Any) -> str:
    return type(value).__name__


@pytest.mark.parametrize("what", [7, {1, 2, 3}, {"a": 1, "b": 2}, iter([1, 2]), torch.tensor(1.0), None], ids=kind_of)
def test_what_has_no_neighbours_cannot_be_split(what: Any) -> None:
    with pytest.raises(UserError, match=r"cannot be cut into parts .*give a tensor, an array or a list") as error:
        session_of(0, 2).split(what)
    assert "\n" not in str(error.value)


def test_a_part_without_items_is_refused_in_every_worker_that_would_have_it() -> None:
    for worker, items in ((0, 0), (1, 1), (2, 1)):
        if items:
            assert len(session_of(worker, 3).split([1, 2])) == items
            continue
        with pytest.raises(UserError, match="2 items for 3 workers: use fewer workers"):
            session_of(worker, 3).split([1, 2])


class Drawing:
    """A loop without a loader, which draws from a generator of the session and from the global ones."""

    def __init__(self, session: Session, seed: int | None = None) -> None:
        self.session, self.seed = session, seed
        model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, _ = session.prepare(model, self.optimizer)
        self.generator = session.rng()
        self.drawn: list[float] = []
        self.everywhere: list[tuple[float, float, float]] = []

    def step(self) -> None:
        self.everywhere.append((torch.rand(()).item(), random.random(), float(np.random.rand())))
        if self.seed is not None:
            torch.manual_seed(self.seed)  # as scripts do
            random.seed(self.seed)
            np.random.seed(self.seed)
        self.drawn.append(torch.rand((), generator=self.generator).item())
        self.optimizer.zero_grad()
        self.model(torch.full((2, 4), self.drawn[-1])).sum().backward()
        self.optimizer.step()


def test_draws_differ_by_worker_and_step_and_come_again_in_a_second_run(tmp_path: Path) -> None:
    runs: list[list[Drawing]] = []
    for name, seed in (("one", None), ("two", 5), ("three", 6)):
        one = OneServer(tmp_path / name, strategy="async", workers=2, rule="plain", average="none", seed=3)
        runs.append([])
        for worker in range(2):
            loop = Drawing(one.session(worker), seed)
            runs[-1].append(loop)
            for _ in range(4):
                loop.step()
    first = runs[0]
    drawn = [value for loop in first for value in loop.drawn]
    assert len(set(drawn)) == 8
    for draws in zip(*(draws for loop in first for draws in loop.everywhere), strict=True):
        assert len(set(draws)) == 8, "every global generator is seeded by worker and step"
    for run in runs[1:]:
        assert [loop.drawn for loop in run] == [loop.drawn for loop in first]
        assert [loop.everywhere for loop in run] == [loop.everywhere for loop in first], "whatever the script seeds"


def test_another_seed_draws_otherwise_and_two_generators_differ(tmp_path: Path) -> None:
    one, other = (
        OneServer(tmp_path / str(seed), strategy="async", workers=1, rule="plain", average="none", seed=seed)
        for seed in (1, 2)
    )
    loops = Drawing(one.session(0)), Drawing(other.session(0))
    second = loops[0].session.rng()
    assert torch.rand((), generator=second).item() != torch.rand((), generator=loops[0].session.rng()).item()
    for loop in loops:
        loop.step()
        loop.step()
    assert not set(loops[0].drawn) & set(loops[1].drawn)


def test_a_worker_that_was_killed_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=1, rule="plain", average="none")
    first = Drawing(one.session(0))
    for _ in range(4):
        first.step()
    again = OneServer(tmp_path / "again", strategy="async", workers=1, rule="plain", average="none")
    begun = Drawing(again.session(0))
    begun.step()
    begun.step()
    again.lose(0)
    resumed = Drawing(again.session(0, incarnation=1))
    resumed.step()
    resumed.step()
    assert begun.drawn + resumed.drawn == first.drawn


def small(session: Session, **length: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer that the session has prepared, without data."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer, **length)
    return model, optimizer


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("config", [ALONE, None], ids=["served", "plain"])
def test_a_loop_without_a_loader_that_goes_on_after_its_steps_ends_the_script(
    config: RunConfig | None, capsys: pytest.CaptureFixture[str]
) -> None:
    session = paceline.join(config)
    model, optimizer = small(session, steps=3)
    for number in range(3):
        assert not session.finished and session.iteration == number
        one_step(model, optimizer)
    assert session.finished and session.iteration == 3
    with pytest.raises(TrainingOver) as over:
        one_step(model, optimizer)
    assert over.value.code == 0 and "leave the loop when session.finished is true" in capsys.readouterr().err


@pytest.mark.parametrize("config", [ALONE, None], ids=["served", "plain"])
def test_a_loop_over_a_loader_ends_by_itself_after_its_steps(config: RunConfig | None) -> None:
    session = paceline.join(config)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = session.prepare(model, optimizer, DataLoader(data(), batch_size=8), steps=6)
    steps = 0
    for _ in range(10):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            steps += 1
    assert steps == 6 and session.finished
    session.finish()


@pytest.mark.parametrize("config", [ALONE, None], ids=["served", "plain"])
def test_an_endless_loop_over_a_loader_ends_the_script_after_its_steps(
    config: RunConfig | None, capsys: pytest.CaptureFixture[str]
) -> None:
    session = paceline.join(config)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = session.prepare(model, optimizer, DataLoader(data(), batch_size=8), steps=6)

    def cycle() -> Iterator[Any]:
        while True:
            yield from loader

    batches = cycle()
    for _ in range(6):
        next(batches)
        one_step(model, optimizer)
    assert session.finished
    with pytest.raises(TrainingOver) as over:
        next(batches)
    assert over.value.code == 0 and "training is over, and the loop goes on" in capsys.readouterr().err


def test_a_next_that_finds_no_batch_in_a_finished_pass_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = OneServer(tmp_path, strategy="async", workers=2, rule="plain", average="none")

    def begun(incarnation: int) -> tuple[Session, nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = one.session(0, incarnation)
        loader = session.prepare(model, optimizer, DataLoader(data(), batch_size=4))[-1]
        return session, model, optimizer, loader

    session, model, optimizer, loader = begun(0)
    for _ in chain.from_iterable([loader] * 3):
        one_step(model, optimizer)
    session.explain_missing_batch()  # it is in its newest pass: the error is the script's own
    one.lose(0)
    session, _, _, loader = begun(1)
    iterator = iter(loader)
    next(iterator)  # a look
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(SystemExit) as failed:
        session.explain_missing_batch()
    assert failed.value.code == 1 and "draw batches in a loop 'for batch in loader'" in capsys.readouterr().err


class Seen:
    """Trains one epoch after another, and looks at a batch before each, as the tutorial of DDP does."""

    def __init__(self, one: OneServer, incarnation: int) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.session = one.session(0, incarnation)
        loader = DataLoader(data(), batch_size=4, shuffle=True)
        self.loader = self.session.prepare(self.model, self.optimizer, loader)[-1]
        self.looks: list[Tensor] = []
        self.trained: list[Tensor] = []

    def train(self, epochs: int, last: int | None = None) -> Seen:
        for _ in range(epochs):
            self.looks.append(next(iter(self.loader))[0].clone())
            for x, y in self.loader:
                self.trained.append(x.clone())
                self.optimizer.zero_grad()
                (self.model(x) - y).square().mean().backward()
                self.optimizer.step()
                if self.session.iteration == last:
                    return self
        return self


def test_a_worker_that_returns_may_look_at_a_batch_of_a_finished_pass(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": "async", "workers": 2, "rule": "plain", "average": "none"}
    whole = Seen(OneServer(tmp_path / "whole", **settings), 0).train(3)
    one = OneServer(tmp_path / "killed", **settings)
    batches = len(whole.trained) // 3
    killed = Seen(one, 0).train(3, last=batches + 1)
    one.lose(0)
    back = Seen(one, 1).train(3)
    assert all(map(torch.equal, [*killed.trained, *back.trained], whole.trained))
    assert len(killed.trained) + len(back.trained) == len(whole.trained), "no batch twice, none left out"
    assert len(back.looks) == 3 and all(map(torch.equal, back.looks, whole.looks))


def test_a_worker_that_returns_does_not_train_on_a_look_again(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=2, rule="plain", average="none")
    first = Seen(one, 0).train(2)
    one.lose(0)
    again = Seen(one, 1)
    assert first.session.iteration == again.session.iteration > 0
    x, _ = next(iter(again.loader))
    with pytest.raises(UserError, match=r"goes on in a later pass, and next\(...\) began a finished one") as error:
        again.model(x / 2.0)
    assert "\n" not in str(error.value)


def test_without_a_length_the_loop_decides() -> None:
    with paceline.join(ALONE) as session:
        model, optimizer = small(session)
        for _ in range(5):
            one_step(model, optimizer)
        assert not session.finished
    assert session.finished and session.iteration == 5
    with pytest.raises(UserError, match=r"a step after session.finish\(\)"):
        one_step(model, optimizer)


def test_a_loop_that_never_steps_is_told_so() -> None:
    session = paceline.join(ALONE)
    model = nn.Linear(4, 1)
    session.prepare(model, DataLoader(data(), batch_size=8))
    with torch.no_grad():
        model.weight.add_(1.0)
    with pytest.raises(UserError, match="no step has reached the server: weights changed by hand are not seen"):
        session.finish()


@pytest.mark.parametrize("uses", [False, True])
def test_a_loop_that_reads_the_loader_it_had_before_is_told_so(uses: bool, capsys: pytest.CaptureFixture[str]) -> None:
    session = paceline.join(ALONE)
    model = nn.Linear(4, 1)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(), batch_size=8)
    prepared = session.prepare(model, optimizer, loader)[-1]
    for _ in prepared if uses else loader:
        one_step(model, optimizer)
    said = capsys.readouterr().err
    assert ("every worker reads all data" not in said) == uses and said.count("\n") == (not uses)


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        ([None] * 4, "the first step found no gradient: nothing is trained without loss.backward()"),
        ([0.0] * 4, "the gradients of the first 3 steps are all 0: nothing is trained"),
        ([0.0, 0.0, 1.0, 0.0], ""),
        ([1.0, None, None, None], ""),
    ],
    ids=["none", "zeros", "some zeros", "one"],
)
def test_a_loop_without_backward_is_told_so_once(
    factors: list[float | None], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    session, model = one_worker(), nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for factor in factors:
        optimizer.zero_grad()
        if factor is not None:
            (factor * model(torch.ones(2, 1)).sum()).backward()
        optimizer.step()
    said = capsys.readouterr().err
    assert said.count("\n") == bool(says) and said.startswith(says)


def test_a_frozen_parameter_that_the_script_averages_belongs_in_no_optimizer() -> None:
    session = paceline.join(ALONE)
    model = nn.Linear(4, 1)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    model.bias.data = model.bias.data * 0.5
    with pytest.raises(UserError, match=r"parameter bias was changed .* leave it out of the optimizer") as error:
        one_step(model, optimizer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("asks", [False, True])
def test_a_loop_that_counts_from_its_start_again_after_a_restart_is_told_so(
    asks: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = OneServer(tmp_path, strategy="async", workers=2, rule="plain", average="none")
    for incarnation in range(2):
        session = one.session(0, incarnation)
        model, optimizer = small(session)
        for _ in range(session.iteration if asks else 0, 5):
            one_step(model, optimizer)
            if session._made == 3 and not incarnation:
                break
        one.lose(0)
    said = capsys.readouterr().err
    assert ("worker 0 goes on after 3 steps" in said and "starts at session.iteration" in said) == (not asks)


def test_weights_that_become_infinite_are_a_divergence_and_no_change_by_hand() -> None:
    session = paceline.join(ALONE)
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    session.prepare(model, optimizer)
    with pytest.raises(Diverged):
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.tensor([[100.0, -100.0]])) * 100.0).sum().square().backward()
            optimizer.step()


def test_without_an_optimizer_gradients_are_cleared_after_a_step() -> None:
    session = paceline.join(RunConfig(strategy="classic", lr=0.1))
    model, batches = session.prepare(nn.Linear(4, 1), data(), batch_size=8)
    x, y = next(iter(batches))
    session.backward(loss_of(model, x, y))
    session.step()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_only_one_of_the_two_steps() -> None:
    session = paceline.join(ALONE)
    small(session)
    with pytest.raises(UserError, match=r"the optimizer that you passed .* steps: call its step"):
        session.step()


def test_several_models_are_trained_by_one_optimizer() -> None:
    torch.manual_seed(2)
    pairs = [[nn.Linear(4, 3), nn.Linear(3, 1)] for _ in range(2)]
    for model, other in zip(*pairs, strict=True):
        other.load_state_dict(model.state_dict())
    optimizers = [torch.optim.Adam([p for model in pair for p in model.parameters()], lr=0.1) for pair in pairs]
    session = paceline.join(ALONE)
    found = session.prepare(*pairs[0], optimizers[0])
    assert found == (*pairs[0], optimizers[0])
    for x, y in DataLoader(data(), batch_size=8):
        for (first, last), optimizer in zip(pairs, optimizers, strict=True):
            optimizer.zero_grad()
            (last(torch.tanh(first(x))) - y).square().mean().backward()
            optimizer.step()
    for model, other in zip(*pairs, strict=True):
        assert torch.equal(model.weight, other.weight)


def test_parameters_outside_the_model_are_trained_too() -> None:
    scales = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    models = [nn.Linear(4, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        torch.optim.SGD([*model.parameters(), scale], lr=0.1) for model, scale in zip(models, scales, strict=True)
    ]
    paceline.join(ALONE).prepare(models[0], optimizers[0])
    for x, y in DataLoader(data(), batch_size=8):
        for model, scale, optimizer in zip(models, scales, optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) * scale - y).square().mean().backward()
            optimizer.step()
    assert torch.equal(scales[0], scales[1]) and scales[0].item() != 1.0


def test_a_worker_reads_the_optimizers_state_that_all_have_made(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=2, rule="plain", average="none")
    pairs = [small_adam(one.session(worker)) for worker in range(2)]
    for worker in (0, 1, 1):
        one_step(*pairs[worker])
    states = [optimizer.state_dict()["state"] for _, optimizer in pairs]
    assert states[0][0]["step"].item() == states[1][0]["step"].item() == 3.0
    assert torch.equal(states[0][0]["exp_avg"], states[1][0]["exp_avg"])


def small_adam(session: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    return model, optimizer


def test_a_loop_that_saves_its_optimizer_goes_on_though_the_rule_has_its_own_momentum(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=2, rule="foresight", average="none")
    pairs = [small(one.session(worker)) for worker in range(2)]
    for worker in (0, 1):
        one_step(*pairs[worker])
    saved = pairs[0][1].state_dict()
    assert saved["param_groups"][0]["lr"] == 0.1
    buffer = saved["state"][0]["momentum_buffer"]
    assert buffer.shape == pairs[0][0].weight.shape and buffer.any()
    one_step(*pairs[0])


def plain_updater() -> Updater:
    """An updater without a codec."""
    return SimpleNamespace(decoder=None)  # type: ignore[return-value]


def first_push(worker: int, *update: float) -> Push:
    return Push(worker, 0, 0, 0, 1, 0.5, torch.tensor(update), torch.empty(0))


def test_two_workers_that_push_the_same_gradient_first_train_on_the_same_data() -> None:
    first = FirstPushes(3)
    first.check(first_push(2, 1.0, 2.0), plain_updater())
    first.check(first_push(0, 1.0, 2.5), plain_updater())
    with pytest.raises(UserError, match="workers 2 and 1 pushed the same gradient first") as error:
        first.check(first_push(1, 1.0, 2.0), plain_updater())
    assert "session.split(data)" in str(error.value) and "session.rng()" in str(error.value)
    assert "\n" not in str(error.value)


def test_gradients_of_zeros_tell_nothing_and_later_pushes_are_not_compared() -> None:
    first = FirstPushes(2)
    first.check(first_push(0, 0.0, 0.0), plain_updater())
    first.check(first_push(1, 0.0, 0.0), plain_updater())
    first.check(first_push(0, 1.0, 2.0), plain_updater())
    first.check(first_push(1, 1.0, 2.0), plain_updater())
    alike = FirstPushes(3)
    alike.check(first_push(0, 0.0, 0.0), plain_updater())
    alike.check(first_push(1, 1.0, 2.0), plain_updater())
    alike.check(first_push(0, 1.0, 2.0), plain_updater())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_tells_nothing_of_the_data(broken: float) -> None:
    """It is the same NaN in all workers, whatever they train on."""
    first = FirstPushes(2)
    first.check(first_push(0, broken, 1.0), plain_updater())
    first.check(first_push(1, broken, 1.0), plain_updater())


@pytest.mark.parametrize(
    ("strategy", "before"), [("async", 1), ("async", 0), ("async-local:2", 1), ("async-local:2", 0)]
)
def test_advice_after_a_divergence_names_what_the_script_can_change(tmp_path: Path, strategy: str, before: int) -> None:
    """Flags of the optimizer are refused for a script that brings one."""
    one = OneServer(tmp_path, strategy=strategy, workers=2)
    loops = [Loop(one, worker) for worker in range(2)]
    for loop in loops * (2 * before):
        loop.step()
    for loop in loops * 2:
        loop.train(torch.full((4, 4), math.nan), torch.zeros(4, 1))
    assert one.server is not None and one.server.divergence is not None
    why = why_diverged(replace(loops[0].session.config, task="script:loop"), one.server)
    assert not re.search(r"--(lr|momentum|clip|warmup)", why) and "not told" not in why
    if before or strategy != "async":
        assert "lower lr (now 0.25) in the script, or call torch.nn.utils.clip_grad_norm_(" in why
    else:
        assert "No step was made yet, so look for a NaN or infinity in the script's inputs" in why


def test_a_loop_without_prepared_data_is_told_that_it_is_not_divided(tmp_path: Path) -> None:
    shared, alone, split = (
        OneServer(tmp_path / name, strategy="async", workers=workers)
        for name, workers in (("shared", 2), ("alone", 1), ("split", 2))
    )
    small(shared.session(0))
    small(alone.session(0))
    divided = split.session(0)
    divided.split(list(range(8)))
    small(divided)
    (note,) = shared.facts[0]["notes"]
    assert "no loader or data set" in note and "every worker trains on all of it" in note
    assert alone.facts[0]["notes"] == split.facts[0]["notes"] == []


def test_a_loss_is_reported_as_it_is_without_a_warning_of_torch() -> None:
    session = one_worker()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.report(loss=torch.ones((), requires_grad=True) * 2, right=torch.tensor(True), count=3)
    assert session._env.transport.figures == {"loss": 2.0, "right": 1.0, "count": 3.0}  # type: ignore[attr-defined]


def one_worker() -> Session:
    return paceline.join(RunConfig(strategy="classic"))


def test_each_optimizer_counts_the_samples_of_its_own_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    session = one_worker()
    *_, loader = session.prepare(first, second, *optimizers, DataLoader(TensorDataset(torch.ones(7, 1)), batch_size=4))
    assert session._loop is not None
    pushed: list[tuple[int, int]] = []
    push = session._loop.push

    def count(number: int, samples: int, *rest: Any) -> Any:
        pushed.append((number, samples))
        return push(number, samples, *rest)

    monkeypatch.setattr(session._loop, "push", count)
    for (x,) in loader:
        for model, optimizer in zip((first, second), optimizers, strict=True):
            model(x).sum().backward()
            optimizer.step()
    with torch.no_grad():
        assert sum(len(x) for (x,) in loader) == 7
    first(torch.ones(1, 1)).sum().backward()
    optimizers[0].step()
    assert pushed == [(0, 4), (1, 4), (0, 3), (1, 3), (0, 0)], (
        "a pass without gradients counts nothing, nor does a second step"
    )
    session.finish()
    with pytest.raises(UserError, match=r"^a loop over a prepared loader after session.finish\(\): this worker has"):
        list(loader)
    with torch.no_grad():
        assert sum(len(x) for (x,) in loader) == 7, "after the end, a pass that only measures is whole"


@pytest.mark.parametrize("config", [None, ALONE])
def test_a_length_in_steps_and_in_epochs_is_refused(config: RunConfig | None) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"^session.prepare\(..., epochs=2, steps=10\): leave out one of the two$"):
        paceline.join(config).prepare(model, optimizer, DataLoader(data()), epochs=2, steps=10)


def test_a_model_that_averages_by_itself_is_refused() -> None:
    model = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = nn.Linear(4, 1)
    with pytest.raises(UserError, match=r"^session.prepare\(...\): the model is a DistributedDataParallel; Paceline"):
        one_worker().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_prepare_without_anything_asks_for_the_model() -> None:
    with pytest.raises(UserError, match=r"^session.prepare\(\): the first thing is the model, an nn.Module$"):
        one_worker().prepare()


def test_weights_that_are_replaced_before_the_end_are_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    session = one_worker()
    model, optimizer = session.prepare(model, optimizer)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    model.load_state_dict(best)
    with pytest.raises(UserError, match="was changed or moved"):
        session.finish()


def test_a_buffer_that_is_replaced_reaches_the_server() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)
            self.register_buffer("centre", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.centre = self.centre + 1.0
            return self.linear(x)

    model = Centred()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = one_worker()
    model, optimizer = session.prepare(model, optimizer)
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert session._loop is not None and session._loop.bound.slot.state[0] == 3.0
    session.finish()
    assert model.centre.item() == 3.0


def test_a_lazy_module_is_refused_in_one_line() -> None:
    model = nn.LazyLinear(1)
    with pytest.raises(UserError, match="has no shape yet"):
        one_worker().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_state_of_a_scheduler_can_be_saved_after_prepare() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = one_worker().prepare(model, optimizer, scheduler)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    scheduler.step()
    saved = io.BytesIO()
    torch.save(scheduler.state_dict(), saved)
    assert scheduler.get_last_lr() == [0.05] and isinstance(scheduler, torch.optim.lr_scheduler.StepLR)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"clip": 1.0}, "--clip 1.0: the script gives session.prepare.* leave it out, and clip in the loop"),
        ({"betas": (0.5, 0.6)}, "--betas .*: the script gives session.prepare.* an optimizer"),
        ({"weight_decay": 0.1}, "--weight-decay 0.1: the script gives"),
        ({"split": "labels"}, "--split labels: the script gives session.prepare.* no data to divide"),
        ({"shard_weights": [1.0]}, "--shard-weights: the script gives session.prepare.* no data to divide"),
        ({"epochs": 3.0}, "--epochs 3, and the script says steps=5: leave out one"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(settings: dict[str, Any], why: str) -> None:
    session, model = paceline.join(RunConfig(strategy="classic", **settings)), nn.Linear(1, 1)
    with pytest.raises(UserError, match=why):
        session.prepare(model, torch.optim.Adam(model.parameters()), steps=5)


@pytest.mark.parametrize("setting", [{"schedule": "cosine"}, {"warmup": 0.1}, {"scale_lr": "2"}])
def test_a_schedule_of_the_server_is_refused_if_the_loop_makes_the_steps(setting: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"strategy local:4 steps with the optimizers of your own loop"):
        paceline.join(RunConfig(strategy="local:4", workers=1, **setting))
    with pytest.raises(UserError, match="--epoch-mode own: your own loop makes its passes itself"):
        paceline.join(RunConfig(strategy="async", workers=1, epoch_mode="own"))
