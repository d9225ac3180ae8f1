"""Every rule over many runs inside a captured graph: the CPU's weights, and nothing that waits for the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.interfaces import Arrival, Rule
from tests.support.every_rule import RULES

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
RUNS, PLACES, SIZE, UPDATES, WARM_UP = 4, 3, 64, 60, 3
LEAVES = {20: (0, 1), 30: (2, 0)}
"""Before which update whom which run loses."""


def drawn(device: str) -> list[Tensor]:
    """Of every update: workers, staleness, lr, number live, gradients."""
    draw = torch.Generator().manual_seed(1)
    workers = torch.randint(0, PLACES, (UPDATES, RUNS), generator=draw)
    staleness = torch.randint(0, 5, (UPDATES, RUNS, 1), generator=draw, dtype=torch.int32)
    lr = 0.05 * torch.rand(UPDATES, RUNS, 1, generator=draw)
    live = torch.full((UPDATES, RUNS, 1), PLACES, dtype=torch.int32)
    gradients = 0.1 * torch.randn(UPDATES, RUNS, SIZE, generator=draw)
    return [tensor.to(device) for tensor in (workers, staleness, lr, live, gradients)]


class Runs:
    """Many runs of one rule, a counter on the device saying which update is next."""

    def __init__(self, rule: Rule, device: str) -> None:
        self.rule = rule
        self.weights = torch.linspace(-1, 1, RUNS * SIZE).view(RUNS, SIZE).to(device)
        self.state = rule.start(self.weights)
        self.sent = torch.zeros_like(self.weights)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.feed = drawn(device)

    def leave(self, run: int, worker: int) -> None:
        self.rule.leave({name: tensor[run] for name, tensor in self.state.items()}, worker)

    def update(self) -> None:
        worker, staleness, lr, live, gradient = (rows.index_select(0, self.at)[0] for rows in self.feed)
        self.rule.apply(self.weights, self.state, gradient, Arrival(worker, staleness, lr, live))
        self.rule.reply_weights(self.weights, self.state, worker, self.sent)
        self.at.add_(1)

    def found(self) -> Tensor:
        return torch.stack([self.weights, self.sent, self.rule.evaluated(self.weights, self.state)]).cpu()


@pytest.mark.parametrize("name", RULES)
def test_a_captured_update_is_that_of_the_cpu_and_never_waits(name: str) -> None:
    here, there = Runs(RULES[name](PLACES), "cpu"), Runs(RULES[name](PLACES), "cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    for number in range(UPDATES):
        if number in LEAVES:
            here.leave(*LEAVES[number])
        here.update()
        if number == WARM_UP:
            with torch.cuda.graph(graph, stream=stream):
                there.update()
        with torch.cuda.stream(stream):
            torch.cuda.set_sync_debug_mode("error")
            try:
                if number in LEAVES:
                    there.leave(*LEAVES[number])
                if number < WARM_UP:
                    there.update()
                else:
                    graph.replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.testing.assert_close(there.found(), here.found(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_one_run_on_a_gpu_is_that_of_the_cpu(name: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        rule, feed = RULES[name](PLACES), drawn(device)
        weights = torch.linspace(-1, 1, SIZE).to(device)
        state, sent = rule.start(weights), torch.zeros(SIZE, device=device)
        for worker, staleness, lr, live, gradient in zip(*feed, strict=True):
            who = int(worker[0])
            rule.apply(weights, state, gradient[0], Arrival(who, int(staleness[0]), lr[0, 0], int(live[0])))
            rule.reply_weights(weights, state, who, sent)
        rule.leave(state, 1)
        found.append(torch.stack([weights, sent]).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
