"""The server steps any torch optimizer as plain torch does, with equal bits, and goes on from a checkpoint."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Join, Resume
from paceline.core.own_loop.settings import LoopLayout, Number
from paceline.core.own_loop.torch_optimizer import (
    GROUP,
    UNKEYED,
    OptimizerFailed,
    TorchOptimizer,
    pack_state,
    unpack_places,
    unpack_state,
)
from paceline.core.policies import Async, Barrier
from paceline.core.rules.foresight import Ahead
from paceline.core.server import Server, restore_server, server_facts
from paceline.interfaces import Arrival, pack
from paceline.runs import checkpoint
from paceline.tasks.script_model import load_tensors, save_tensors
from tests.support.loop_servers import push, served
from tests.support.own_optimizers import Counting, CountingElsewhere, Restless

LAYOUT = pack([("w", (4, 3), True), ("b", (5,), True)])
LOOP = LoopLayout(0, (Number(0, "lr"),), ((0, 1),))
STEPS = 8
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Counting": lambda p: Counting(p, lr=0.1),
    "CountingElsewhere": lambda p: CountingElsewhere(p, lr=0.1),
}


def vector(number: int, flags: tuple[int, int] = (1, 1)) -> Tensor:
    """A learning rate that changes with every step."""
    return torch.tensor([0.1 / (1 + number), *flags], dtype=torch.float64)


def gradient(number: int) -> Tensor:
    flat = torch.zeros(LAYOUT.size)
    for place, view in enumerate(LAYOUT.views(flat).values()):
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(2 * number + place)))
    return flat


def new_server(make: Callable[[Any], Optimizer], policy: Any, num_workers: int) -> Server:
    def over(groups: list[list[nn.Parameter]]) -> Optimizer:
        return make(groups[0])

    return served(policy, num_workers, make=over, layout=LAYOUT, loop=LOOP)


def plainly(make: Callable[[Any], Optimizer], gradients: list[Tensor]) -> tuple[list[Tensor], Optimizer]:
    parameters = [nn.Parameter(torch.zeros(part.shape)) for part in LAYOUT.parameters]
    optimizer = make(parameters)
    for number, flat in enumerate(gradients):
        for parameter, view in zip(parameters, LAYOUT.views(flat).values(), strict=True):
            parameter.grad = view.clone()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        optimizer.step()
    return [parameter.detach() for parameter in parameters], optimizer


def assert_is_plain(server: Server, parameters: list[Tensor], optimizer: Optimizer) -> None:
    for found, expected in zip(LAYOUT.views(server.weights).values(), parameters, strict=True):
        assert torch.equal(found, expected)
    places = unpack_places(server.rule_state)
    states, expected_states = unpack_state(server.rule_state), optimizer.state_dict()["state"]
    unkeyed = {name: expected_states.pop(name) for name in list(expected_states) if isinstance(name, str)}
    assert places.get(UNKEYED, {}) == unkeyed
    assert states.keys() == expected_states.keys() and states
    assert len(server.rule_state) == sum(map(len, places.values())), "each value once, also if its kind changed"
    for number, group in enumerate(optimizer.param_groups):
        assert places.get(f"{GROUP}{number}", {}).items() <= group.items()
    for number, state in expected_states.items():
        assert states[number].keys() == state.keys()
        for name, value in state.items():
            assert type(states[number][name]) is type(value), name
            assert (
                torch.equal(states[number][name], value) if isinstance(value, Tensor) else states[number][name] == value
            )


@pytest.mark.parametrize("name", MAKERS)
def test_one_workers_pushes_are_the_steps_of_plain_torch(name: str) -> None:
    server, gradients = new_server(MAKERS[name], Async(), 1), [gradient(number) for number in range(STEPS)]
    for number, flat in enumerate(gradients):
        push(server, 0, vector(number), gradient=flat)
    assert_is_plain(server, *plainly(MAKERS[name], gradients))


@pytest.mark.parametrize("name", MAKERS)
def test_a_round_is_a_step_of_plain_torch_on_the_mean(name: str) -> None:
    server, means = new_server(MAKERS[name], Barrier(), 2), []
    for number in range(STEPS):
        pushed = gradient(number), gradient(number + 100)
        for worker, flat in enumerate(pushed):
            push(server, worker, vector(number), gradient=flat)
        means.append((pushed[0] + pushed[1]) / 2)
    assert_is_plain(server, *plainly(MAKERS[name], means))


def through_facts(server: Server, again: Server, folder: Path) -> None:
    facts = json.loads(json.dumps(server_facts(server)))
    state = {name: tensor.clone() for name, tensor in server.rule_state.items()}
    restore_server(again, facts, server.weights.clone(), state)


def through_files(server: Server, again: Server, folder: Path) -> None:
    memories = {worker: WorkerBuffers.private(BufferSizes(LAYOUT.size)) for worker in server.members}
    checkpoint.write_checkpoint(folder, checkpoint.take_checkpoint(server, memories, 0, 0.0))
    found, complaints = checkpoint.newest_checkpoint(folder)
    assert found is not None and not complaints
    checkpoint.restore(again, found)


@pytest.mark.parametrize("through", [through_facts, through_files])
@pytest.mark.parametrize("policy", [Async, Barrier])
@pytest.mark.parametrize("name", MAKERS)
def test_a_restored_server_goes_on_with_equal_bits(name: str, policy: Any, through: Any, tmp_path: Path) -> None:
    server, again = (new_server(MAKERS[name], policy(), 2) for _ in range(2))

    def go_on(one: Server, numbers: range) -> None:
        for number in numbers:
            for worker in range(2):
                push(one, worker, vector(number, (1, number % 3 != 1)), gradient=gradient(10 * number + worker))

    go_on(server, range(3))
    through(server, again, tmp_path)
    for one in (server, again):
        go_on(one, range(3, 6))
    assert torch.equal(again.weights, server.weights) and server_facts(again) == server_facts(server)
    assert again.rule_state.keys() == server.rule_state.keys()
    for key, tensor in server.rule_state.items():
        assert torch.equal(again.rule_state[key], tensor), key


@pytest.mark.parametrize("name", MAKERS)
def test_a_server_that_is_resumed_goes_on_with_its_state(name: str) -> None:
    server, gradients = new_server(MAKERS[name], Async(), 1), [gradient(number) for number in range(STEPS)]
    for number, flat in enumerate(gradients):
        if number == 4:
            server.handle(Resume())
            server.handle(Join(0, 1, own_loop=True))
        push(server, 0, vector(number), gradient=flat)
    assert_is_plain(server, *plainly(MAKERS[name], gradients))


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_from_before_goes_on_through_a_file(name: str, tmp_path: Path) -> None:
    gradients = [gradient(number) for number in range(STEPS)]
    _, before = plainly(MAKERS[name], gradients[:3])
    states = before.state_dict()["state"]
    unkeyed = {UNKEYED: {key: states.pop(key) for key in list(states) if isinstance(key, str)}}
    outside = {f"{GROUP}0": before.param_groups[0], "self": vars(before)} if name == "CountingElsewhere" else {}
    wanted = {"step", "weight_sum", "total", "recent"}
    others = {place: {key: kept[key] for key in wanted & kept.keys()} for place, kept in outside.items()}
    places: dict[Any, dict[str, Any]] = {**states, **unkeyed, **others}
    packed = dict(pack_state(place, key, value) for place, kept in places.items() for key, value in kept.items())
    (tmp_path / "state").write_bytes(save_tensors(packed))
    one = TorchOptimizer(lambda groups: MAKERS[name](groups[0]), LAYOUT, LOOP, load_tensors(tmp_path / "state"))
    weights = torch.zeros(LAYOUT.size)
    state = one.start(weights)
    parameters = [p for group in before.param_groups for p in group["params"]]
    for view, parameter in zip(LAYOUT.views(weights).values(), parameters, strict=True):
        view.copy_(parameter.detach())
    for number, flat in enumerate(gradients[3:], 3):
        one.follow([0.1 / (1 + number)], [1.0, 1.0])
        one.step(weights, state, flat, torch.tensor(1.0))
    expected, after = plainly(MAKERS[name], gradients)
    for view, parameter in zip(LAYOUT.views(weights).values(), expected, strict=True):
        assert torch.equal(view, parameter)
    assert unpack_state(state).keys() == {key for key in after.state_dict()["state"] if isinstance(key, int)}


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_that_is_only_tried_leaves_nothing_behind(name: str) -> None:
    """Rule `ahead` of two workers is a serial loop whose tried steps are made by deep copies, with equal bits."""

    def make() -> TorchOptimizer:
        return TorchOptimizer(lambda groups: MAKERS[name](groups[0]), LAYOUT, LOOP)

    optimizer, trial = make(), make()
    rule, weights, sent = Ahead(optimizer, trial, 2), torch.zeros(LAYOUT.size), torch.zeros(LAYOUT.size)
    state = rule.start(weights)
    parameters = [nn.Parameter(torch.zeros(part.shape)) for part in LAYOUT.parameters]
    plain, last = MAKERS[name](parameters), gradient(0)

    def step(one: Optimizer, flat: Tensor, number: int) -> list[Tensor]:
        group = one.param_groups[0]
        for parameter, view in zip(group["params"], LAYOUT.views(flat).values(), strict=True):
            parameter.grad = view.clone()
        group["lr"] = 0.1 / (1 + number)
        one.step()
        return [parameter.detach() for parameter in group["params"]]

    for number in range(STEPS):
        flat = gradient(number)
        for one in (optimizer, trial):
            one.follow([0.1 / (1 + number)], [1.0, 1.0])
        rule.apply(weights, state, flat, Arrival(number % 2, min(number, 1), torch.tensor(1.0), 2))
        rule.reply_weights(weights, state, number % 2, sent)
        step(plain, flat.lerp(last, 0.5) if number else flat, number)
        twin = copy.deepcopy(plain)  # torch copies no attributes
        vars(twin).update({key: copy.deepcopy(value) for key, value in vars(plain).items() if key not in vars(twin)})
        tried, last = step(twin, flat, number), flat
        interval = float(state["numbers"][number % 2])
        for view, replied, parameter, after in zip(
            LAYOUT.views(weights).values(), LAYOUT.views(sent).values(), parameters, tried, strict=True
        ):
            assert torch.equal(view, parameter)
            assert torch.equal(replied, torch.lerp(view, after, 2.0 * (interval - 1.0)))


def test_an_optimizer_that_changes_its_own_learning_rate_is_refused() -> None:
    one = TorchOptimizer(lambda groups: Restless(groups[0]), LAYOUT, LOOP)
    weights = torch.zeros(LAYOUT.size)
    state = one.start(weights)
    with pytest.raises(OptimizerFailed, match=r"changes its learning rate in step.*: use a scheduler instead"):
        one.step(weights, state, torch.ones(LAYOUT.size), torch.tensor(1.0))


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_a_schedule_of_the_run_multiplies_the_learning_rate(factor: float) -> None:
    one = TorchOptimizer(lambda groups: torch.optim.SGD(groups[0], lr=7.0), LAYOUT, LOOP)
    weights = torch.zeros(LAYOUT.size)
    state = one.start(weights)
    one.follow([0.5], [1.0, 1.0])
    one.step(weights, state, torch.ones(LAYOUT.size), torch.tensor(factor))
    assert LAYOUT.views(weights)["b"].tolist() == [-0.5 * factor] * 5


@pytest.mark.parametrize(
    ("before", "after"), [(0, 0.5), (0.0, 0.5), (False, True), (1, 3), ((0, 0.5), (0.25, 0.75))], ids=str
)
def test_a_setting_has_the_value_and_the_kind_that_the_loop_gives_it(before: Any, after: Any) -> None:
    """`SGD(momentum=0)` begins with a whole number, and may go on with a fraction."""
    made: list[Optimizer] = []

    def make(groups: list[list[nn.Parameter]]) -> Optimizer:
        made.append(Counting(groups[0], lr=1.0, anything=before))
        return made[0]

    parts = range(len(after)) if isinstance(after, tuple) else [None]
    loop = LoopLayout(0, tuple(Number(0, "anything", part) for part in parts), ((0, 1),))
    one = TorchOptimizer(make, LAYOUT, loop)
    one.start(torch.zeros(LAYOUT.size))
    one.follow([float(value) for value in (after if isinstance(after, tuple) else (after,))], [1.0, 1.0])
    found = made[0].param_groups[0]["anything"]
    assert found == after and type(found) is type(after)


class Odd:
    pass


def kind_of(value: Any) -> str:
    return type(value).__name__


@pytest.mark.parametrize("value", [Odd(), {1, 2}, [Odd()], float, 1j, {"a": [torch.zeros(1)]}], ids=kind_of)
def test_a_state_that_cannot_be_saved_is_one_line(value: Any) -> None:
    with pytest.raises(
        OptimizerFailed, match=r"the optimizer's state 'tag' is a \w+; .*: keep only these in its state"
    ) as error:
        pack_state(0, "tag", value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value",
    [7, -1, True, 0.1, 1e300, None, "text", [1, None], {"a": 0.5}, 2**60, torch.tensor(3), torch.zeros(2, 0)],
    ids=str,
)
def test_a_state_comes_back_as_it_was(value: Any) -> None:
    key, tensor = pack_state(12, "a.name:with:colons", value)
    found = unpack_state({key: tensor, "velocity": torch.zeros(1)})
    assert found.keys() == {12} and found[12].keys() == {"a.name:with:colons"}
    again = found[12]["a.name:with:colons"]
    assert type(again) is type(value)
    assert torch.equal(again, value) if isinstance(value, Tensor) else again == value
