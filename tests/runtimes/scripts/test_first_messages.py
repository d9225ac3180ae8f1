"""What the server of a script run learns from the first messages of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from paceline.config import RunConfig
from paceline.core.buffers import BufferSizes
from paceline.core.messages import Join
from paceline.core.schedules import Budget
from paceline.errors import ProtocolError, UserError
from paceline.interfaces import pack
from paceline.runs.folder import RunFolder
from paceline.runtimes.scripts.loading.loader import share
from paceline.runtimes.scripts.serving.agreement import expected_facts, require_same_loops
from paceline.runtimes.scripts.serving.server import LOOP_FACTS, learn
from paceline.settings.resolve import resolve
from paceline.transports.frames import checked
from paceline.transports.protocol import Hello
from paceline.transports.shared_memory import SharedBuffers
from tests.support.own_loops import first_facts

DATA = TensorDataset(torch.zeros(500, 1), torch.arange(500) % 5)
LAYOUT = pack([("weight", (1, 1), True)])


class Idle:
    """A session that no batch begins in."""

    finished = False

    def begin_batch(self, key: int) -> None: ...

    def begin_empty_pass(self) -> None: ...


def hello(loader: DataLoader[Any], config: RunConfig, worker: int, **known: Any) -> Hello:
    """A worker's first message about its share of the data."""
    facts = share(loader, Idle(), config, worker).facts
    data = {"num_samples": facts.epoch_samples, "order": facts.order, "skew": facts.skew, "batch_size": 8}
    memory = SharedBuffers.create(BufferSizes(LAYOUT.size, 0))
    return Hello(Join(worker, 0, None), memory, first_facts(LAYOUT, **data, epochs=config.epochs, **known))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    threads = torch.get_num_threads()
    yield RunFolder(tmp_path)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("split", ["iid", "full", "labels", "dirichlet:0.3"])
@pytest.mark.parametrize("epochs", [2.0, 2.5])
def test_the_budget_is_what_all_workers_train_on(split: str, epochs: float, folder: RunFolder) -> None:
    """So a cosine schedule ends at 0, however unequal the shards are."""
    settings = {"epochs": epochs, "split": split, "schedule": "cosine", "batch_size": 8}
    config = resolve(RunConfig(workers=3, task="a:b", strategy="async", **settings))  # type: ignore[arg-type]
    hellos = [hello(DataLoader(DATA, 8, shuffle=True), config, worker) for worker in range(3)]
    _, _, server = learn(config, hellos, folder)
    assert server.budget == Budget(int(500 * epochs), 500)
    assert server.training.lr(server.budget.samples, 1) == 0.0


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"steps": 30}, Budget(240, 500, per_worker=True, pushes=30)),
        ({"steps": 30, "num_samples": None}, Budget(240, 240, per_worker=True, pushes=30)),
        ({"epochs": None}, Budget(0, 500, per_worker=True)),
        ({"epochs": None, "num_samples": None}, Budget(0, 1, per_worker=True)),
    ],
)
def test_a_loop_trains_for_steps_for_epochs_or_as_long_as_it_likes(
    known: dict[str, Any], expected: Budget, folder: RunFolder
) -> None:
    config = resolve(RunConfig(workers=2, task="a:b", strategy="async"))
    first = hello(DataLoader(DATA, 8, shuffle=True), config, 0)
    first.facts.update(known)
    _, _, server = learn(config, [first] * 2, folder)
    assert server.budget == expected and not server.budget.exhausted(10**9, 10**9)


@pytest.mark.parametrize(
    ("known", "settings", "message"),
    [
        ({"epochs": 2.0, "num_samples": None}, {}, "the number of samples in an epoch of this data is unknown"),
        ({"epochs": None}, {"schedule": "cosine"}, "--schedule cosine follows the length of training"),
        ({"epochs": None}, {"warmup": 0.1}, "--warmup follows the length of training"),
    ],
)
def test_a_length_that_nobody_knows_is_one_line(
    known: dict[str, Any], settings: dict[str, Any], message: str, folder: RunFolder
) -> None:
    config = resolve(RunConfig(workers=2, task="a:b", strategy="async", **settings))
    first = hello(DataLoader(DATA, 8, shuffle=True), config, 0)
    first.facts.update(known)
    with pytest.raises(UserError, match=message) as error:
        learn(config, [first] * 2, folder)
    assert "\n" not in str(error.value)


def test_workers_must_draw_the_same_samples() -> None:
    """With other numbers of their own, two workers would train on what each other holds out."""
    config = resolve(RunConfig(workers=2, task="a:b"))
    loaders = [DataLoader(DATA, 8, sampler=SubsetRandomSampler(range(start, start + 400))) for start in (0, 100, 0)]
    first, other, same = (
        expected_facts(hello(loader, config, worker)) for worker, loader in zip((0, 1, 1), loaders, strict=True)
    )
    assert first == same and first != other


@pytest.mark.parametrize(
    "change",
    [
        {"layout": None},
        {"num_samples": -1},
        {"steps": 0},
        {"batch_size": 0},
        {"batch_size": 8.0},
        {"max_samples": None},
        {"optimizers": {}},
        {"optimizers": ["Adam"]},
        {"notes": ["x"] * 101},
    ],
    ids=str,
)
def test_facts_of_a_wrong_kind_are_refused(change: dict[str, Any]) -> None:
    checked(first_facts(LAYOUT), LOOP_FACTS)
    with pytest.raises(ProtocolError):
        checked(first_facts(LAYOUT, **change), LOOP_FACTS)


ADAM, SGD = ({"class": {"name": name}, "settings": {}, "loop": {}} for name in ("Adam", "SGD"))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {"layout": pack([("w", (3, 2), True)]).to_rows()},
            "worker 2 has 6 parameters, worker 0 has 1 parameters: ",
        ),
        ({"layout": pack([("v", (1, 1), True)]).to_rows()}, "worker 2 and worker 0 differ in the names or shapes of"),
        ({"state_layout": LAYOUT.to_rows()}, "worker 2 has 1 values in the model's buffers, worker 0 has 0 values"),
        ({"optimizers": [ADAM]}, "worker 2 has optimizer Adam, worker 0 has optimizer SGD: make the same optimizers"),
        ({"optimizers": []}, "worker 2 has no optimizer, worker 0 has optimizer SGD: make the same optimizers"),
        ({"num_samples": 90}, "worker 2 has 90 samples, worker 0 has 100 samples: give session.prepare"),
        ({"num_samples": None}, "worker 2 has data of unknown length, worker 0 has 100 samples: give session.prep"),
        ({"order": 7, "numbers": 9}, "differ in the samples that their loaders draw and the parameter groups of their"),
    ],
    ids=str,
)
def test_the_first_difference_between_two_workers_is_named(facts: dict[str, Any], message: str) -> None:
    memory = SharedBuffers.create(BufferSizes(LAYOUT.size))
    alike = first_facts(LAYOUT, optimizers=[SGD])
    first, same, other = (
        Hello(Join(worker, 0, None), memory, told) for worker, told in enumerate((alike, alike, {**alike, **facts}))
    )
    require_same_loops([first, same])
    with pytest.raises(UserError) as error:
        require_same_loops([first, same, other])
    assert message in str(error.value) and "\n" not in str(error.value)
