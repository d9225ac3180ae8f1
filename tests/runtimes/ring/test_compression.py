"""Codecs between ranks: what one exchange leaves out comes with a later one. One rank shows it without others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.runtimes.ring.compression import RoundedSum, compress

pytestmark = pytest.mark.long  # left to `make test`

TINY = 2.0**-30  # far below the smallest number of 16 bits, 2^-24
STEPS = 400


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_gradients_too_small_for_a_codec_add_up(codec: str) -> None:
    """Through DistributedDataParallel, whose buckets are rebuilt after the first step."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    parallel, (first, second) = DistributedDataParallel(model), model.parameters()
    compress(parallel, codec, key=3)
    with torch.no_grad():
        first.fill_(1.0)
        second.fill_(1.0)
    total = torch.zeros(2, dtype=torch.float64)
    for _ in range(STEPS):
        parallel.zero_grad(set_to_none=False)
        parallel(torch.full((1, 1), TINY)).sum().backward()
        assert first.grad is not None and second.grad is not None
        total += torch.stack([first.grad.flatten()[0], second.grad.flatten()[0]]).double()
    # the first step's remainder stays behind in a bucket that DDP gave up
    torch.testing.assert_close(total / (STEPS * TINY), torch.ones(2, dtype=torch.float64), rtol=0.0, atol=0.17)


@pytest.mark.usefixtures("alone")
def test_what_was_sent_and_what_is_left_are_what_came_in() -> None:
    generator, scales = torch.Generator().manual_seed(0), torch.logspace(-12, 3, 64)
    exchange, out = RoundedSum(64, torch.float16, torch.device("cpu")), torch.empty(64)
    given, sent = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    for _ in range(50):
        update = scales * torch.randn(64, generator=generator)
        given += update.double()
        exchange.send(update).wait()
        exchange.mean(out)
        sent += out.double()
    torch.testing.assert_close(sent + exchange._error.double(), given, rtol=1e-5, atol=1e-12)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e6])
def test_a_gradient_beyond_the_range_is_not_finite_and_ends_the_run(value: float) -> None:
    exchange, out = RoundedSum(2, torch.float16, torch.device("cpu")), torch.empty(2)
    exchange.send(torch.tensor([1.0, value])).wait()
    exchange.mean(out)
    assert out[0] == 1.0 and not torch.isfinite(out[1])
