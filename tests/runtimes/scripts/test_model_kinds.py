"""Other types, recomputed activations, compiled models and autocast: one worker trains as plain torch does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.config import RunConfig
from paceline.runs.result import trained_tensors
from paceline.runtimes.scripts.session import Session
from paceline.tasks.script_model import ScriptModel
from tests.support.own_loops import OneServer

ALONE = RunConfig(strategy="classic")


class Net(nn.Module):
    """Norms, dropout that is seeded by the batch, and a block that may be computed again in backward."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        hidden = checkpoint(self.block, hidden, use_reentrant=False) if self.recomputes else self.block(hidden)
        return self.last(hidden)


def data(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def net(make: Callable[[], Any] = Net) -> Any:
    torch.manual_seed(1)
    return make()


Forward = Callable[[Any, Tensor, Tensor], Tensor]


def plain_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def autocast_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    assert found.dtype == torch.bfloat16
    return (found.float() - y).square().mean()


def both(make: Callable[[], Any], loss_of: Forward) -> tuple[Any, Any, list[float]]:
    """A model through a session and one of a plain loop, after the same batches; and the losses of the first."""
    models = net(make), net(make)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    session = paceline.join(ALONE)
    returned, _, loader = session.prepare(models[0], optimizers[0], loader, epochs=2)
    assert returned is models[0]
    losses: list[float] = []
    for _ in range(2):
        for x, y in loader:
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                optimizer.step()
                if not number:
                    losses.append(loss.item())
    assert session.iteration == 12
    session.finish()
    return *models, losses


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    found, expected = ours.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_recomputed_activations_are_those_of_plain_torch() -> None:
    ours, plain, _ = both(lambda: Net(recomputes=True), plain_loss)
    assert_same(ours, plain)


def test_a_block_with_dropout_is_recomputed_with_the_same_draws() -> None:
    """Dropout of a session is seeded by the batch: what backward computes again must draw the same."""

    def make() -> Any:
        model = Net(recomputes=True)
        model.block.append(nn.Dropout(0.5))
        return model

    models = net(make), net(make)
    models[1].recomputes = False
    found: list[list[Tensor]] = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        *_, loader = paceline.join(ALONE).prepare(model, optimizer, DataLoader(data(), batch_size=8), epochs=1)
        found.append([])
        for x, y in loader:
            optimizer.zero_grad()
            plain_loss(model, x, y).backward()
            found[-1].append(model.block[0].weight.grad.clone())
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert_same(*models)


def test_autocast_computes_as_in_plain_torch() -> None:
    ours, plain, _ = both(Net, autocast_loss)
    assert_same(ours, plain)
    assert ours.first.weight.dtype == torch.float32


@pytest.mark.long
def test_a_compiled_model_is_trained_as_in_plain_torch() -> None:
    ours, plain, losses = both(lambda: torch.compile(Net(), backend="eager"), plain_loss)
    assert_same(ours, plain)
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_a_model_that_is_compiled_after_prepare_is_trained_too() -> None:
    models = net(), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    *_, loader = paceline.join(ALONE).prepare(models[0], optimizers[0], DataLoader(data(), batch_size=8), epochs=1)
    compiled = torch.compile(models[0], backend="eager")
    for x, y in loader:
        for model, optimizer in ((compiled, optimizers[0]), (models[1], optimizers[1])):
            optimizer.zero_grad()
            plain_loss(model, x, y).backward()
            optimizer.step()
    assert_same(*models)


def parallel() -> Any:
    return nn.DataParallel(Net())


def test_a_model_in_a_wrapper_is_trained_as_in_plain_torch() -> None:
    ours, plain, _ = both(parallel, plain_loss)
    assert_same(ours, plain)


def typed_loop(session: Session, dtype: torch.dtype, lr: float = 0.05) -> tuple[Any, list[float]]:
    model = net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    *_, loader = session.prepare(model, optimizer, DataLoader(data(), batch_size=8, shuffle=True), epochs=6)
    losses = []
    for _ in range(6):
        for x, y in loader:
            optimizer.zero_grad()
            loss = plain_loss(model, x.to(dtype), y.to(dtype))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_other_types_train_on_float32_weights_of_the_server(dtype: torch.dtype, tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=1, rule="plain", average="none")
    model, losses = typed_loop(one.session(0), dtype)
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6])
    (facts,) = one.facts
    name = str(dtype).removeprefix("torch.")
    (note,) = facts["notes"]
    assert (
        note == f"parameter first.weight and 9 more: {name} in the workers; the server keeps and saves float32 weights"
    )
    assert one.server is not None and one.server.weights.dtype == torch.float32
    saved = trained_tensors(one.server, ScriptModel(facts["layout"], facts["state_layout"], facts["sources"], {}))
    assert saved.keys() == {n for n, _ in model.named_parameters()} | {"norm.running_mean", "norm.running_var"}
    for part, parameter in model.named_parameters():
        assert saved[part].dtype == torch.float32 and parameter.dtype == dtype
        assert torch.equal(saved[part].to(dtype), parameter.detach()), "the model computes on what is saved"


def test_a_float64_model_is_plain_torch_but_for_the_rounding_of_its_weights() -> None:
    model, _ = typed_loop(paceline.join(ALONE), torch.float64)
    plain = net().double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.5)
    session = paceline.join(ALONE)  # for the same batches
    _, loader = session.prepare(nn.Linear(1, 1), DataLoader(data(), batch_size=8, shuffle=True), epochs=6)
    for _ in range(6):
        for x, y in loader:
            optimizer.zero_grad()
            plain_loss(plain, x.double(), y.double()).backward()
            optimizer.step()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0.0, atol=1e-5)


def test_small_steps_of_a_bfloat16_model_are_not_lost() -> None:
    """A step of 1e-4 is below what bfloat16 can add to 1; the float32 weights of the server add them up."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    paceline.join(ALONE).prepare(model, optimizer)
    for _ in range(200):
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert abs(model.weight.item() - 0.98) < 0.005


def test_a_float32_model_has_no_note(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=1, rule="plain", average="none")
    typed_loop(one.session(0), torch.float32)
    assert one.facts[0]["notes"] == []


def test_a_model_on_another_device_trains_on_one_copy_of_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: the copy stays on the CPU, and everything else is as there."""
    from paceline.runtimes.scripts import bound_model

    def trained() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        session = paceline.join(RunConfig(strategy="classic"))
        model, optimizer = session.prepare(model, optimizer)
        for number in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 3, generator=torch.Generator().manual_seed(number))).square().sum().backward()
            optimizer.step()
        session.finish()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    expected = trained()
    monkeypatch.setattr(bound_model, "copy_on_device", lambda parameters, *buffers: tuple(b.clone() for b in buffers))
    found = trained()
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
