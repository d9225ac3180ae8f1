"""Running statistics estimated again: what is averaged, what is left alone, and what is put back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.tasks import norm_statistics
from paceline.tasks.norm_statistics import norm_layers, reestimate
from paceline.tasks.supervised import SupervisedTask


class Noisy(nn.Module):
    """A norm behind dropout, a norm that only training reaches, and a norm whose statistics the user has frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(3, momentum=0.2)
        self.auxiliary, self.frozen = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval()

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.frozen(self.norm(self.dropout(inputs)))
        return self.auxiliary(found) if self.training else found


def batches(count: int = 5) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 3) * 3 + 2 for _ in range(count)]


def test_statistics_are_the_plain_mean_over_the_batches_without_dropout() -> None:
    model, data = Noisy(), batches()
    model(torch.randn(8, 3) + 100)  # what the layer knew before does not count
    generator = torch.get_rng_state()
    reestimate(model, norm_layers(model), data, model)
    assert torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close(model.norm.running_mean, torch.stack([part.mean(0) for part in data]).mean(0))
    torch.testing.assert_close(model.norm.running_var, torch.stack([part.var(0) for part in data]).mean(0))


def test_layers_that_no_batch_reaches_or_the_user_has_frozen_keep_their_statistics() -> None:
    model = Noisy()
    for layer, value in ((model.auxiliary, 5.0), (model.frozen, 7.0)):
        layer.running_mean.fill_(value)
    reestimate(model, norm_layers(model), batches(), model)
    assert model.auxiliary.running_mean.tolist() == [5.0] * 3
    assert model.frozen.running_mean.tolist() == [7.0] * 3


def test_modes_momenta_counters_and_hooks_are_put_back() -> None:
    model = Noisy()
    model(torch.randn(8, 3))
    modes = [module.training for module in model.modules()]
    reestimate(model, norm_layers(model), batches(), model)
    assert [module.training for module in model.modules()] == modes
    assert (model.norm.momentum, model.norm.num_batches_tracked.item()) == (0.2, 1)
    assert not model.norm._forward_pre_hooks


def test_everything_is_put_back_if_the_model_raises() -> None:
    model = Noisy()
    with pytest.raises(RuntimeError):
        reestimate(model, norm_layers(model), [torch.randn(8, 4)], model)
    assert model.training
    assert not model.frozen.training
    assert model.norm.momentum == 0.2


def test_statistics_that_are_no_longer_finite_are_replaced() -> None:
    model = Noisy()
    model.norm.running_mean.fill_(torch.nan)
    model.norm.running_var.fill_(torch.inf)
    reestimate(model, norm_layers(model), batches(), model)
    assert model.norm.running_mean.isfinite().all()
    assert model.norm.running_var.isfinite().all()


def test_instance_norms_that_track_their_statistics_are_estimated_too() -> None:
    model, data = nn.InstanceNorm1d(3, track_running_stats=True), [torch.randn(4, 3, 9) + 2 for _ in range(3)]
    reestimate(model, norm_layers(model), data, model)
    expected = torch.stack([part.mean((0, 2)) for part in data]).mean(0)
    torch.testing.assert_close(model.running_mean, expected)


def test_a_layer_used_twice_in_one_call_counts_both() -> None:
    norm = nn.BatchNorm1d(3)
    first, second = batches(2)
    reestimate(norm, norm_layers(norm), [(first, second)], lambda pair: [norm(part) for part in pair])
    torch.testing.assert_close(norm.running_mean, (first.mean(0) + second.mean(0)) / 2)


def test_layers_without_running_statistics_are_not_touched() -> None:
    assert not norm_layers(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3)))


class Convolved(nn.Module):
    """Two convolutions with norms, and a buffer that is no statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Conv2d(2, 16, 3), nn.BatchNorm2d(16)
        self.second, self.two = nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)
        self.register_buffer("scale", torch.full((3,), 0.1))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.two(self.second(F.relu(self.one(self.first(images)))))
        return hidden.mean((2, 3)) * self.scale[0]


def convolved_task() -> SupervisedTask:
    torch.manual_seed(3)
    data = torch.randn(700, 2, 9, 9) * 2 + 1, torch.randint(0, 8, (700,))
    return SupervisedTask(Convolved(), F.cross_entropy, data)


def test_an_estimate_is_a_function_of_weights_and_seed_on_any_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number, threads in ((1, 1), (3, 1), (3, 2)):
        monkeypatch.setattr(norm_statistics, "cores", lambda number=number: number)
        task, before = convolved_task(), torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found.append(task.estimated(task.initial(), torch.zeros(task.state_size)))
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_an_estimate_describes_the_activations_of_the_whole_train_set() -> None:
    task = convolved_task()
    weights, state = task.initial(), torch.zeros(task.state_size)
    task.flat.state_layout.views(state)["scale"].fill_(0.7)
    with torch.inference_mode():  # as in the server
        views = task.flat.state_layout.views(task.estimated(weights, state))
    hidden = task.model.first(task.train[0]).detach()
    torch.testing.assert_close(views["one.running_mean"], hidden.mean((0, 2, 3)), rtol=0.05, atol=0.02)
    torch.testing.assert_close(views["one.running_var"], hidden.var((0, 2, 3)), rtol=0.05, atol=0.02)
    normed = F.relu(F.batch_norm(hidden, views["one.running_mean"], views["one.running_var"]))
    expected = task.model.second(normed).detach()
    torch.testing.assert_close(views["two.running_mean"], expected.mean((0, 2, 3)), rtol=0.05, atol=0.02)
    assert views["scale"].tolist() == pytest.approx([0.7] * 3)
    assert not task.flat.state_layout.views(state)["one.running_var"].any()  # what was given is left as it was


def test_an_estimate_leaves_the_model_as_it_was() -> None:
    task = convolved_task()
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    task.estimated(task.initial() * 2, torch.zeros(task.state_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.model.state_dict().items())
    assert all(module.training for module in task.model.modules())


def test_a_model_that_cannot_be_copied_is_estimated_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_statistics, "cores", lambda: 3)
    task, odd = convolved_task(), convolved_task()
    odd.model.handle = (number for number in range(3))  # a generator cannot be copied
    states = [one.estimated(one.initial(), torch.zeros(one.state_size)) for one in (task, odd)]
    assert torch.equal(*states)


def test_the_same_weights_are_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task = convolved_task()
    weights, state = task.initial(), torch.zeros(task.state_size)
    live = [task.estimated(one, state) for one in (weights, weights * 2)]
    monkeypatch.setattr(task._statistics, "_estimate", lambda *_: pytest.fail("estimated again"))
    assert torch.equal(task.estimated(weights.clone(), state), live[0])
    assert torch.equal(task.estimated(weights * 2, state), live[1])
