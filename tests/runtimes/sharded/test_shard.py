"""A server that is not the first, driven by one that the test plays: votes, orders, lost connections, the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch

from paceline.assembly.core import make_policy, make_rule, make_training
from paceline.config import RunConfig, to_dict
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Input, Join, Leave, Push, Stop
from paceline.core.schedules import Budget
from paceline.core.server import Roster, Server, server_facts
from paceline.errors import ProtocolError, UserError
from paceline.interfaces import pack
from paceline.runtimes.sharded.channel import FILLED, Message, ShardChannel
from paceline.runtimes.sharded.orders import to_words
from paceline.runtimes.sharded.shard import ShardService
from paceline.settings.resolve import resolve
from paceline.transports.listener import Listener
from paceline.transports.protocol import Timing
from paceline.transports.tcp_client import TcpClient
from tests.support.connections import connected
from tests.support.waiting import until

LAYOUT = pack([("a", (16, 16), True)])
SPAN = slice(64, 192)
CONFIG = resolve(RunConfig(strategy="async", rule="plain", workers=1, lr=0.5, momentum=0.0))
BUDGET = Budget(10**6, 100)
EMPTY = torch.empty(0)
TIMING = Timing(0.0, 0.0, 0.0)


def hear(link: ShardChannel) -> Message:
    """The next message that is not a heartbeat."""

    def next_message() -> Message | None:
        link.flush()
        message = link.receive()
        return None if message is None or "beat" in message else message

    message = until(next_message, "a message")
    assert message is not None
    return message


class First:
    """The first server's part, played by the test."""

    def __init__(self) -> None:
        ours, theirs = connected()
        self.link, self.listener = ShardChannel(ours), Listener("127.0.0.1:0", b"token")
        self.said: list[str] = []
        self.ended: list[bool] = []
        service = ShardService(ShardChannel(theirs), self.listener, self.said.append)
        self.thread = threading.Thread(target=lambda: self.ended.append(service.run()))
        self.thread.start()
        weights = torch.arange(float(LAYOUT.size))
        self.whole = Server(
            weights, make_rule(CONFIG, LAYOUT), make_policy(CONFIG), make_training(CONFIG, BUDGET), Roster(1)
        )
        begin = {
            "config": to_dict(CONFIG),
            "layout": LAYOUT.to_rows(),
            "span": [SPAN.start, SPAN.stop],
            "skew": None,
            "budget": asdict(BUDGET),
            "threads": 1,
            "facts": server_facts(self.whole),
        }
        self.link.send({"begin": begin}, [weights[SPAN]])

    def order(self, message: Input, finite: bool = True) -> None:
        self.whole.handle(message)
        self.link.send({"input": to_words(message), "finite": finite})

    def gather(self, tensors: list[torch.Tensor]) -> None:
        self.link.expect(tensors)
        self.link.send({"gather": 0})
        assert hear(self.link) == {"gathered": 0}
        assert hear(self.link) is FILLED


@pytest.fixture
def first() -> Iterator[First]:
    playing = First()
    yield playing
    playing.link.close()
    playing.thread.join(20)
    playing.listener.close()
    assert not playing.thread.is_alive()


def gradient_push(seq: int, value: float) -> Push:
    return Push(0, 0, seq, seq, 8, 0.5, torch.full((LAYOUT.size,), value), EMPTY)


def part_of_push(push: Push) -> Push:
    return push._replace(update=push.update[SPAN])


def test_a_part_waits_for_the_order_and_is_answered_at_its_version_whatever_happens_to_the_connection(
    first: First,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        door = TcpClient(first.listener.address, b"token", patience=20)
        door.apply({"worker": 0, "incarnation": 0})
        memory = WorkerBuffers.private(BufferSizes(SPAN.stop - SPAN.start))
        greeting = pool.submit(door.hello, Join(0, 0), memory, {})
        assert hear(first.link) == {"part": [0, 0, -1], "finite": True, "nbytes": 0}
        first.order(Join(0, 0))
        reply = greeting.result(20)
        assert reply is not None and reply.version == 0
        assert torch.equal(memory.weights, first.whole.weights[SPAN])

        for seq in (0, 1):
            push = gradient_push(seq, 1.0 + seq)
            asked = pool.submit(door.exchange, part_of_push(push), TIMING)
            assert hear(first.link) == {"part": [0, 0, seq], "finite": True, "nbytes": 512}
            if seq:
                assert door._connection is not None
                door._connection.shut_down()  # before the order: the worker comes back, and brings it again
                assert hear(first.link) == {"part": [0, 0, seq], "finite": True, "nbytes": 512}
            assert not asked.done()
            first.order(push)
            reply = asked.result(20)
            assert reply is not None and (reply.serial, reply.version) == (seq + 1, seq + 1)
            assert torch.equal(memory.weights, first.whole.weights[SPAN])

        weights, sent = torch.zeros(128), torch.zeros(128)
        first.gather([weights, sent])
        assert torch.equal(weights, first.whole.weights[SPAN]) and torch.equal(sent, weights)

        asked = pool.submit(door.exchange, part_of_push(gradient_push(2, float("nan"))), TIMING)
        assert hear(first.link) == {"part": [0, 0, 2], "finite": False, "nbytes": 512}
        first.order(Stop())
        first.order(gradient_push(2, float("nan")), finite=False)
        reply = asked.result(20)
        assert reply is not None and reply.finished
        first.link.send({"end": True})
        first.link.close()  # that it is gone now is no mishap
        door.close()
    first.thread.join(20)
    assert first.ended == [True]


def test_who_has_left_is_not_let_in_again_and_who_was_never_sent_here_neither(first: First) -> None:
    with ThreadPoolExecutor(1) as pool:
        door = TcpClient(first.listener.address, b"token", patience=20)
        door.apply({"worker": 0, "incarnation": 0})
        greeting = pool.submit(door.hello, Join(0, 0), WorkerBuffers.private(BufferSizes(128)), {})
        hear(first.link)
        first.order(Join(0, 0))
        first.order(Leave(0, 0))
        greeting.result(20)
        assert door.exchange(part_of_push(gradient_push(0, 1.0)), TIMING) is None
        assert door.farewell == "this worker was taken for lost"
        door.close()
    stranger = TcpClient(first.listener.address, b"token")
    with pytest.raises(Exception, match="a part of a run is served here"):
        stranger.apply({"version": "x"})


def test_a_server_whose_first_is_gone_ends(first: First) -> None:
    first.link.close()
    first.thread.join(20)
    assert first.ended == [False]
    assert "the first server is gone" in first.said[-1]


def test_tensors_that_nobody_awaits_are_refused_before_memory_is_taken() -> None:
    one, other = (ShardChannel(end) for end in connected())
    one.send({"gathered": 1}, [torch.zeros(4)])
    assert other.receive() == {"gathered": 1}
    with pytest.raises(ProtocolError, match="'body' of 16 bytes, which may have at most 0"):
        other.receive()
    one.close()
    other.close()


@pytest.mark.parametrize(
    "order",
    [
        {"input": ["Leave", [0], 0], "finite": True},
        {"input": ["Leave"]},
        {"input": ["Nothing", 1]},
        {"input": ["Push", 0, 0, 0, 0, 4, "x", None]},
        {"input": ["Join", 0, 0, None, 1, False]},
        {"input": "Stop", "finite": True},
        {"input": ["Stop"], "finite": 1},
        {"begin": {}},
        {"begin": {"config": {"workers": "many"}, "span": [0, 1], "layout": []}},
        {"gather": "everything"},
    ],
)
def test_an_order_that_is_none_ends_a_server_in_one_line(first: First, order: Message) -> None:
    until(lambda: first.listener.fileno() and not first.link.wants_write, "the description to be sent")
    first.link.send(order)
    first.thread.join(20)
    assert first.ended == [False]
    assert first.said[-1].startswith("the first server is gone: ") and first.said[-1].isprintable()


def test_a_server_bounds_its_connections(first: First) -> None:
    """A worker may come as a new incarnation before the old one is known to have left, and no oftener."""
    clients = [TcpClient(first.listener.address, b"token", patience=20) for _ in range(4)]
    until(lambda: first.link.flush() is None and not first.link.wants_write, "the description to be sent")
    for incarnation, client in enumerate(clients[:2]):
        client.apply({"worker": 0, "incarnation": incarnation}, beats=False)
    for fields in ({"worker": 0, "incarnation": 2}, {"worker": 1, "incarnation": 0}):
        with pytest.raises(UserError, match="of 0 to 0 is here already, or none"):
            clients[2].apply(fields, beats=False)
    first.order(Leave(0, 1))
    until(lambda: _is_admitted(clients[3]), "a place")
    for client in clients:
        client.close()


def _is_admitted(client: TcpClient) -> bool:
    try:
        client.apply({"worker": 0, "incarnation": 2}, beats=False)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("sizes", [BufferSizes(64), BufferSizes(128, 0, None, None, 8)])
def test_a_worker_whose_memory_does_not_fit_is_named_to_the_first_server(first: First, sizes: BufferSizes) -> None:
    door = TcpClient(first.listener.address, b"token", patience=0.1)
    door.apply({"worker": 0, "incarnation": 0}, beats=False)
    with ThreadPoolExecutor(1) as pool:
        greeting = pool.submit(door.hello, Join(0, 0), WorkerBuffers.private(sizes), {})
        blamed = hear(first.link)
        door.abandon()
        assert greeting.result(20) is None
    assert blamed["part"] == [0, 0, -1] and blamed["wrong"].startswith("worker 0 sent buffers")
    assert first.thread.is_alive()
    door.close()
