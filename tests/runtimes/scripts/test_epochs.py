"""`session.epochs(n)`, and what a loop is told that runs through passes that its worker had finished before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

import paceline
from paceline.errors import UserError
from paceline.runtimes.scripts import session as scripts
from paceline.runtimes.scripts.process import _run
from paceline.runtimes.scripts.session import Session
from tests.support.own_loops import OneServer

BATCHES = 4  # in a pass
BEHIND = "`for epoch in session.epochs(N)` begins behind them"


class Killed(Exception):
    """Ends a loop, as if its process was killed."""


class Epochwise:
    """The loop of a process: one pass in each epoch, and what a test does behind it."""

    def __init__(
        self, session: Session, loaders: int = 1, scheduled: bool = False, sampler: Any = None, **length: Any
    ) -> None:
        torch.manual_seed(1)
        model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.scheduler: Any = LambdaLR(self.optimizer, lambda step: 0.5**step)
        data = TensorDataset(torch.ones(BATCHES, 2), torch.arange(1.0, BATCHES + 1)[:, None])
        given = [DataLoader(data, shuffle=sampler is None, sampler=sampler) for _ in range(loaders)]
        self.session, schedule = session, [self.scheduler] if scheduled else []
        _, self.model, *found = session.prepare(self.optimizer, model, *schedule, *given, **length)
        self.loaders: list[Any] = found[len(schedule) :]
        self.seen: list[tuple[int, int, float]] = []

    def train(self, epoch: int, stop_after: int = 1000) -> int:
        """Make one pass over each loader; return the number of batches."""
        before = len(self.seen)
        for loader in self.loaders:
            for number, (x, y) in enumerate(loader):
                self.optimizer.zero_grad()
                (self.model(x) - y).square().mean().backward()
                self.seen.append((epoch, number, self.optimizer.param_groups[0]["lr"]))
                self.optimizer.step()
                if len(self.seen) == stop_after:
                    raise Killed
        return len(self.seen) - before

    def all(self, epochs: Any, stop_after: int = 1000) -> list[int]:
        """Train all epochs, and step the schedule behind each; return the batches of each."""
        found = []
        try:
            for epoch in epochs:
                found.append(self.train(epoch, stop_after))
                self.scheduler.step()
        except Killed:
            pass
        return found


def served(folder: Path, **settings: Any) -> OneServer:
    return OneServer(folder, **{"strategy": "async", "workers": 1, "rule": "plain", "average": "none", **settings})


def killed_after(folder: Path, batches: int, **made: Any) -> OneServer:
    """A server whose worker was killed after so many batches."""
    one = served(folder)
    loop = Epochwise(one.session(0), **made)
    loop.all(loop.session.epochs(5), batches)
    assert len(loop.seen) == batches
    one.lose(0)
    return one


def test_epochs_begin_with_the_pass_that_is_not_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = Epochwise(killed_after(tmp_path, 2 * BATCHES + 1, scheduled=True).session(0, 1), scheduled=True)
    epochs = again.session.epochs(5)
    assert len(epochs) == 3
    assert again.all(epochs) == [BATCHES - 1, BATCHES, BATCHES]
    assert {epoch: lr for epoch, _, lr in again.seen} == {2: 0.125, 3: 0.0625, 4: 0.03125}, "as without the kill"
    again.session.finish()
    assert capsys.readouterr().err == ""


def test_a_pass_that_was_trained_to_its_end_is_finished(tmp_path: Path) -> None:
    again = Epochwise(killed_after(tmp_path, 2 * BATCHES).session(0, 1))
    assert list(again.session.epochs(2)) == [], "all that this loop would do is done"
    again = Epochwise(killed_after(tmp_path / "more", 2 * BATCHES).session(0, 1))
    assert again.all(again.session.epochs(4)) == [BATCHES, BATCHES] and again.seen[0][:2] == (2, 0)


def test_a_schedule_behind_that_pass_makes_its_step(tmp_path: Path) -> None:
    again = Epochwise(killed_after(tmp_path, 2 * BATCHES, scheduled=True).session(0, 1), scheduled=True)
    assert again.all(again.session.epochs(4)) == [0, BATCHES, BATCHES]
    assert {epoch: lr for epoch, _, lr in again.seen} == {2: 0.125, 3: 0.0625}, "epochs 0 and 1 had 0.5 and 0.25"


def test_an_exception_behind_that_pass_says_why_it_had_no_batch(tmp_path: Path) -> None:
    again = Epochwise(killed_after(tmp_path, 2 * BATCHES, scheduled=True).session(0, 1), scheduled=True)
    again.train(next(iter(again.session.epochs(4))))
    error = ZeroDivisionError("division by zero")
    again.session.explain(error)
    assert error.__notes__ == [
        "this worker had trained on the last batch of pass 2 before it started again, so that loop had no batch: "
        "what stands behind it must allow for that"
    ]


def test_every_loader_goes_on_in_its_pass(tmp_path: Path) -> None:
    """The second loader was left in the middle; the first one has finished the same epoch."""
    one = killed_after(tmp_path, 2 * 2 * BATCHES + BATCHES + 1, loaders=2)
    again = Epochwise(one.session(0, 1), loaders=2)
    assert again.all(again.session.epochs(4))[-1] == 2 * BATCHES
    assert len(again.seen) == 4 * 2 * BATCHES - (2 * 2 * BATCHES + BATCHES + 1)


def test_loops_one_behind_the_other_share_the_passes(tmp_path: Path) -> None:
    """A warm-up of 2 epochs, then 3 more; a look at a batch comes before them."""
    one = served(tmp_path)

    def process(incarnation: int, stop_after: int = 1000) -> list[tuple[int, int, float]]:
        loop = Epochwise(one.session(0, incarnation))
        next(iter(loop.loaders[0]))
        try:
            for first, num in ((0, 2), (10, 3)):
                for epoch in loop.session.epochs(num):
                    loop.train(first + epoch, stop_after)
        except Killed:
            one.lose(0)
        return [place[:2] for place in loop.seen]

    assert process(0, 3 * BATCHES + 2)[-1] == (11, 1)
    assert process(1)[:3] == [(11, 0), (11, 1), (12, 0)]


def test_epochs_end_with_the_training(tmp_path: Path) -> None:
    loop = Epochwise(served(tmp_path).session(0), epochs=2)
    assert loop.all(loop.session.epochs(5)) == [BATCHES, BATCHES] and loop.session.finished


def test_alone_they_are_a_range() -> None:
    loop = Epochwise(paceline.join())
    epochs = loop.session.epochs(3)
    assert len(epochs) == 3 and list(epochs) == [0, 1, 2]
    loop = Epochwise(paceline.join(), steps=BATCHES + 1)
    assert loop.all(loop.session.epochs(5)) == [BATCHES, 1]


def test_what_epochs_do_not_count_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    bare = served(tmp_path / "bare").session(0)
    with pytest.raises(UserError, match=r"session.epochs\(\) before session.prepare"):
        bare.epochs(3)
    bare.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        UserError, match=r"^session.epochs\(3\) counts passes over the loader, and .* got none: give it"
    ):
        bare.epochs(3)
    endless = served(tmp_path / "endless").session(0)
    endless.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(4, 2),), steps=9, batch_size=2)
    with pytest.raises(UserError, match="one loop over this data goes on until training ends: give"):
        endless.epochs(3)
    loop = Epochwise(served(tmp_path / "wrong").session(0))
    with pytest.raises(UserError, match=r"session.epochs\(2.5\): give a whole number"):
        loop.session.epochs(2.5)  # type: ignore[arg-type]


def test_an_epoch_of_several_passes_is_refused_before_a_place_is_lost(tmp_path: Path) -> None:
    loop = Epochwise(served(tmp_path).session(0))
    says = r"session.epochs\(3\): 2 passes over the loader in 1 epoch, and each epoch is one: loop over range\(3\)"
    with pytest.raises(UserError, match=says):
        for epoch in loop.session.epochs(3):
            loop.train(epoch)
            loop.train(epoch)


def test_a_sampler_with_a_state_of_its_own_is_not_drawn_twice(tmp_path: Path) -> None:
    class Counted(SequentialSampler):
        draws = 0

        def __iter__(self) -> Any:
            Counted.draws += 1
            return super().__iter__()

    one = killed_after(tmp_path, 2 * BATCHES, sampler=Counted(range(BATCHES)))
    Counted.draws = 0
    again = Epochwise(one.session(0, 1), sampler=Counted(range(BATCHES)))
    assert again.all(again.session.epochs(4)) == [0, BATCHES, BATCHES], "that pass 2 is over is not known before it"
    assert Counted.draws == 4


def stop_early(loop: Epochwise, patience: int) -> None:
    for epoch in range(5):
        loop.train(epoch)
        if epoch == patience:
            break
    loop.session.finish()


@pytest.mark.parametrize(("batches", "patience"), [(3 * BATCHES, 1), (2 * BATCHES + 1, 1)])
def test_a_loop_that_counts_finished_passes_again_is_no_end_of_the_run(
    tmp_path: Path, batches: int, patience: int
) -> None:
    one = killed_after(tmp_path, batches)
    with pytest.raises(UserError) as caught:
        stop_early(Epochwise(one.session(0, 1)), patience)
    finished = "passes 1 to 2 were finished before this worker started, and it counted them again"
    assert str(caught.value) == f"the loop ended after 2 passes without a batch: {finished}: {BEHIND}"
    assert one.server is not None and not one.server.finished


@pytest.mark.parametrize(("batches", "patience"), [(3 * BATCHES, 2), (2 * BATCHES + 1, 2), (2 * BATCHES + 1, 3)])
def test_a_loop_that_comes_to_where_it_was_may_end(tmp_path: Path, batches: int, patience: int) -> None:
    one = killed_after(tmp_path, batches)
    loop = Epochwise(one.session(0, 1))
    stop_early(loop, patience)
    assert loop.session.is_final and len(loop.seen) == (patience + 1) * BATCHES - batches


def test_worker_0_says_once_that_finished_passes_have_no_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = killed_after(tmp_path, 3 * BATCHES)
    loop = Epochwise(one.session(0, 1))
    assert loop.all(range(5)) == [0, 0, 0, BATCHES, BATCHES]
    what = "passes 1 to 2 were finished before this worker started: their loops have no batch"
    assert capsys.readouterr().err == f"{what}, and what stands behind runs again; {BEHIND}\n"


@pytest.mark.parametrize(
    ("batches", "finished"),
    [(BATCHES + 1, "pass 1 was"), (2 * BATCHES + 1, "passes 1 to 2 were"), (0, None)],
)
def test_an_exception_in_a_loop_without_a_batch_comes_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int, finished: str | None
) -> None:
    loop = Epochwise((killed_after(tmp_path, batches) if batches else served(tmp_path)).session(0, 1))
    monkeypatch.setattr(scripts, "joined", loop.session)
    script = tmp_path / "script.py"
    script.write_text("import paceline.runtimes.scripts.session as s\ns.loop()\n")

    def body() -> None:
        loop.train(0)
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(scripts, "loop", body, raising=False)
    with pytest.raises(ZeroDivisionError) as caught:
        _run(str(script))
    notes = getattr(caught.value, "__notes__", [])
    have = "its loop has" if batches == BATCHES + 1 else "their loops have"
    reason = f"{finished} finished before this worker started, so {have} no batch: {BEHIND}"
    assert notes == ([reason] if finished else [])


def test_an_exception_after_the_end_of_training_comes_with_its_reason(tmp_path: Path) -> None:
    loop = Epochwise(served(tmp_path).session(0), epochs=1)
    error = NameError("name 'loss' is not defined")
    assert loop.all(range(2)) == [BATCHES, 0]
    loop.session.explain(error)
    assert error.__notes__ == [scripts.OVER]
    loop.session.finish()
    later = ValueError()
    loop.session.explain(later)
    assert not hasattr(later, "__notes__"), "it is none of the loop"
