"""Running statistics estimated again: what is averaged, what is left alone, and what is put back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.tasks.norm_statistics import norm_layers, reestimate


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
