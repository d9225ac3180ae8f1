"""Several servers and a codec: pushes cut, replies put together again, and every bit that one server has."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.assembly.core import make_policy, make_rule, make_training
from paceline.assembly.run import codecs_of, make_roster
from paceline.config import RunConfig, to_dict
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.compression import PredecodedPushes
from paceline.core.messages import Input, Join, Leave, Push, Reply, Stop
from paceline.core.schedules import Budget
from paceline.core.server import Exchange, Server, restore_server, server_facts
from paceline.interfaces import pack
from paceline.runtimes.sharded.client import _ShardConnection
from paceline.runtimes.sharded.orders import at_work, is_finite, poison, sent_to
from paceline.runtimes.sharded.shard import make_part
from paceline.runtimes.sharded.sharded_rule import ShardedRule
from paceline.runtimes.sharded.spans import SpanCodecs, coding_of, grain_of, part_of, spans_of
from paceline.settings.resolve import resolve
from tests.support.rings import long_but

LAYOUT = pack([("a", (40, 33), True), ("b", (90,), False), ("c", (17, 21), True)])
EMPTY = torch.empty(0)
FILLED = torch.zeros(LAYOUT.size)
for view in LAYOUT.views(FILLED).values():
    view.fill_(1.0)  # gaps hold zeros and stay zero
BUDGET = Budget(10**6, epoch_samples=100)


def config_of(codec: str | None, pull: str | None, **values: Any) -> RunConfig:
    known: dict[str, Any] = {"strategy": "async", "rule": "foresight-cached", "workers": 3, "lr": 0.02, **values}
    return resolve(replace(RunConfig(dataset="fashion-mnist-sample", codec=codec, pull_codec=pull), **known))


def whole_server(config: RunConfig) -> Server:
    weights, rule = torch.linspace(-1.0, 1.0, LAYOUT.size) * FILLED, make_rule(config, LAYOUT)
    training, exchange = make_training(config, BUDGET), Exchange(codecs_of(config, LAYOUT))
    return Server(weights, rule, make_policy(config), training, make_roster(config), exchange)


class Parts:
    """The servers of a run, without their sockets."""

    def __init__(self, config: RunConfig, servers: int) -> None:
        first = whole_server(config)
        self.spans = spans_of(LAYOUT.size, servers, grain_of(config))
        rule = make_rule(config, part_of(LAYOUT, self.spans[0]))
        self.codings = [coding_of(config, LAYOUT, span) for span in self.spans]
        self.ranged = ShardedRule(first.rule, rule, self.spans[0], first.weights, first.rule_state)
        self.servers, self.opened = [first], [self._opened(self.codings[0], first.weights[self.spans[0]])]
        for span in self.spans[1:]:
            begin = {"config": to_dict(config), "layout": LAYOUT.to_rows(), "span": [span.start, span.stop]}
            begin |= {"skew": None, "budget": asdict(BUDGET), "threads": 1}
            server, _, opened = make_part(json.loads(json.dumps(begin)))
            restore_server(
                server, server_facts(first), first.weights[span], self.ranged.of_span(first.rule_state, span)
            )
            self.opened.append(opened)
            self.servers.append(server)
        pull = self.codings[0].pull
        first.updater.restrict_to(self.ranged, self.spans[0], self.opened[0], pull.codec if pull is not None else None)

    @staticmethod
    def _opened(coding: SpanCodecs, like: Tensor) -> PredecodedPushes | None:
        return PredecodedPushes(coding.push, like) if coding.push is not None else None


class Worker:
    """What a worker has of its own: a memory for all servers, or one for each."""

    def __init__(self, config: RunConfig, number: int, parts: Parts) -> None:
        codecs = codecs_of(config, LAYOUT)
        self.memory = WorkerBuffers.private(BufferSizes(LAYOUT.size, 0, *codecs.capacities))
        self.whole = WorkerBuffers.private(BufferSizes(LAYOUT.size, 0, *codecs.capacities))
        rows = zip(parts.spans, parts.codings, strict=True)
        self.parts = [_ShardConnection(None, span, coding) for span, coding in rows]  # type: ignore[arg-type]
        self.slots = [part.of(self.whole, with_rest=False) for part in self.parts]
        self.codecs = codecs
        self.left_out = codecs.push.start(codecs.key(number)) if codecs.push is not None else {}

    def encode(self, gradient: Tensor) -> Tensor:
        if self.codecs.push is None:
            return gradient
        return self.memory.update[: self.codecs.push.encode(gradient, self.left_out, self.memory.update)]

    def receive(self) -> None:
        """Both memories come to the same weights."""
        for part in self.parts:
            part.insert(self.whole)
        for memory in (self.memory, self.whole):
            if memory.num_pulled:
                assert self.codecs.pull is not None
                change = torch.zeros(LAYOUT.size)
                self.codecs.pull.decode(memory.pulled[: memory.num_pulled], change)
                memory.weights.add_(change)
                memory.num_pulled = 0
        assert torch.equal(self.memory.weights, self.whole.weights)


class Course:
    """Workers that push in any order, leave and come back: the same to the whole server and to its parts."""

    def __init__(self, config: RunConfig, servers: int, seed: int) -> None:
        self.config, self.order = config, Random(seed)
        self.whole, self.parts = whole_server(config), Parts(config, servers)
        self.workers: dict[int, Worker] = {}
        self.replies: dict[int, Reply] = {}
        self.incarnations = [0] * (config.workers or 1)

    def feed(self, message: Input) -> None:
        updates = self._cut(message) if isinstance(message, Push) else []
        outcome = self.whole.handle(message)
        for reply in outcome.replies:
            self.whole.send_weights(reply, self.workers[reply.worker].memory)
        for number, server in enumerate(self.parts.servers):
            told = message._replace(update=updates[number]) if isinstance(message, Push) else message
            assert server.handle(told).replies == outcome.replies
            for reply in outcome.replies:
                worker = self.workers[reply.worker]
                slot = worker.slots[number]
                server.send_weights(
                    reply, slot if number else slot.full_view(worker.whole.weights, self.parts.spans[0])
                )
        for reply in outcome.replies:
            self.workers[reply.worker].receive()
            self.replies[reply.worker] = reply

    def _cut(self, push: Push) -> list[Tensor]:
        """As its servers have the parts of it: opened, and all spoiled if one is not finite."""
        pieces = [part.extract(push.update).clone() for part in self.workers[push.worker].parts]
        opened = [
            one.open(piece) if one is not None else piece for one, piece in zip(self.parts.opened, pieces, strict=True)
        ]
        if self.parts.opened[0] is not None:
            shared = self.parts.codings[0].push is not None and self.parts.codings[0].push.is_replicated
            self.parts.opened[0].nbytes = pieces[0].nbytes if shared else sum(piece.nbytes for piece in pieces)
        if not all(is_finite(update) for update in opened):
            for update in opened:
                poison(update)
        return opened

    def join(self, number: int) -> None:
        self.workers[number] = Worker(self.config, number, self.parts)
        self.feed(Join(number, self.incarnations[number]))

    def push(self, number: int, broken: int | None = None) -> None:
        reply, worker = self.replies.pop(number), self.workers[number]
        gradient = torch.sin(3.0 * worker.memory.weights + number + 0.1 * reply.batch) * FILLED
        if broken is not None:
            gradient[broken] = torch.inf
        seq = reply.serial
        self.feed(Push(number, self.incarnations[number], seq, seq, 8, 0.5, worker.encode(gradient), EMPTY))

    def play(self, length: int) -> None:
        for number in range(len(self.incarnations)):
            self.join(number)
        for _ in range(length):
            if self.order.random() < 0.06:
                number = self.order.randrange(len(self.incarnations))
                self.replies.pop(number, None)
                self.feed(Leave(number, self.incarnations[number]))
                self.incarnations[number] += 1
                self.join(number)
            else:
                able = sorted(number for number, reply in self.replies.items() if not reply.finished)
                self.push(self.order.choice(able))

    def require_alike(self) -> None:
        first = self.parts.servers[0]
        for server, span in zip(self.parts.servers, self.parts.spans, strict=True):
            place = slice(None) if server is not first else span
            assert torch.equal(server.weights[place], self.whole.weights[span])
            held = [sent_to(one, {n: w.memory for n, w in self.workers.items()}) for one in (server, self.whole)]
            for number, (ours, theirs) in enumerate(zip(*held, strict=True)):
                if server.differences is not None and at_work(server)[number] in server.differences.held:
                    assert torch.equal(ours[place], theirs[span])
        assert first.bytes_pushed == self.whole.bytes_pushed and first.bytes_pulled == self.whole.bytes_pulled


@pytest.mark.parametrize(
    ("codec", "pull"),
    [("int8", "int8"), ("fp16", "sign"), ("sign", "bf16"), ("topk:0.05", None), ("lowrank:2", "fp16"), (None, "int8")],
)
@pytest.mark.parametrize("strategy", long_but(["async"], ["sync", "async"]))
@settings(max_examples=3)
@given(servers=st.integers(2, 4), seed=st.integers(0, 2**32))
def test_several_servers_are_one(codec: str | None, pull: str | None, strategy: str, servers: int, seed: int) -> None:
    rule = {"rule": "plain"} if strategy == "sync" else {}
    course = Course(config_of(codec, pull, strategy=strategy, **rule), servers, seed)
    course.play(25)
    course.require_alike()
    course.feed(Stop())
    course.require_alike()


@pytest.mark.parametrize("codec", ["int8", "topk:0.05", "lowrank:2"])
@pytest.mark.parametrize("broken", [0, LAYOUT.parameters[2].offset])
def test_a_push_that_is_not_finite_ends_it_for_all(codec: str, broken: int) -> None:
    course = Course(config_of(codec, None), 3, seed=1)
    for number in range(3):
        course.join(number)
    course.push(0)
    course.push(1, broken)
    assert course.whole.divergence is not None and course.whole.divergence.worker == 1
    assert all(server.divergence == course.whole.divergence for server in course.parts.servers)
    course.require_alike()
