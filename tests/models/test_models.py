"""The published models: their sizes, the images they take, and how they lie in flat memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from paceline.assembly.core import make_model, make_rule
from paceline.assembly.run import work_of
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.data.datasets import Dataset
from paceline.interfaces import Arrival, Layout
from paceline.settings.resolve import resolve
from paceline.tasks.flat import FlatModule

CACHE_LINE_NBYTES = 64
GREY, COLOUR = (1, 28, 28), (3, 32, 32)


@pytest.mark.parametrize(("name", "count"), [("lenet5", 61_706), ("cnn", 1_199_882)])
def test_the_published_number_of_parameters(name: str, count: int) -> None:
    model = make_model(name, GREY)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert FlatModule(model).layout.num_parameters == count


@pytest.mark.parametrize("shape", [GREY, COLOUR])
@pytest.mark.parametrize("name", ["lenet5", "cnn"])
def test_forward_gives_log_probabilities_and_backward_reaches_every_parameter(
    name: str, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = make_model(name, shape)
    outputs = model(torch.randn(4, *shape))
    assert outputs.shape == (4, 10)
    torch.testing.assert_close(outputs.exp().sum(1), torch.ones(4))
    F.nll_loss(outputs, torch.tensor([0, 3, 5, 9])).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", ["lenet5", "cnn"])
def test_parameters_are_aligned_views_that_do_not_overlap(name: str) -> None:
    layout = FlatModule(make_model(name, GREY)).layout
    end = 0
    for parameter in layout.parameters:
        assert parameter.offset * 4 % CACHE_LINE_NBYTES == 0
        assert parameter.offset >= end
        end = parameter.offset + parameter.size
    assert layout.size >= end
    flat = torch.zeros(layout.size)
    for number, view in enumerate(layout.views(flat).values(), start=1):
        view.fill_(number)
    counts = torch.bincount(flat.int())
    assert counts.tolist()[1:] == [parameter.size for parameter in layout.parameters]


def test_a_layout_survives_json() -> None:
    layout = FlatModule(make_model("lenet5", GREY), decay=lambda name, _: name.endswith("weight")).layout
    assert Layout.from_rows(layout.to_rows()) == layout


@pytest.mark.parametrize("name", ["lenet5", "cnn"])
def test_the_model_computes_in_flat_memory(name: str) -> None:
    model = make_model(name, GREY)
    flat = FlatModule(model)
    weights, gradient = flat.initial(), torch.zeros(flat.layout.size)
    flat.bind(weights, gradient, torch.empty(0))
    for parameter_name, parameter in model.named_parameters():
        view = flat.layout.views(weights)[parameter_name]
        assert parameter.data_ptr() == view.data_ptr()
    weights.zero_()
    assert torch.equal(model.eval()(torch.randn(2, *GREY)), torch.full((2, 10), 0.1).log())


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"momentum": 0.9, "nesterov": True}, {"clip": 0.5}])
def test_gaps_between_parameters_stay_zero_through_training(
    make_dataset: Callable[..., Dataset], settings: dict[str, object]
) -> None:
    config = resolve(RunConfig(strategy="classic", batch_size=8, weight_decay=0.01, lr=0.01, threads=1, **settings))  # type: ignore[arg-type]
    task = make_task(config, make_dataset(40))
    weights, gradient = task.initial(), torch.full((task.layout.size,), torch.nan)
    used = torch.zeros(task.layout.size)
    for view in task.layout.views(used).values():
        view.fill_(1)
    gradient[used == 0] = 0
    task.bind(weights, gradient, torch.empty(0))
    rule = make_rule(config, task.layout)
    state = rule.start(weights)
    loader = task.loader(work_of(task, config).batches(0, config), config.seed, 0)
    before = weights.clone()
    for number in range(6):
        task.gradient(loader.batch(number))
        rule.apply(weights, state, gradient, Arrival(0, 0, torch.tensor(0.01), 1))
    assert (used == 0).any()
    assert (weights[used == 0] == 0).all()
    assert (weights[used == 1] != before[used == 1]).float().mean() > 0.99
