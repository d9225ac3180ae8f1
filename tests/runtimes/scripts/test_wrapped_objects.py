"""What a library has wrapped: `prepare` trains what is inside, and the wrapper stays in use."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import RunConfig, UserError
from paceline.runtimes.scripts import adopt
from paceline.runtimes.scripts.loading.loader import FinishedPass, WorkerLoader
from paceline.runtimes.scripts.session import join


def of_accelerate(name: str, **inside: Any) -> Any:
    """An object as `accelerator.prepare` returns it; it knows nothing but what it wraps."""
    kind = type(name, (), {"__module__": "accelerate.somewhere"})
    made = kind()
    vars(made).update(inside)
    return made


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0).view(8, 3)), batch_size=2)


def test_the_optimizer_inside_is_trained_and_the_share_is_put_inside_the_loader() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrapped = [
        of_accelerate("AcceleratedOptimizer", optimizer=optimizer, scaler=None),
        of_accelerate("AcceleratedScheduler", scheduler=schedule),
        of_accelerate("DataLoaderShard", base_dataloader=data()),
    ]
    session = join(RunConfig(strategy="sync", workers=1, epochs=1))
    returned = session.prepare(model, *wrapped)
    assert list(returned) == [model, *wrapped]
    loader = wrapped[2].base_dataloader
    assert isinstance(loader, WorkerLoader)
    before = model.weight.detach().clone()
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    assert session.iteration == 4 and not torch.equal(before, model.weight)


@pytest.mark.parametrize(
    ("name", "inside", "line"),
    [
        ("DataLoaderDispatcher", {}, "dispatch_batches=False"),
        ("AcceleratedOptimizer", {"scaler": object(), "optimizer": None}, "bf16"),
    ],
)
def test_a_wrapper_that_passes_by_the_server_is_refused(name: str, inside: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        adopt.sort_out((nn.Linear(1, 1), of_accelerate(name, **inside)))


def test_only_worker_0_is_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    states: Any = ModuleType("accelerate.state")
    states.PartialState = SimpleNamespace(_shared_state={"process_index": 0, "num_processes": 1})
    states.AcceleratorState = SimpleNamespace(_shared_state={})
    monkeypatch.setitem(sys.modules, "accelerate.state", states)
    adopt.number_process(1)
    assert states.PartialState._shared_state == {"process_index": 1, "local_process_index": 1, "num_processes": 1}
    assert states.AcceleratorState._shared_state == {}  # not made yet


def test_a_share_is_known_before_the_model_and_prepare_takes_it_as_it_is() -> None:
    session = join(RunConfig(strategy="sync", workers=1, epochs=1))
    shared = session.share(data())
    assert len(shared) == 4
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, first, second = session.prepare(model, optimizer, shared, data())
    assert first is shared and isinstance(second, WorkerLoader)
    assert len({one._keys.of_pass(0) for one in (first, second)}) == 2  # their random numbers differ


def test_the_optimizers_state_can_be_kept_after_the_end() -> None:
    session = join(RunConfig(strategy="sync", workers=1, epochs=1))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    _, _, loader = session.prepare(model, optimizer, data())
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    session.finish(with_optimizers=True)
    state = optimizer.state_dict()["state"]
    assert {float(one["step"]) for one in state.values()} == {4.0} and optimizer.state


class EmptyReader:
    """Counts the passes that are passed over."""

    def __init__(self) -> None:
        self.skipped: list[int] = []

    def skip(self, number: int) -> None:
        self.skipped.append(number)


def test_a_library_that_loops_by_next_finds_a_finished_pass_empty() -> None:
    reader: Any = EmptyReader()
    batches = FinishedPass(reader, 0, WorkerLoaderParts(), lambda: None)  # type: ignore[arg-type]
    library = {"__name__": "accelerate.data_loader", "batches": batches}
    code = "try:\n    found = [next(batches)]\nexcept StopIteration:\n    found = []\n"
    exec(code, library)
    assert library["found"] == [] and reader.skipped == [0]


class WorkerLoaderParts:
    """What a finished pass says to its loader."""

    def look(self, batch: Any) -> None:
        """Note what the script looks at."""
