"""Codecs in own loops: what a task with the same gradients would exchange, with the loop's own steps around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from paceline.assembly.own_loop import loop_server
from paceline.assembly.run import codecs_of
from paceline.core.buffers import WorkerBuffers
from paceline.core.compression import WorkerCompression
from paceline.core.messages import Disposition, Join, Push
from paceline.core.own_loop.compression import PartOfModel, gradient_digest
from paceline.core.server import Server
from paceline.core.worker import LocalWorker
from paceline.interfaces import Batch, Layout, State
from paceline.runs.checkpoint import restore, take_checkpoint
from paceline.runtimes.scripts.session import Session
from tests.support.own_loops import OneServer

CODECS = ("fp16", "bf16", "int8", "sign", "topk:0.1", "lowrank:2")
SHAPE = (12, 30)
Order = tuple[int, ...]


class Slopes(nn.Module):
    """A model whose gradient at a step is `slope(worker, step)`, whatever its weights are."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)))

    def backward(self, worker: int, step: int) -> None:
        (self.matrix * slope(worker, step)).sum().backward()  # type: ignore[no-untyped-call]


def slope(worker: int, step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1000 * worker + step))


class SlopesTask:
    """The same as a task."""

    state_size = 0

    def __init__(self, layout: Layout, worker: int) -> None:
        self.layout, self._worker = layout, worker
        self.local_state: State = {}

    def initial(self) -> Tensor:
        raise AssertionError("the server has the weights")

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._gradient = self.layout.views(gradient)

    def batch(self, number: int) -> Batch:
        return Batch(None, None, 1, number)

    def gradient(self, batch: Batch) -> None:
        for view in self._gradient.values():
            view.copy_(slope(self._worker, batch.key))


def in_loops(
    folder: Path, order: Order, then: Callable[[Session, int], None] | None = None, **settings: Any
) -> OneServer:
    """Make steps of own loops without an optimizer, in this order of workers."""
    one = OneServer(folder, strategy="async", workers=2, **settings)
    models, sessions, made = [Slopes() for _ in range(2)], [one.session(worker) for worker in range(2)], [0, 0]
    for session, model in zip(sessions, models, strict=True):
        session.prepare(model, steps=1000)
    for worker in order:
        models[worker].backward(worker, made[worker])
        sessions[worker].step(0.5)
        made[worker] += 1
        if then is not None:
            then(sessions[worker], worker)
    return one


def in_tasks(one: OneServer, order: Order) -> tuple[Server, list[Disposition]]:
    """The same with tasks, on another server that is made like the first."""
    facts = one.facts[0]
    layout = Layout.from_rows(facts["layout"])
    weights = torch.zeros(layout.size)
    layout.views(weights)["matrix"].copy_(Slopes().matrix.detach())
    server = loop_server(one.config, facts, weights)
    server.roster.pending.clear()
    workers = []
    for number in range(2):
        task, join = SlopesTask(layout, number), Join(number, 0, None, own_loop=True)
        workers.append(LocalWorker(task, task, join, codecs=codecs_of(one.config, layout)))
        deliver(server, workers, join)
    found = []
    for number in order:
        push = workers[number].push()
        assert push is not None
        found.append(deliver(server, workers, push))
    return server, found


def deliver(server: Server, workers: list[LocalWorker], message: Join | Push) -> Disposition:
    outcome = server.handle(message)
    for reply in outcome.replies:
        server.send_weights(reply, workers[reply.worker].memory)
        workers[reply.worker].pending = reply
    return outcome.disposition


@pytest.mark.parametrize("codec", CODECS)
def test_a_loop_exchanges_what_a_task_with_its_gradients_does(tmp_path: Path, codec: str) -> None:
    order = (0, 1, 1, 0, 1, 0, 0, 0, 1)
    settings = {"codec": codec, "pull_codec": "int8", "rule": "plain", "momentum": 0.5, "lr": 0.1}
    one = in_loops(tmp_path, order, **settings)
    server, _ = in_tasks(one, order)
    assert one.server is not None and torch.equal(one.server.weights, server.weights)
    moved = (one.server.bytes_pushed, one.server.bytes_pulled)
    assert moved == (server.bytes_pushed, server.bytes_pulled) and moved[0] < 4 * 9 * server.weights.numel()
    for worker in range(2):
        assert one.server.differences is not None and server.differences is not None
        assert torch.equal(one.memories[worker].weights, one.server.differences.held[worker])
        assert torch.equal(one.memories[worker].weights, server.differences.held[worker])


def test_without_a_codec_every_bit_is_as_it_was(tmp_path: Path) -> None:
    order = (0, 1, 1, 0)
    bits = [
        in_loops(tmp_path / str(number), order, rule="plain", **settings).server
        for number, settings in enumerate([{}, {"codec": "none", "pull_codec": "none"}])
    ]
    assert bits[0] is not None and bits[1] is not None
    assert torch.equal(bits[0].weights, bits[1].weights) and bits[0].bytes_pushed == bits[1].bytes_pushed


def test_a_dropped_push_is_taken_back_from_the_error_feedback(tmp_path: Path) -> None:
    """Worker 1 is too stale for the rule at its first push: its gradient is lost, and nothing else."""
    order = (0, 0, 0, 1, 1, 0, 1)
    one = in_loops(tmp_path, order, codec="topk:0.1", rule="ringmaster:2", lr=0.1)
    assert one.server is not None and one.server.dropped == 1
    made = {0: iter(range(9)), 1: iter(range(9))}  # a task computes the batch of a dropped push again, a loop goes on
    layout = Layout.from_rows(one.facts[0]["layout"])
    codec = codecs_of(one.config, layout).push
    assert codec is not None
    by_hand = torch.zeros(layout.size)
    layout.views(by_hand)["matrix"].copy_(Slopes().matrix.detach())
    memories = [codec.start(codecs_of(one.config, layout).key(worker)) for worker in range(2)]
    out, decoded, momentum = torch.zeros(codec.capacity, dtype=torch.uint8), torch.zeros(layout.size), 0.0
    velocity = torch.zeros(layout.size)
    for place, worker in enumerate(order):
        gradient = torch.zeros(layout.size)
        layout.views(gradient)["matrix"].copy_(slope(worker, next(made[worker])))
        if place == 3:
            continue
        codec.decode(out[: codec.encode(gradient, memories[worker], out)], decoded)
        momentum = one.config.momentum
        velocity = velocity * momentum + decoded
        by_hand -= 0.1 * velocity
    torch.testing.assert_close(one.server.weights, by_hand)


@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "lowrank:2"])
def test_a_skipped_step_leaves_the_error_feedback_and_the_weights_alone(tmp_path: Path, codec: str) -> None:
    """As of a `GradScaler` that found an infinity: the same steps with two skipped ones in between."""

    def train(folder: Path, skips: tuple[int, ...]) -> Server:
        one, model = OneServer(folder, strategy="async", workers=1, codec=codec, rule="plain"), Slopes()
        optimizer, session = SGD(model.parameters(), lr=0.1), one.session(0)
        session.prepare(model, optimizer)
        for step in range(6):
            if step in skips:
                model.matrix.grad = torch.full(SHAPE, torch.inf)
                session._push(0, None, None, None, True)
            optimizer.zero_grad()
            model.backward(0, step)
            optimizer.step()
            if not step:
                assert one.server is not None and one.server.updater.decoder is not None
                kept = list(one.server.updater.decoder._free)  # so that no other object gets their ids
                buffers = [id(tensor) for tensor in kept]
        assert one.server is not None and one.server.updater.decoder is not None
        assert [id(tensor) for tensor in one.server.updater.decoder._free] == buffers, "each push gave its buffer back"
        return one.server

    plain, skipping = train(tmp_path / "plain", ()), train(tmp_path / "skipping", (2, 4))
    assert torch.equal(plain.weights, skipping.weights) and skipping.skipped == 2


def two_optimizers(one: OneServer, seeds: tuple[int, ...], steps: int) -> list[Tensor]:
    models = [Slopes(seed) for seed in seeds]
    optimizers = [SGD(model.parameters(), lr=0.1, momentum=0.5) for model in models]
    session = one.session(0)
    session.prepare(*models, *optimizers)
    for step in range(steps):
        for seed, model, optimizer in zip(seeds, models, optimizers, strict=True):
            optimizer.zero_grad()
            model.backward(seed, step)
            optimizer.step()
    return [model.matrix.detach().clone() for model in models]


@pytest.mark.parametrize(("push", "pull"), [("int8", "topk:0.1"), ("topk:0.1", None), (None, "sign")])
def test_each_of_two_optimizers_has_codecs_of_its_own(tmp_path: Path, push: str | None, pull: str | None) -> None:
    settings = {"strategy": "async", "workers": 1, "codec": push, "pull_codec": pull, "rule": "plain"}
    both = OneServer(tmp_path / "both", **settings)
    together = two_optimizers(both, (1, 2), 7)
    moved = [0, 0]
    for seed, found in zip((1, 2), together, strict=True):
        alone = OneServer(tmp_path / str(seed), **settings)
        assert torch.equal(two_optimizers(alone, (seed,), 7)[0], found)
        assert alone.server is not None
        moved = [moved[0] + alone.server.bytes_pushed, moved[1] + alone.server.bytes_pulled]
    assert both.server is not None and [both.server.bytes_pushed, both.server.bytes_pulled] == moved


def test_a_checkpoint_has_the_sent_weights_of_every_optimizer(tmp_path: Path) -> None:
    settings = {"strategy": "async", "workers": 1, "codec": "int8", "pull_codec": "int8", "rule": "plain"}
    one = OneServer(tmp_path, **settings)
    two_optimizers(one, (1, 2), 5)
    assert one.server is not None
    taken = take_checkpoint(one.server, one.memories, 0, 0.0)
    again = loop_server(one.config, one.facts[0], torch.zeros_like(one.server.weights))
    restore(again, taken)
    for old, new in zip(one.server.by_optimizer, again.by_optimizer, strict=True):
        assert old.differences is not None and new.differences is not None
        assert torch.equal(old.differences.held[0], new.differences.held[0])
        for name, tensor in old.differences.states[0].items():
            assert torch.equal(tensor, new.differences.states[0][name])


def test_evaluation_shows_all_weights_and_training_goes_on_with_the_sent_ones(tmp_path: Path) -> None:
    order = (0, 1, 0, 1, 1, 0)
    settings = {"codec": "int8", "pull_codec": "topk:0.1", "rule": "plain", "lr": 0.1}

    def evaluate(session: Session, worker: int) -> None:
        with session.eval_weights() as model:
            server = session._env.transport._one.server  # type: ignore[attr-defined]
            assert torch.equal(model.matrix.detach().flatten(), server.weights[: model.matrix.numel()])

    looked = in_loops(tmp_path / "looked", order, evaluate, **settings)
    plain = in_loops(tmp_path / "plain", order, **settings)
    assert looked.server is not None and plain.server is not None
    assert torch.equal(looked.server.weights, plain.server.weights)


@pytest.mark.parametrize("codec", [None, *CODECS])
def test_equal_gradients_of_two_workers_are_known_whatever_the_codec(tmp_path: Path, codec: str | None) -> None:
    one = in_loops(tmp_path, (), codec=codec)
    layout = Layout.from_rows(one.facts[0]["layout"])
    assert one.server is not None

    def digest(worker: int, gradient: Tensor) -> bytes | None:
        end = WorkerCompression(codecs_of(one.config, layout), worker, part := PartOfModel(layout))
        memory, flat = WorkerBuffers.private(end.sizes), torch.zeros(layout.size)
        end.bind(memory, part, flat)
        layout.views(flat if codec is not None else memory.update)["matrix"].copy_(gradient)
        push = Push(worker, 0, 0, 0, 1, 0.5, end.send(0), torch.empty(0))
        assert one.server is not None
        return gradient_digest(push, one.server.updater)

    first = digest(0, slope(0, 0))
    assert first == digest(1, slope(0, 0)) and first != digest(1, slope(1, 0))
    assert digest(0, torch.zeros(SHAPE)) is None or codec == "sign", "the sign of zero is its sign bit"
