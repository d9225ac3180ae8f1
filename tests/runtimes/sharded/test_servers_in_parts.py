"""Several servers, each with a range of the weights, are one server: every reply, every weight, every bit of state."""

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
from paceline.assembly.run import make_roster
from paceline.config import RunConfig, to_dict
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Input, Join, Leave, Push, Reply, Resume, Stop
from paceline.core.schedules import Budget
from paceline.core.server import Server, restore_server, server_facts
from paceline.interfaces import pack
from paceline.runtimes.sharded.orders import from_words, is_finite, poison, to_words
from paceline.runtimes.sharded.shard import make_part
from paceline.runtimes.sharded.sharded_rule import ShardedRule
from paceline.runtimes.sharded.spans import part_of, spans_of
from paceline.settings.resolve import resolve
from paceline.settings.rules import RULES
from tests.support.rings import long_but

LAYOUT = pack([("a", (11, 13), True), ("b", (90,), False), ("c", (70,), True)])
EMPTY = torch.empty(0)
FILLED = torch.zeros(LAYOUT.size)
for view in LAYOUT.views(FILLED).values():
    view.fill_(1.0)  # gaps hold zeros and stay zero
BUDGET = Budget(10**6, epoch_samples=100)


def whole_server(config: RunConfig) -> Server:
    weights = torch.linspace(-1.0, 1.0, LAYOUT.size) * FILLED
    rule, training = make_rule(config, LAYOUT), make_training(config, BUDGET)
    return Server(weights, rule, make_policy(config), training, make_roster(config))


def copy_of(server: Server, config: RunConfig) -> Server:
    twin = whole_server(config)
    restore_server(twin, server_facts(server), server.weights, server.rule_state)
    return twin


class Parts:
    """What the servers of a run are to each other, without their sockets: the first decides, the others are told."""

    def __init__(self, server: Server, config: RunConfig, servers: int) -> None:
        self.spans = spans_of(LAYOUT.size, servers)
        part = make_rule(config, part_of(LAYOUT, self.spans[0]))
        self.ranged = ShardedRule(server.rule, part, self.spans[0], server.weights, server.rule_state)
        self.servers = [server, *(self._begin(server, config, span) for span in self.spans[1:])]
        server.updater.restrict_to(self.ranged, self.spans[0], None, None)
        self.memories = [WorkerBuffers.private(BufferSizes(LAYOUT.size)) for _ in range(config.workers or 1)]

    def _begin(self, server: Server, config: RunConfig, span: slice) -> Server:
        begin = {
            "config": to_dict(config),
            "layout": LAYOUT.to_rows(),
            "span": [span.start, span.stop],
            "skew": None,
            "budget": asdict(server.budget),
            "threads": 1,
            "facts": server_facts(server),
        }
        begin = json.loads(json.dumps(begin))
        part, *_ = make_part(begin)
        restore_server(part, begin["facts"], server.weights[span], self.ranged.of_span(server.rule_state, span))
        return part

    def handle(self, message: Input) -> tuple[Reply, ...]:
        """One input through all of them, as it crosses; they must answer alike."""
        updates = [message.update[span] for span in self.spans] if isinstance(message, Push) else []
        if not all(is_finite(update) for update in updates):
            for update in updates:
                poison(update)
        outcomes = []
        for number, (server, span) in enumerate(zip(self.servers, self.spans, strict=True)):
            told = from_words(json.loads(json.dumps(to_words(message)))) if number else message
            outcome = server.handle(told._replace(update=updates[number]) if isinstance(told, Push) else told)
            for reply in outcome.replies:
                memory = self.memories[reply.worker]
                server.send_weights(reply, memory.part(span, with_rest=False) if number else memory)
            outcomes.append(outcome)
        assert all(outcome == outcomes[0] for outcome in outcomes)
        return outcomes[0].replies

    def gathered(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights and rule state of all, where the first server has memory for them."""
        first = self.servers[0]
        for server, span in zip(self.servers[1:], self.spans[1:], strict=True):
            first.weights[span] = server.weights
            for name, view in self.ranged.of_span(first.rule_state, span).items():
                view.copy_(server.rule_state[name])
        return first.weights, first.rule_state


def gradient(weights: Tensor, worker: int, batch: int) -> Tensor:
    return torch.sin(3.0 * weights + worker + 0.1 * batch) * FILLED


class Course:
    """Workers that push in any order, leave and come back: the same to the whole server and to its parts."""

    def __init__(self, config: RunConfig, servers: int, before: int, seed: int) -> None:
        self.workers, self.order = config.workers or 1, Random(seed)
        self.whole = whole_server(config)
        self.sent = [torch.zeros(LAYOUT.size) for _ in range(self.workers)]
        self.replies: dict[int, Reply] = {}
        self.incarnations = [0] * self.workers
        self.parts: Parts | None = None
        self._play(before)
        self._feed(Resume())
        self.replies.clear()
        self.incarnations = [number + 1 for number in self.incarnations]
        self.parts = Parts(copy_of(self.whole, config), config, servers)

    def _feed(self, message: Input) -> None:
        both = message._replace(update=message.update.clone()) if isinstance(message, Push) else message
        outcome = self.whole.handle(message)
        for reply in outcome.replies:
            self.whole.updater.reply_weights(reply.worker, self.sent[reply.worker])
            self.replies[reply.worker] = reply
        if self.parts is not None:
            assert self.parts.handle(both) == outcome.replies
            for reply in outcome.replies:
                assert torch.equal(self.parts.memories[reply.worker].weights, self.sent[reply.worker])

    def join_all(self) -> None:
        for worker in range(self.workers):
            self._feed(Join(worker, self.incarnations[worker]))

    def push(self, worker: int, broken: int | None = None) -> None:
        reply = self.replies.pop(worker)
        update = gradient(self.sent[worker], worker, reply.batch)
        if broken is not None:
            update[broken] = torch.inf
        incarnation, seq = self.incarnations[worker], reply.serial
        self._feed(
            Push(worker, incarnation, seq, seq, 8 + worker % 2, 0.5, update, EMPTY, 3.0 + worker if seq % 2 else None)
        )

    def _play(self, length: int) -> None:
        self.join_all()
        for _ in range(length):
            able = sorted(worker for worker, reply in self.replies.items() if not reply.finished)
            if self.order.random() < 0.06:
                worker = self.order.randrange(self.workers)
                self.replies.pop(worker, None)
                self._feed(Leave(worker, self.incarnations[worker]))
                self.incarnations[worker] += 1
                self._feed(Join(worker, self.incarnations[worker]))
            elif able:
                self.push(self.order.choice(able))

    def play(self, length: int) -> None:
        self._play(length)
        self._feed(Stop())


def config_of(**values: Any) -> RunConfig:
    return resolve(replace(RunConfig(workers=3, dataset="fashion-mnist-sample", lr=0.02), **values))


SETTINGS = {
    "sgd": {"strategy": "sync", "rule": "plain", "weight_decay": 0.01},
    "nesterov": {"strategy": "async", "rule": "plain", "nesterov": True},
    "adam": {"strategy": "async", "rule": "plain", "optimizer": "adam", "average": "on", "weight_decay": 0.01},
    "adamw ahead": {"strategy": "async", "rule": "foresight", "optimizer": "adamw", "weight_decay": 0.01},
    "rmsprop ahead": {"strategy": "async", "rule": "foresight-fair", "optimizer": "rmsprop", "average": "on"},
    "adam in rounds": {"strategy": "backup:1", "rule": "plain", "optimizer": "adam", "average": "20"},
    "bounded": {"strategy": "bounded:1", "rule": "auto-counted", "schedule": "cosine", "warmup": 0.2},
    "elastic": {"strategy": "async", "rule": "auto-counted", "max_workers": 4},
    "diloco": {"strategy": "diloco:3", "path": "star"},
    "async-local": {"strategy": "async-local:2"},
    **{
        rule: {"strategy": "async", "rule": f"{rule}:2" if traits.letter else rule, "average": "on"}
        for rule, traits in RULES.items()
        if not traits.for_drifts and rule != "auto"  # which needs all weights in one server
    },
}


@pytest.mark.parametrize("name", long_but(list(SETTINGS)[:1], SETTINGS))
@settings(max_examples=4)
@given(servers=st.integers(2, 4), before=st.integers(0, 12), seed=st.integers(0, 2**32))
def test_several_servers_are_one(name: str, servers: int, before: int, seed: int) -> None:
    course = Course(config_of(**SETTINGS[name]), servers, before, seed)
    course.play(40)
    assert course.parts is not None
    weights, state = course.parts.gathered()
    assert torch.equal(weights, course.whole.weights)
    assert sorted(state) == sorted(course.whole.rule_state)
    assert all(torch.equal(state[key], tensor) for key, tensor in course.whole.rule_state.items())
    assert {server.version for server in course.parts.servers} == {course.whole.version}


@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("broken", [0, LAYOUT.size - 20])
def test_one_part_that_is_not_finite_ends_it_for_all(strategy: str, broken: int) -> None:
    course = Course(config_of(strategy=strategy, rule="plain"), 3, 4, seed=1)
    course.join_all()
    for worker in (0, 1, 2):
        course.push(worker, broken if worker == 1 else None)
        if course.whole.finished:
            break
    assert course.parts is not None
    assert course.whole.divergence is not None and course.whole.divergence.worker == 1
    assert all(server.divergence == course.whole.divergence for server in course.parts.servers)
    assert torch.equal(course.parts.gathered()[0], course.whole.weights)


@pytest.mark.parametrize("rule", ["cached", "foresight-cached", "foresight"])
def test_they_agree_on_who_fell_silent(rule: str) -> None:
    course = Course(config_of(strategy="async", rule=rule), servers=2, before=5, seed=1)
    course.join_all()
    for worker in (0, 1, 2):
        course.push(worker)
    for number in range(80):
        course.push(number % 2)
    assert course.parts is not None and all(server.members[2].silent for server in course.parts.servers)
    course.push(2)
    weights, state = course.parts.gathered()
    assert torch.equal(weights, course.whole.weights)
    assert all(torch.equal(state[name], tensor) for name, tensor in course.whole.rule_state.items())
