"""Odd models come out of `paceline.train` and of `paceline.join` as they come out of a plain PyTorch loop."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.assembly.run import work_of
from paceline.assembly.task import initial_seed, make_task, seed_generators
from paceline.config import RunConfig
from paceline.runtimes.scripts.bound_model import BoundModel
from paceline.settings.resolve import resolve
from tests.support import odd_models
from tests.support.odd_models import MODELS, token_data

pytestmark = pytest.mark.long  # left to `make test`

SETTINGS: dict[str, Any] = {"strategy": "classic", "lr": 0.2, "momentum": 0.9, "epochs": 3.0, "batch_size": 8}


def trained_plainly(model: nn.Module, batches: list[Any], fills: bool = True) -> dict[str, Tensor]:
    """What everybody writes. With `fills`, a parameter without a gradient has one of zeros, as for the server's own."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(wanted, lr=0.2, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for parameter in wanted:  # torch leaves a parameter alone that got no gradient; its momentum goes on here
            if parameter.grad is None and fills:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return model.state_dict()


def seeded(make: Any) -> nn.Module:
    """The model as a run makes it."""
    seed_generators(initial_seed(RunConfig()))
    model: nn.Module = make()
    return model


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_a_task_is_trained_as_by_a_plain_loop(name: str, tmp_path: Path) -> None:
    ours, plain = MODELS[name]
    result = paceline.train(getattr(odd_models, name), runs=str(tmp_path), quiet=True, **SETTINGS)
    config = resolve(RunConfig(**SETTINGS, task=f"{odd_models.__name__}:{name}"))
    task = make_task(config, None)
    loader = task.loader(work_of(task, config).batches(0, config), config.seed, 0)
    batches = [loader.batch(number) for number in range(result["updates"])]
    expected = trained_plainly(seeded(plain), [(batch.inputs, batch.targets) for batch in batches])
    saved = load_file(Path(result["folder"]) / "weights.safetensors")
    assert_alike(saved, expected)
    model = ours()
    model.load_state_dict(saved, strict=True)
    assert result["num_parameters"] == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("handed", [False, True], ids=["session.step", "optimizer.step"])
@pytest.mark.parametrize("name", MODELS)
def test_a_loop_of_ones_own_trains_as_a_plain_one(name: str, handed: bool) -> None:
    ours, plain = MODELS[name]
    session = paceline.join(RunConfig(**{**SETTINGS, "batch_size": 32}))
    model = seeded(ours)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)
    if handed:
        data = DataLoader(TensorDataset(*token_data()), batch_size=8, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, data, epochs=3)
    else:
        model, loader = session.prepare(model, token_data(), batch_size=8)
    seen = []
    for _ in range(3 if handed else 1):
        for x, y in loader:
            seen.append((x, y))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step() if handed else session.step()
    assert len(seen) == 18 and session.finished and len(loader) == 6
    assert_alike(model.state_dict(), trained_plainly(seeded(plain), seen, fills=not handed))


def familiar(schedule: bool, accumulate: int, kind: str) -> tuple[nn.Module, nn.Module]:
    """A loop with everything people write in one, through a session and without it, over the same batches."""
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01}
    made = {"SGD": {"momentum": 0.9, "nesterov": True}, "Adam": {"betas": (0.8, 0.99)}, "AdamW": {}}[kind]
    models = [seeded(odd_models.Tied) for _ in range(2)]
    optimizers, schedulers = [], []
    for model in models:
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizers.append(getattr(torch.optim, kind)(groups, **options, **made))
        schedulers.append(torch.optim.lr_scheduler.LambdaLR(optimizers[-1], lambda step: min(1.0, step / 7)))
    session = paceline.join(RunConfig(strategy="classic"))
    data = DataLoader(TensorDataset(*token_data(48)), batch_size=8, shuffle=True)
    _, *_, loader = session.prepare(models[0], optimizers[0], schedulers[0], data, epochs=2)
    number = 0
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
                loss = nn.functional.cross_entropy(model(x), y) / accumulate
                session.backward(loss) if model is models[0] else loss.backward()
                if (number + 1) % accumulate == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    if schedule:
                        scheduler.step()
        assert number + 1 == len(loader) == 6
    return models[0], models[1]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_schedules_accumulation_clipping_and_decay_groups_stay_in_the_loop(kind: str, accumulate: int) -> None:
    ours, plain = familiar(schedule=True, accumulate=accumulate, kind=kind)
    assert_alike(ours.state_dict(), plain.state_dict())


def test_a_model_in_another_memory_computes_on_a_copy_there() -> None:
    """Where a GPU is, its memory is not the server's; here parameters of another type have a memory of their own."""
    model = seeded(odd_models.Buffered).double()
    bound = BoundModel([model], dict(model.named_parameters()), 0)
    bound.renew(fully=True)
    x, y = token_data()
    nn.functional.cross_entropy(model(x), y).backward()
    flags = bound.collect()
    assert flags == [float(parameter.grad is not None) for parameter in model.parameters()] and any(flags)
    views = bound.flat.layout.views(bound.slot.update)
    assert torch.equal(views["output.bias"], model.output.bias.grad.float()) and views["output.bias"].any()  # type: ignore
    states = bound.flat.state_layout.views(bound.slot.state)
    assert torch.equal(states["norm.running_mean"], model.norm.running_mean.float())  # type: ignore[operator,union-attr]
    bound.slot.weights.zero_()
    assert model.output.bias.any()  # type: ignore[union-attr,operator]
    bound.renew(fully=True)
    assert not model.output.bias.any() and not views["output.bias"].is_set_to(model.output.bias.grad)  # type: ignore


class Wrapped:
    """Steps an optimizer, and is none."""

    def step(self) -> None: ...


SGD = torch.optim.SGD
MISTAKES: dict[str, tuple[Any, str]] = {
    "nothing": (lambda m, d: (), "the first thing is the model"),
    "no model": (lambda m, d: (d,), r"session.prepare\(TensorDataset, ...\): the first thing is the model"),
    "another model's optimizer": (
        lambda m, d: (m, d, SGD(nn.Linear(1, 1).parameters(), 0.1)),
        "no parameter of the model",
    ),
    "a parameter in two optimizers": (
        lambda m, d: (m, SGD(m.parameters(), 0.1), SGD(m.parameters(), 0.1)),
        "is in two optimizers",
    ),
    "another optimizer's schedule": (
        lambda m, d: (m, SGD(m.parameters(), 0.1), torch.optim.lr_scheduler.StepLR(SGD(m.parameters(), 0.1), 3)),
        "belongs to another optimizer",
    ),
    "a wrapped optimizer": (lambda m, d: (m, Wrapped()), "Wrapped has a step"),
    "a complex parameter": (
        lambda m, d: (m, SGD([*m.parameters(), nn.Parameter(torch.zeros(1, dtype=torch.complex64))], 0.1)),
        r"parameter optimizer0.\d is torch.complex64",
    ),
    "nothing to train": (lambda m, d: (m.requires_grad_(False), d), "nothing to train"),
    "an iterator": (lambda m, d: (m, object()), "has no length or cannot be indexed"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_misfit_is_one_clear_line(what: str) -> None:
    make, message = MISTAKES[what]
    with pytest.raises(paceline.UserError, match=message) as error:
        paceline.join(RunConfig(strategy="classic")).prepare(*make(odd_models.Tied(), TensorDataset(*token_data())))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "length",
    [
        *({"epochs": 0}, {"epochs": -1.0}, {"epochs": float("nan")}, {"epochs": "3"}),
        *({"steps": 0}, {"steps": 2.5}, {"steps": "3"}, {"batch_size": "8"}, {"batch_size": 0}),
    ],
    ids=str,
)
def test_a_length_that_is_none_is_one_clear_line(length: dict[str, Any]) -> None:
    (name,) = length
    with pytest.raises(paceline.UserError, match=rf"{name}=.*: give a positive (whole )?number$"):
        paceline.join(RunConfig(strategy="classic")).prepare(odd_models.Tied(), token_data(), **length)


def test_all_is_prepared_at_once() -> None:
    session = paceline.join(RunConfig(strategy="classic"))
    session.prepare(odd_models.Tied(), token_data())
    with pytest.raises(paceline.UserError, match=r"session.prepare\(...\) was called twice"):
        session.prepare(odd_models.Tied(), token_data())


def test_what_the_script_says_and_the_command_line_says_must_agree() -> None:
    model = odd_models.Tied()
    with pytest.raises(paceline.UserError, match=r"--lr 0.3, and the script itself says 0.1"):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        paceline.join(RunConfig(strategy="classic", lr=0.3)).prepare(model, optimizer, token_data())


def test_steps_and_batches_need_not_go_together() -> None:
    """Steps without a batch, two after one, a pass that is broken off: as in plain torch."""
    models = [seeded(odd_models.Tied) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    session = paceline.join(RunConfig(strategy="classic"))
    data = DataLoader(TensorDataset(*token_data(48)), batch_size=8)
    _, _, loader = session.prepare(models[0], optimizers[0], data)

    def step(times: int, *batches: Any) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(times):
                optimizer.zero_grad()
                for x, y in batches:
                    nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    fixed = token_data(8)
    step(2, fixed)  # before any batch
    batches = iter(loader)
    step(1, next(batches))
    step(2, next(batches), next(batches))
    first = next(iter(loader))[0]  # another pass, without a step, and the last one is not finished
    step(3, fixed)
    assert torch.equal(first, token_data(48)[0][:8]) and len(list(loader)) == 6
    assert session.iteration == 8 and not session.finished
    assert_alike(models[0].state_dict(), models[1].state_dict())


def test_a_reported_figure_that_is_the_target_ends_the_loop() -> None:
    session = paceline.join(RunConfig(strategy="classic", target="mae<=0.5", epochs=50.0))
    model, batches = session.prepare(nn.Linear(4, 1), (torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
    steps = 0
    for x, y in batches:
        session.backward((model(x) - y).square().mean())
        session.report(mae=3.0 - steps)
        session.step()
        steps += 1
    assert steps == 4


def test_a_build_in_a_notebooks_cell_trains_there_or_is_told_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = ModuleType("__main__")  # of a kernel: it is no file
    exec("def build():\n    from tests.support import odd_models\n    return odd_models.tied()", cell.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", cell)
    settings: dict[str, Any] = {"runs": str(tmp_path), "quiet": True, "steps": 2, "batch_size": 8}
    assert paceline.train(cell.build, strategy="classic", **settings)["updates"] == 2
    with pytest.raises(paceline.UserError, match=r"%%writefile my_task.py.*from my_task import build"):
        paceline.train(cell.build, strategy="async", **settings)
