"""Residual and inception nets: published sizes, images of odd shapes, batch norm as worker state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.assembly.core import make_model
from paceline.models.convolution import SteadyBatchNorm
from paceline.models.inception import halving_pool
from paceline.settings.resolve import MODELS, TEXT_MODELS
from paceline.settings.warnings import has_batch_norm
from paceline.tasks.flat import FlatModule
from paceline.tasks.supervised import SupervisedTask

pytestmark = pytest.mark.long

GREY, COLOUR, LARGE = (1, 28, 28), (3, 32, 32), (3, 224, 224)
ODD = (3, 37, 41)
QUICK = ["resnet20", "resnet18", "resnet18-gn", "resnet50", "inception-28-small", "inception-bn"]
SLOW = sorted(name for name in MODELS if name not in (*QUICK, *TEXT_MODELS, "lenet5", "cnn"))
EVERY = QUICK + [pytest.param(name, marks=pytest.mark.real) for name in SLOW]
ODDLY = [pytest.param("resnet50", marks=pytest.mark.real), *(name for name in EVERY if name != "resnet50")]


def convolution(inputs: int, outputs: int, kernel: int, bias: bool = True) -> int:
    """Weights, perhaps a bias, and scale and shift of the norm behind."""
    return inputs * outputs * kernel * kernel + outputs * bias + 2 * outputs


def basic_stage(inputs: int, width: int, depth: int) -> int:
    halving = convolution(inputs, width, 1, False) if inputs != width else 0
    first = convolution(inputs, width, 3, False) + convolution(width, width, 3, False)
    return first + halving + (depth - 1) * 2 * convolution(width, width, 3, False)


def bottleneck_stage(inputs: int, width: int, depth: int) -> int:
    def block(entering: int) -> int:
        return convolution(entering, width, 1) + convolution(width, width, 3) + convolution(width, 4 * width, 1)

    return block(inputs) + convolution(inputs, 4 * width, 1) + (depth - 1) * block(4 * width)


def basic_count(channels: int, depths: tuple[int, int, int, int], classes: int = 10) -> int:
    stages = zip((64, 64, 128, 256), (64, 128, 256, 512), depths, strict=True)
    return convolution(channels, 64, 7, False) + sum(basic_stage(*stage) for stage in stages) + 513 * classes


def bottleneck_count(channels: int, depths: tuple[int, int, int, int], classes: int = 10) -> int:
    stages = zip((64, 256, 512, 1024), (64, 128, 256, 512), depths, strict=True)
    return convolution(channels, 64, 7) + sum(bottleneck_stage(*stage) for stage in stages) + 2049 * classes


def small_inception_count(channels: int) -> int:
    total, width = convolution(channels, 96, 3), 96
    for kind, a, b in [
        *[("S", 32, 32), ("S", 32, 48), ("D", 80, 0), ("S", 112, 48), ("S", 96, 64), ("S", 80, 80), ("S", 48, 96)],
        *[("D", 96, 0), ("S", 176, 160), ("S", 176, 160)],
    ]:
        if kind == "S":
            total, width = total + convolution(width, a, 1) + convolution(width, b, 3), a + b
        else:
            total, width = total + convolution(width, a, 3), a + width
    assert width == 336
    return total + 337 * 10


def inception_count() -> int:
    total, width = convolution(3, 64, 7) + convolution(64, 64, 1) + convolution(64, 192, 3), 192
    for single, reduced, triple, double_reduced, double, projected, out in [
        (64, 64, 64, 64, 96, 32, 256),
        (64, 64, 96, 64, 96, 64, 320),
        (0, 128, 160, 64, 96, 0, 576),
        (224, 64, 96, 96, 128, 128, 576),
        (192, 96, 128, 96, 128, 128, 576),
        (160, 128, 160, 128, 160, 128, 608),
        (96, 128, 192, 160, 192, 128, 608),
        (0, 128, 192, 192, 256, 0, 1056),
        (352, 192, 320, 160, 224, 128, 1024),
        (352, 192, 320, 192, 224, 128, 1024),
    ]:
        total += convolution(width, single, 1) + convolution(width, projected, 1)
        total += convolution(width, reduced, 1) + convolution(reduced, triple, 3)
        total += convolution(width, double_reduced, 1) + convolution(double_reduced, double, 3)
        total += convolution(double, double, 3)
        assert single + triple + double + (projected or width) == out
        width = out
    return total + 1025 * 1000


@pytest.fixture
def unfilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are built without drawing their weights, which takes most of the time."""
    for name in ("kaiming_normal_", "kaiming_uniform_"):
        monkeypatch.setattr(nn.init, name, lambda tensor, *_, **__: tensor)


@pytest.mark.usefixtures("unfilled")
@pytest.mark.parametrize(
    ("name", "shape", "classes", "count", "published"),
    [
        ("resnet18", GREY, 10, basic_count(1, (2, 2, 2, 2)), "11.18"),
        ("resnet20", COLOUR, 10, 269_722, "0.27"),
        ("resnet20-gn", COLOUR, 10, 269_722, "0.27"),
        ("resnet34", COLOUR, 10, basic_count(3, (3, 4, 6, 3)), "21.29"),
        ("resnet18", LARGE, 1000, 11_689_512, "11.69"),
        ("resnet50", GREY, 10, bottleneck_count(1, (3, 4, 6, 3)), "23.55"),
        ("resnet50-gn", GREY, 10, bottleneck_count(1, (3, 4, 6, 3)), "23.55"),
        ("resnet101", GREY, 10, bottleneck_count(1, (3, 4, 23, 3)), "42.57"),
        ("inception-28-small", (3, 28, 28), 10, small_inception_count(3), "1.65"),
        ("inception-bn", LARGE, 1000, inception_count(), "11.30"),
    ],
)
def test_the_number_of_parameters_is_that_of_the_layer_table(
    name: str, shape: tuple[int, ...], classes: int, count: int, published: str
) -> None:
    model = make_model(name, shape, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert f"{count / 1e6:.2f}" == published


@pytest.mark.parametrize("name", EVERY)
def test_backward_reaches_every_parameter_that_is_trained(name: str) -> None:
    torch.manual_seed(0)
    model = make_model(name, ODD, 7)
    outputs = model(torch.randn(3, *ODD))
    torch.testing.assert_close(outputs.exp().sum(1), torch.ones(3))
    assert outputs.shape == (3, 7)
    F.nll_loss(outputs, torch.tensor([0, 3, 6])).backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), parameter_name
            assert parameter.grad.abs().sum() > 0, parameter_name
        else:
            assert parameter_name.endswith("conv.bias") and not parameter.any(), "only a bias before batch norm"


@pytest.mark.parametrize("name", ODDLY)
def test_odd_images_and_small_batches_train_and_stay_finite(name: str) -> None:
    torch.manual_seed(0)
    model = make_model(name, GREY, 10)
    for batch, height, width in [(1, 28, 28), (2, 9, 17), (3, 1, 5), (1, 31, 2)]:
        model.zero_grad()
        outputs = model(torch.randn(batch, 1, height, width))
        assert outputs.shape == (batch, 10)
        F.nll_loss(outputs, torch.zeros(batch, dtype=torch.int64)).backward()
        assert torch.isfinite(outputs).all(), (batch, height, width)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        assert torch.isfinite(model.eval()(torch.randn(2, *GREY))).all()


@pytest.mark.real
@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101", "inception-bn"])
def test_images_of_224(name: str) -> None:
    torch.manual_seed(0)
    model = make_model(name, LARGE, 1000)
    outputs = model(torch.randn(2, *LARGE))
    F.nll_loss(outputs, torch.tensor([3, 900])).backward()
    assert torch.isfinite(outputs).all() and outputs.shape == (2, 1000)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.usefixtures("unfilled")
@pytest.mark.parametrize("name", sorted(set(MODELS) - set(TEXT_MODELS)))
def test_which_models_have_batch_norm(name: str) -> None:
    modules = make_model(name, GREY).modules()
    assert any(isinstance(module, nn.BatchNorm2d) for module in modules) == has_batch_norm(name)


def test_running_statistics_ride_in_the_bound_state_and_a_saved_model_gives_what_was_evaluated() -> None:
    torch.manual_seed(0)
    data = torch.randn(6, 1, 9, 9) + 1.0, torch.arange(6) % 3
    task = SupervisedTask(make_model("inception-28-small", (1, 9, 9), 3), F.nll_loss, data, data)
    weights, gradient, state = task.initial(), torch.zeros(task.layout.size), torch.zeros(task.state_size)
    task.bind(weights, gradient, state)
    assert task.state_size >= 2 * sum(m.num_features for m in task.model.modules() if isinstance(m, nn.BatchNorm2d))
    for _ in range(2):
        task.flat.clear()
        task.loss(task.model(data[0]), data[1]).backward()
        task.flat.collect()
        weights.sub_(gradient, alpha=0.01)
    assert task.flat.state_layout.views(state)["stem.norm.running_mean"].abs().sum() > 0
    scores = task.evaluate(weights, state, data)
    fresh = make_model("inception-28-small", (1, 9, 9), 3)
    fresh.load_state_dict(task.state_dict(weights, state))
    assert F.nll_loss(fresh.eval()(data[0]), data[1]).item() == pytest.approx(scores.loss, rel=1e-5)


def test_a_bias_before_batch_norm_is_counted_and_saved_but_neither_trained_nor_pushed() -> None:
    model = make_model("inception-28-small", GREY)
    biases = {name for name, _ in model.named_parameters() if name.endswith("conv.bias")}
    assert len(biases) == 19 and biases <= set(model.state_dict())
    assert not biases & {parameter.name for parameter in FlatModule(model).layout.parameters}
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).double()
    (plain(torch.randn(4, 2, 8, 8).double()) * torch.randn(4, 3, 6, 6)).sum().backward()
    assert plain[0].bias.grad.abs().max() < 1e-12 < plain[0].weight.grad.abs().min()


def test_batch_norm_is_that_of_torch_but_takes_one_value_by_its_running_statistics() -> None:
    torch.manual_seed(0)
    ours, theirs = SteadyBatchNorm(4), nn.BatchNorm2d(4)
    for _ in range(3):
        images = torch.randn(2, 4, 3, 3) * 2 + 1
        assert torch.equal(ours(images), theirs(images))
    one = torch.randn(1, 4, 1, 1)
    statistics = ours.running_mean.clone()
    with pytest.raises(ValueError, match="more than 1 value"):
        theirs(one)
    assert torch.equal(ours(one), theirs.eval()(one))
    assert torch.equal(ours.running_mean, statistics)


@pytest.mark.parametrize(("height", "width"), [(28, 28), (13, 28), (7, 7), (1, 2), (56, 3)])
def test_the_halving_pool_is_as_large_as_a_convolution_of_stride_two(height: int, width: int) -> None:
    images = torch.randn(1, 1, height, width)
    pooled = halving_pool(images)
    assert pooled.shape == nn.Conv2d(1, 1, 3, 2, padding=1)(images).shape
    assert pooled.max() == images.max()


def test_group_norm_sees_each_image_by_itself() -> None:
    torch.manual_seed(0)
    model, images = make_model("resnet18-gn", GREY), torch.randn(3, 1, 15, 15)
    torch.testing.assert_close(model(images)[1:2], model(images[1:2]), rtol=1e-4, atol=1e-5)
