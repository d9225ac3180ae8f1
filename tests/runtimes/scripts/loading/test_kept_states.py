"""The states of streams are kept in the run folder, and a worker that comes back goes on from them exactly."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.runs.folder import RunFolder
from paceline.runtimes.scripts.loading import kept_states
from paceline.runtimes.scripts.loading.kept_states import MAX_STATES, KeptStates, from_tensors, to_tensors
from paceline.runtimes.scripts.loading.loader import WorkerLoader
from paceline.runtimes.scripts.session import Session, WorkerEnv
from tests.support.own_loops import OneServer, OneServerTransport
from tests.support.resumable_streams import Forgetful, Lines
from tests.support.shared_loaders import equal, shared

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11, torch 2.13


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(kept_states, "time", clock)
    return clock


def plain(stream: Lines) -> Any:
    return DataLoader(stream, 2)


def stateful(stream: Lines) -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(stream, 2)


def train(loader: WorkerLoader, states: KeptStates, clock: Clock, every: float = 5.0) -> Iterator[Tensor]:
    """The batches of a pass, with a push after each; time goes by so that a state is due after every `5 / every`."""
    for batch in loader:
        clock.now += every
        states.after_push()
        yield batch


def keep(folder: Path, clock: Clock, make: Any, stream: Lines, until: tuple[int, int]) -> list[list[Tensor]]:
    """Train as worker 1 of 2 to a position, and return all batches of its first three passes."""
    loader = shared(make(stream), 1, 2)
    states = KeptStates(folder, 1, [loader])
    found: list[list[Tensor]] = []
    for _ in range(3):
        found.append([])
        for batch in train(loader, states if loader.position <= until else KeptStates(None, 1, []), clock):
            found[-1].append(batch)
            if loader.position == until:
                states._loaders = {}
    return found


def resumed(folder: Path, make: Any, stream: Lines, place: tuple[int, int]) -> WorkerLoader:
    loader = shared(make(stream), 1, 2)
    loader.resume_at(*place)
    KeptStates(folder, 1, [loader]).go_on()
    for _ in range(place[0]):
        assert list(loader) == []
    return loader


def same(batches: Any, expected: list[Tensor]) -> bool:
    return equal([[x] for x in batches], [[x] for x in expected])


@pytest.mark.parametrize("make", [plain, stateful])
@pytest.mark.parametrize("place", [(0, 4), (1, 3), (1, 6), (1, 10)], ids=str)
def test_a_resumed_stream_yields_the_batches_of_an_uninterrupted_one(
    tmp_path: Path, clock: Clock, make: Any, place: tuple[int, int]
) -> None:
    expected = keep(tmp_path / "streams", clock, make, Lines(), place)
    stream = Lines()
    loader = resumed(tmp_path / "streams", make, stream, place)
    assert same(loader, expected[place[0]][place[1] :])
    assert stream.reads == 40 - 4 * (place[1] - 1)  # the newest state is that before the last push
    assert all(same(loader, later) for later in expected[place[0] + 1 :])


@pytest.mark.parametrize("make", [plain, stateful])
def test_a_state_that_does_not_lead_to_the_next_batch_is_not_used(
    tmp_path: Path, clock: Clock, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = keep(tmp_path / "streams", clock, make, Forgetful(), (0, 5))
    stream = Forgetful()
    loader = resumed(tmp_path / "streams", make, stream, (0, 5))
    assert same(loader, expected[0][5:]) and same(loader, expected[1]) and stream.reads > 40
    (line,) = capsys.readouterr().err.splitlines()
    assert "load_state_dict() does not lead to the batch that followed: the stream is read again" in line


def test_a_replay_has_no_folder_and_reads_the_stream_from_its_start(tmp_path: Path, clock: Clock) -> None:
    expected = keep(tmp_path / "streams", clock, plain, Lines(), (0, 5))
    stream = Lines()
    loader = shared(plain(stream), 1, 2)
    loader.resume_at(0, 5)
    states = KeptStates(None, 1, [loader])
    states.go_on()
    assert same(train(loader, states, clock), expected[0][5:]) and stream.reads == 40
    assert not list(tmp_path.glob("streams/1-0-0-5*"))


def test_the_newest_states_are_kept_and_at_most_one_in_five_seconds(tmp_path: Path, clock: Clock) -> None:
    loader = shared(plain(Lines()))
    states = KeptStates(tmp_path / "streams", 0, [shared([torch.zeros(4)], batch_size=1), loader])
    list(train(loader, states, clock, every=2.0))
    names = {path.name for path in (tmp_path / "streams").iterdir()}
    assert names == {f"0-1-0-{batch}.safetensors" for batch in (3, 6, 9, 12, 15, 18)}
    for _ in range(3):
        list(train(loader, states, clock))
    names = {path.name for path in (tmp_path / "streams").iterdir()}
    assert names == {f"0-1-3-{batch}.safetensors" for batch in range(20 - MAX_STATES, 20)}


def test_damaged_states_are_passed_over(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "streams"
    expected = keep(folder, clock, plain, Lines(), (0, 6))
    for batch, reads in ((5, 40 - 16), (4, 40 - 12), (3, 40 - 8)):
        file = folder / f"1-0-0-{batch}.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content[: None if batch % 2 else 100]))
        stream = Lines()
        assert same(resumed(folder, plain, stream, (0, 6)), expected[0][6:]) and stream.reads == reads
    for file in folder.iterdir():
        file.write_bytes(b"")
    stream = Lines()
    assert same(resumed(folder, plain, stream, (0, 6)), expected[0][6:]) and stream.reads == 40


def test_states_after_the_place_where_a_run_goes_on_are_removed(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "streams"
    expected = keep(folder, clock, plain, Lines(), (0, 8))
    (folder / "0-0-0-9.safetensors").touch()  # of another worker
    assert same(resumed(folder, plain, Lines(), (0, 2)), expected[0][2:])
    assert {path.name for path in folder.iterdir()} == {
        "0-0-0-9.safetensors", "1-0-0-1.safetensors", "1-0-0-2.safetensors",
    }  # fmt: skip


def test_a_loader_that_waits_for_its_first_batch_leaves_no_state_of_another_place(tmp_path: Path, clock: Clock) -> None:
    loader = shared(plain(Lines()), 1, 2)
    loader.resume_at(0, 5)
    states = KeptStates(tmp_path / "streams", 1, [loader])
    for _ in range(3):
        clock.now += 5.0
        states.after_push()
    assert not (tmp_path / "streams").exists()


def test_a_state_that_cannot_be_saved_any_more_does_not_end_the_training(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Lines()
    loader = shared(plain(stream))
    states = KeptStates(tmp_path / "streams", 0, [loader])
    stream.epoch = {1}  # type: ignore[assignment]
    assert sum(1 for _ in zip(train(loader, states, clock), range(5), strict=False)) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert "the state_dict() of Lines holds set" in line and "the state is not kept" in line


def test_with_loader_processes_a_state_is_not_exact_and_not_used() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    facts = [shared(loaders.StatefulDataLoader(Lines(), 2, num_workers=number)).facts for number in (0, 1)]
    assert [(one.keeps_state, one.unresumable is None) for one in facts] == [(True, True), (False, False)]


class Sticky(Lines):
    """As a stream of Hugging Face `datasets`: each pass begins at the state that was loaded, until another is."""

    start: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Tensor]:
        self.place = self.start["place"] if self.start else 0
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:  # type: ignore[override]
        self.start = state
        if state:
            self.epoch, self.order = state["epoch"], state["order"]


def test_a_pass_after_a_resumed_one_is_whole(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("datasets")
    vars(module)["IterableDataset"] = Sticky
    monkeypatch.setitem(sys.modules, "datasets", module)
    loader, again = (shared(plain(Sticky())) for _ in range(2))
    states = KeptStates(tmp_path / "streams", 0, [loader])
    first, second = list(train(loader, states, clock)), list(loader)
    again.resume_at(0, 18)
    KeptStates(tmp_path / "streams", 0, [again]).go_on()
    assert same(again, first[18:]) and same(again, second)


def test_structures_come_back_as_they_were() -> None:
    half = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16).T
    state = {"dict": {"tensor": 1, "list": []}, "a": [half, half, {"x": torch.zeros(0)}], "n": -(2**70), "b": True}
    back = from_tensors(to_tensors(state))
    assert [back[name] for name in ("dict", "n", "b")] == [state[name] for name in ("dict", "n", "b")]
    assert torch.equal(back["a"][0], half) and torch.equal(back["a"][1], half) and back["a"][0].dtype == half.dtype
    assert back["a"][2]["x"].shape == (0,)


def test_a_killed_worker_goes_on_from_the_run_folder(tmp_path: Path, clock: Clock) -> None:
    def loop(one: OneServer, incarnation: int, steps: int) -> tuple[list[Tensor], Lines]:
        stream, model, seen = Lines(), nn.Linear(2, 1), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        env = WorkerEnv(one.config, 0, incarnation, OneServerTransport(one, 0), folder=one.folder.path)
        _, _, loader = Session(env).prepare(model, optimizer, DataLoader(stream, 4))
        for batch in loader:
            clock.now += 5.0
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            seen.append(batch)
            if len(seen) == steps:
                break
        return seen, stream

    settings: dict[str, Any] = {"strategy": "async", "workers": 2, "rule": "plain", "average": "none"}
    whole, broken = (OneServer(tmp_path / name, **settings) for name in ("whole", "broken"))
    expected, _ = loop(whole, 0, 5)
    before, _ = loop(broken, 0, 3)
    broken.lose(0)
    assert [path.name for path in RunFolder(broken.folder.path).streams.glob("*-2.safetensors")]
    after, stream = loop(broken, 1, 2)
    assert same(before + after, expected) and stream.reads == 24  # from its start it would be 36
