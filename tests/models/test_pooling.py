"""Pooling by oneDNN equals torch's own, bit for bit, ties included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.models.pooling import ONEDNN_THRESHOLD, max_pool_2x2


@pytest.mark.parametrize("shape", [(32, 6, 28, 28), (32, 64, 24, 24), (3, 5, 10, 10), (64, 16, 15, 17), (7, 3, 96, 96)])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    images = torch.randint(-3, 4, shape, generator=generator).float()  # few values, so that most windows tie
    ours, theirs = images.clone().requires_grad_(), images.clone().requires_grad_()
    pooled, expected = max_pool_2x2(ours), F.max_pool2d(theirs, 2)
    assert torch.equal(pooled, expected)
    upstream = torch.randn(pooled.shape, generator=generator)
    pooled.backward(upstream)
    expected.backward(upstream)
    assert ours.grad is not None and theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_both_ways_are_tried_above() -> None:
    assert 3 * 5 * 10 * 10 < ONEDNN_THRESHOLD <= 32 * 6 * 28 * 28
