"""A loop evaluates the weights that are scored and saved, and gets its training weights back bit for bit."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import paceline
from paceline.config import RunConfig
from paceline.runtimes.scripts.bound_model import BoundModel
from paceline.runtimes.scripts.session import Session
from paceline.runtimes.scripts.watching.recent_inputs import KEPT_INPUTS
from tests.support.own_loops import OneServer

BATCH = 8


class Net(nn.Module):
    """Batch norm, dropout, and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)) * scale, 0.2, self.training))


def data(count: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 4, generator=generator)
    return 2.0 * x + 1.0, (x[:, 0] > 0).long()


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], but: str = "") -> None:
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name]) and not (but and but in name)]
    assert not different


class Loop:
    """A loop with a session, and the inputs of its newest batches."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.model, batches = session.prepare(net(), data(), batch_size=BATCH)
        self.batches, self.inputs = iter(batches), deque[Tensor](maxlen=KEPT_INPUTS)

    def step(self) -> bool:
        batch = next(self.batches, None)
        if batch is None:
            return False
        self.inputs.append(batch[0])
        self.session.backward(nn.functional.cross_entropy(self.model(batch[0], scale=1.5), batch[1]))
        self.session.step()
        return True


def alone(**settings: Any) -> Loop:
    return Loop(paceline.join(RunConfig(**{"strategy": "classic", "lr": 0.1, "epochs": 1.0, **settings})))


def average_of(loop: Loop) -> Tensor:
    """The weights that a server in the same process would save."""
    return loop.session._env.transport._server.evaluated  # type: ignore[attr-defined]


def test_inside_the_model_has_the_evaluated_weights_and_statistics_that_belong_to_them() -> None:
    loop = alone(average="on")
    for _ in range(20):
        loop.step()
    with loop.session.eval_weights() as model:
        assert model is loop.model and model.training
        inside = copies(loop.model)
    averaged = loop.session._loop.bound.flat.layout.views(average_of(loop))  # type: ignore[union-attr]
    assert all(torch.equal(inside[name], tensor) for name, tensor in averaged.items())
    expected = net()
    expected.load_state_dict(inside)
    update_bn([(x,) for x in loop.inputs], expected)  # the norm comes before the dropout
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(inside[f"norm.{name}"], getattr(expected.norm, name))
        assert not torch.allclose(inside[f"norm.{name}"], getattr(loop.model.norm, name), atol=1e-3)


@pytest.mark.parametrize("frozen", [False, True])
def test_statistics_belong_to_the_weights_after_an_evaluation_with_gradients_too(frozen: bool) -> None:
    """A call in evaluation mode that no push follows; with `frozen`, the loop has put its norms into that mode."""
    loop = alone(average="on")
    for number in range(20):
        if frozen and number == 10:
            loop.model.norm.eval()
            kept = copies(loop.model)
        loop.step()
    loop.model.eval()
    loop.model(data()[0])
    loop.model.train()
    with loop.session.eval_weights():
        inside = copies(loop.model)
    expected = net()
    expected.load_state_dict(inside)
    update_bn([(x,) for x in loop.inputs], expected)
    for name in ("running_mean", "running_var"):
        found = kept[f"norm.{name}"] if frozen else getattr(expected.norm, name)
        torch.testing.assert_close(inside[f"norm.{name}"], found)


def test_an_evaluation_leaves_no_trace_in_the_training() -> None:
    loops = alone(average="on"), alone(average="on")
    going, number = True, 0
    while going:
        number += 1
        if number % 3 == 0:
            before = copies(loops[0].model)
            loops[0].model.norm.eval()
            with loops[0].session.eval_weights() as model:
                model.eval()
                model(data()[0])
                with torch.no_grad():
                    model.first.weight.zero_()  # type: ignore[union-attr,operator]
                    model.norm.num_batches_tracked += 1  # type: ignore[union-attr,operator]
            assert [part.training for part in loops[0].model.modules()] == [True, True, False, True]
            loops[0].model.norm.train()
            assert_same(copies(loops[0].model), before)
        going = all([loop.step() for loop in loops])
    assert number == 26
    assert_same(copies(loops[0].model), copies(loops[1].model))


def test_the_weights_are_back_after_an_error_too() -> None:
    loop = alone(average="on")
    for _ in range(5):
        loop.step()
    before = copies(loop.model)
    with pytest.raises(ValueError, match="mine"), loop.session.eval_weights():
        raise ValueError("mine")
    assert_same(copies(loop.model), before)
    assert loop.step()


def test_live_weights_of_one_worker_have_the_statistics_of_plain_torch() -> None:
    loop = alone()
    while loop.step():
        pass
    before = copies(loop.model)
    with loop.session.eval_weights():
        assert_same(copies(loop.model), before)
    loop.session.finish()
    assert_same(copies(loop.model), before)


def test_finish_leaves_the_final_weights_in_the_model() -> None:
    with paceline.join(RunConfig(strategy="classic", lr=0.1, epochs=1.0, average="on")) as session:
        loop = Loop(session)
        while loop.step():
            pass
        with session.eval_weights():
            expected = copies(loop.model)
        assert not torch.equal(loop.model.first.weight, expected["first.weight"])
    assert_same(copies(loop.model), expected)
    session.finish()
    with session.eval_weights(), session.eval_weights():
        assert_same(copies(loop.model), expected)
    assert_same(copies(loop.model), expected)


def test_finish_in_the_middle_of_a_loop_ends_it() -> None:
    loop = alone(average="on")
    for _ in range(3):
        loop.step()
    loop.session.finish()
    assert not loop.step() and loop.session.finished


def test_norm_layers_that_are_not_trained_keep_their_statistics() -> None:
    loop = alone(average="on")
    loop.model.norm.eval()
    for _ in range(5):
        loop.step()
    with loop.session.eval_weights() as model:
        model.train()
        assert not loop.model.norm.running_mean.any()


class Box:
    """A batch that is no tensor and no mapping."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Boxed(Net):
    def forward(self, box: Box, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(box.x, scale)


def test_inputs_of_any_kind_are_kept_as_the_model_got_them() -> None:
    session = paceline.join(RunConfig(strategy="classic", lr=0.1, average="on"))
    model, batches = session.prepare(Boxed(), data(40), batch_size=BATCH)
    for x, y in batches:
        nn.functional.cross_entropy(model(Box(x)), y).backward()
        session.step()
    trained = copies(model)
    session.finish()
    assert not torch.equal(model.norm.running_var, trained["norm.running_var"])


def test_a_model_in_another_memory_is_evaluated_there_and_restored() -> None:
    """A GPU's memory is not the server's; here parameters of another type are in a memory of their own, too."""
    model = net().double()
    bound = BoundModel([model], dict(model.named_parameters()), 0)
    bound.renew(fully=True)
    before = copies(model)
    with bound.restored():
        bound.slot.weights.fill_(2.0)
        bound.load_weights()
        assert bool((model.first.weight == 2.0).all())
        model.norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
        bound.send_state()
        assert bool((bound.flat.state_layout.views(bound.slot.state)["norm.running_mean"] == 3.0).all())
        bound.slot.state.fill_(4.0)
        bound.load_state()
        assert bool((model.norm.running_var == 4.0).all())
    assert_same(copies(model), before)
    bound.require_unchanged()


def test_other_workers_have_moved_the_weights_that_a_worker_evaluates(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=2, rule="plain", average="none", lr=0.1)
    loops = [Loop(one.session(worker)) for worker in range(2)]
    for worker in (0, 1, 1, 1):
        loops[worker].step()
    assert one.server is not None
    views = loops[0].session._loop.bound.flat.layout.views(one.server.weights)  # type: ignore[union-attr]
    with loops[0].session.eval_weights():
        assert torch.equal(loops[0].model.first.weight, views["first.weight"])
    assert not torch.equal(loops[0].model.first.weight, views["first.weight"])


def statistics(loop: Loop) -> list[Tensor]:
    return [tensor.clone() for name, tensor in loop.model.norm.named_buffers() if name.startswith("running")]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("average", ["none", "on"])
def test_a_worker_that_returns_evaluates_with_the_statistics_of_its_last_push(tmp_path: Path, average: str) -> None:
    """With those of a new model it would score another one until its first step."""
    one = OneServer(tmp_path, strategy="async", workers=2, rule="plain", average=average, lr=0.1)
    loops = [Loop(one.session(worker)) for worker in range(2)]
    for worker in (0, 1, 1, 0, 1):
        loops[worker].step()
    one.lose(0)
    again = Loop(one.session(0, incarnation=1))
    assert_equal(statistics(again), statistics(loops[0]))
    with again.session.eval_weights():
        assert_equal(statistics(again), statistics(loops[0]))
    again.step()
    assert not torch.equal(again.model.norm.running_mean, loops[0].model.norm.running_mean)


def test_a_worker_lost_before_its_first_push_begins_with_the_statistics_of_one_that_trains(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=3, rule="plain", average="none", lr=0.1)
    loops = [Loop(one.session(worker)) for worker in range(3)]
    assert not loops[2].model.norm.running_mean.any(), "nobody has pushed"
    for worker in (0, 1, 1):
        loops[worker].step()
    one.lose(0)
    one.lose(2)
    assert_equal(statistics(Loop(one.session(2, incarnation=1))), statistics(loops[1]))
    one.lose(1)
    one.lose(2)
    assert_equal(statistics(Loop(one.session(2, incarnation=2))), statistics(loops[0]))


def test_buffers_of_another_type_lose_no_precision_if_the_server_knows_none(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=2, rule="plain", average="none", lr=0.1)
    model = net()
    model.norm.double().running_mean.fill_(1.0 / 3.0)  # type: ignore[union-attr]
    one.session(0).prepare(model, data(), batch_size=BATCH)
    assert bool((model.norm.running_mean == 1.0 / 3.0).all())


def test_calls_in_the_wrong_place_are_one_clear_line() -> None:
    session = paceline.join()
    for call in ("eval_weights", "finish", "step"):
        with pytest.raises(paceline.UserError, match=rf"session.{call}\(\) before session.prepare"):
            with session.eval_weights() if call == "eval_weights" else getattr(session, call)():
                pass
    loop = alone()
    batch = next(loop.batches)
    loop.model(batch[0]).sum().backward()
    with loop.session.eval_weights():
        with pytest.raises(paceline.UserError, match=r"a step inside session.eval_weights\(\)"):
            loop.session.step()
        with pytest.raises(paceline.UserError, match=r"session.finish\(\) inside"):
            loop.session.finish()
    loop.session.step()
