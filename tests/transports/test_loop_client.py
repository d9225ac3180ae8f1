"""The frames of an own loop, from its client to the server's peer and back: each message counts once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz import ScriptedConnection
from safetensors.torch import save

from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import EstimatedStatistics, Join, Push, ReadOptimizer, ReadWeights, Reply
from paceline.errors import ProtocolError
from paceline.runtimes.scripts.remote.client import LoopClient
from paceline.transports.frames import REQUEST_HEAD, FrameKind, FrameReader, header, padding
from paceline.transports.protocol import HEARD, Hello, InitialTensors, RequestKind, Timing
from paceline.transports.tcp_server import TcpPeer

SIZES = BufferSizes(16, 2, loop=3)
JOIN = Join(0, 0, None, 1, own_loop=True)
REPLY = Reply(0, 0, 0, 0, 0, False, 0, 0.1, None)


class Pair:
    """A client and its peer. What the client sends is kept, and read by the peer when the test says so."""

    def __init__(self) -> None:
        self.client, self.peer = LoopClient("127.0.0.1:1", b"token"), TcpPeer(ScriptedConnection(), 0, 0, None)
        self.memory = WorkerBuffers.private(SIZES)
        self.sent = b""
        self.client._ask = self._ask  # type: ignore[method-assign, assignment]
        self.answers: list[bytes] = []
        """What the client reads, one after another; one that is cut off is read again from the next."""

    def _ask(self, parts: list[memoryview], reading: Callable[[], Any]) -> Any:
        self.sent = b"".join(parts)
        while self.answers:
            try:
                found = FrameReader(reading()).fill(ScriptedConnection(self.answers.pop(0)).receive_into)
            except ConnectionError:
                continue
            return found[0] if found is not None else None
        return None

    def deliver(self, data: bytes | None = None) -> Any:
        """Let the peer read what the client sent last, on a connection of its own, as after a reconnect."""
        self.peer.attach(ScriptedConnection(self.sent if data is None else data, closes=False))
        return self.peer.receive()

    @property
    def answered(self) -> bytes:
        """What the peer has sent on its connection."""
        connection = self.peer.connection
        assert isinstance(connection, ScriptedConnection)
        return connection.sent

    def greet(self) -> Hello:
        self.client.hello(JOIN, self.memory, {"model": "m"})
        hello = self.deliver()
        assert isinstance(hello, Hello)
        return hello


@pytest.fixture
def pair() -> Pair:
    return Pair()


def push(seq: int, update: torch.Tensor, optimizer: int = 0, weight: float | None = None) -> Push:
    return Push(
        0, 0, seq, seq, 4, 0.5, update, torch.zeros(2), weight, torch.tensor([1.0, 2.0, 3.0]).double(), optimizer
    )


def test_requests_are_numbered_and_one_that_is_sent_again_gets_the_same_answer(pair: Pair) -> None:
    pair.greet()
    pair.client.read_weights(final=False)
    assert pair.deliver() == ReadWeights(0)
    assert pair.deliver() is HEARD and not pair.answered  # nothing to say yet
    assert pair.peer.slot is not None
    pair.peer.slot.weights.copy_(torch.arange(16.0))
    pair.peer.confirm(averaged=True)
    first = pair.answered
    assert pair.deliver() is HEARD and pair.answered == first and first
    pair.answers = [first[:40], first]
    pair.client._num_requests -= 1  # the same request, whose answer breaks off in the middle
    assert pair.client.read_weights(final=False) is True
    assert pair.memory.weights.tolist() == list(range(16))
    pair.client.read_weights(final=True)
    assert pair.deliver() == ReadWeights(0, final=True)
    pair.client.read_optimizer(1)
    assert pair.deliver() == ReadOptimizer(0, 1)


def test_the_state_of_an_optimizer_survives_a_connection_that_breaks_in_the_middle(pair: Pair) -> None:
    pair.greet()
    pair.client.read_optimizer(0)
    pair.deliver()
    pair.peer.send_optimizer({"0.exp_avg": torch.arange(50.0)})
    whole = pair.answered
    pair.answers, pair.client._num_requests = [whole[:60], whole[:-1], whole], 0
    state = pair.client.read_optimizer(0)
    assert state is not None and torch.equal(state["0.exp_avg"], torch.arange(50.0))


def test_statistics_that_are_sent_again_are_not_read_twice(pair: Pair) -> None:
    """The server may hold the merged ones in the same buffer by then."""
    pair.greet()
    pair.memory.state.copy_(torch.tensor([3.0, 4.0]))
    pair.client.merge_statistics(7)
    assert pair.deliver() == EstimatedStatistics(0, 7)
    assert pair.peer.slot is not None and pair.peer.slot.state.tolist() == [3.0, 4.0]
    pair.peer.slot.state.copy_(torch.tensor([5.0, 6.0]))
    pair.peer.confirm()
    assert pair.deliver() is HEARD and pair.peer.slot.state.tolist() == [5.0, 6.0]
    pair.answers, pair.client._num_requests = [pair.answered], 0
    assert pair.client.merge_statistics(7) and pair.memory.state.tolist() == [5.0, 6.0]


def test_a_hello_and_initial_tensors_that_are_sent_again_get_the_same_answer(pair: Pair) -> None:
    pair.memory.weights.fill_(2.0)
    pair.greet()
    hello = pair.sent
    pair.peer.ask_initial()
    wanted = pair.answered
    assert pair.deliver(hello) is HEARD and pair.answered == wanted == header(FrameKind.WANTED, 0)
    pair.client.keep({"scale": torch.tensor([2, 3])}, {"0/0.step": torch.ones(1)})
    pair.answers = [wanted]
    pair.client.hello(JOIN, pair.memory, {"model": "m"})
    initial = pair.sent
    found = pair.deliver(initial)
    assert isinstance(found, InitialTensors) and found.weights.tolist() == [2.0] * 16
    assert found.frozen["scale"].tolist() == [2, 3] and list(found.optimizers) == ["0/0.step"]
    assert pair.deliver(initial) is HEARD and not pair.answered  # the run has not begun
    pair.peer.answer(REPLY)
    greeting = pair.answered
    assert pair.deliver(initial) is HEARD and pair.answered == greeting
    assert pair.deliver(hello) is HEARD and pair.answered == greeting


def test_initial_tensors_that_nobody_asked_for_are_refused(pair: Pair) -> None:
    pair.greet()
    with pytest.raises(ProtocolError, match="a frame 'initial' instead of"):
        pair.deliver(header(FrameKind.INITIAL, 8) + bytes(8))


def test_pushes_of_several_optimizers_are_counted_apart(pair: Pair) -> None:
    pair.greet()
    assert pair.peer.slot is not None
    for optimizer, value in ((0, 1.0), (1, 2.0)):
        pair.client.exchange(push(0, torch.full((16,), value), optimizer), Timing(0.1, 0.1, 0.0))
        found = pair.deliver()
        assert (found.seq, found.optimizer, found.update[0].item()) == (0, optimizer, value)
    pair.client.exchange(push(0, torch.full((16,), 9.0), 0), Timing(0.1, 0.1, 0.0))
    again = pair.deliver()
    assert (again.seq, again.optimizer) == (0, 0) and pair.peer.slot.update[0].item() == 2.0  # thrown away


@pytest.mark.parametrize("weight", [None, 0.0, 37.5])
def test_the_weight_of_a_push_arrives(pair: Pair, weight: float | None) -> None:
    pair.greet()
    pair.client.exchange(push(0, torch.ones(16), weight=weight), Timing(0.1, 0.1, 0.0))
    found = pair.deliver()
    assert found.weight == weight and found.loop.tolist() == [1.0, 2.0, 3.0]


def test_what_the_loop_said_last_comes_back_with_the_first_reply_alone(pair: Pair) -> None:
    pair.greet()
    assert pair.peer.slot is not None
    pair.memory.state.fill_(5.0)  # what the script's model begins with
    pair.peer.slot.loop.copy_(torch.tensor([7.0, 8.0, 9.0]))
    pair.peer.answer(REPLY)
    pair.answers = [pair.answered]
    assert pair.client.hello(JOIN, pair.memory, {"model": "m"}) == REPLY
    assert pair.memory.loop.tolist() == [7.0, 8.0, 9.0] and pair.memory.state.tolist() == [5.0, 5.0]
    pair.peer.slot.bring_state(torch.tensor([1.0, 2.0]))
    pair.peer.attach(ScriptedConnection(closes=False))
    pair.peer.answer(REPLY)
    pair.answers = [pair.answered]
    assert pair.client.hello(JOIN, pair.memory, {"model": "m"}) == REPLY
    assert pair.memory.state.tolist() == [1.0, 2.0]
    pair.memory.loop.zero_()
    pair.peer.attach(ScriptedConnection(closes=False))
    pair.peer.answer(REPLY._replace(serial=1))
    pair.answers = [pair.answered]
    assert pair.client.exchange(push(0, torch.ones(16)), Timing(0.1, 0.1, 0.0)) == REPLY._replace(serial=1)
    assert pair.memory.loop.tolist() == [0.0, 0.0, 0.0]


def request(number: int, kind: int, body: bytes = b"") -> bytes:
    pad = padding(len(body))
    head = REQUEST_HEAD.pack(number, kind, 0, 4)
    return header(FrameKind.REQUEST, len(head) + len(body) + len(pad)) + head + body + pad


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (request(0, RequestKind.WEIGHTS), "request 0 after request 0"),
        (request(2, RequestKind.WEIGHTS), "request 2 after request 0"),
        (request(1, 4), "a request of unknown kind 4"),
        (request(1, RequestKind.WEIGHTS, bytes(8)), "a request weights of 32 bytes"),
        (request(1, RequestKind.STATISTICS), "a request statistics of 16 bytes"),
        (request(1, RequestKind.STATISTICS, bytes(24)), "which may have at most"),
        (header(FrameKind.REQUEST, 4) + bytes(4), "a request of 4 bytes"),
    ],
)
def test_a_request_that_no_loop_makes_is_refused(pair: Pair, frame: bytes, message: str) -> None:
    pair.greet()
    with pytest.raises(ProtocolError, match=message):
        pair.deliver(frame)


def test_a_request_before_the_hello_and_one_of_a_task_are_refused(pair: Pair) -> None:
    with pytest.raises(ProtocolError, match="a frame 'request' instead of"):
        pair.deliver(request(1, RequestKind.WEIGHTS))
    other = Pair()
    other.client.hello(JOIN._replace(own_loop=False), other.memory, {"model": "m"})
    other.deliver()
    with pytest.raises(ProtocolError, match="a frame 'request' instead of"):
        other.deliver(request(1, RequestKind.WEIGHTS))


def test_a_server_that_answers_something_else_is_named(pair: Pair) -> None:
    pair.greet()
    pair.client.read_optimizer(0)
    pair.deliver()
    pair.peer.send_optimizer({"0.step": torch.ones(1)})
    pair.answers = [pair.answered]  # of the first request, while the second is asked
    with pytest.raises(ProtocolError, match="to request 1 instead of 2"):
        pair.client.read_optimizer(0)
    pair.peer.attach(ScriptedConnection(closes=False))
    pair.peer._answer_request(memoryview(b"no tensors here "), False)
    pair.answers, pair.client._num_requests = [pair.answered], 0
    with pytest.raises(ProtocolError, match="a state of an optimizer that cannot be read"):
        pair.client.read_optimizer(0)


@pytest.mark.parametrize("nbytes", [1 << 33, 1 << 36])
def test_announced_bytes_take_no_memory_before_they_arrive(
    pair: Pair, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.transports.tcp_server.available_memory", lambda: 1 << 40)
    pair.greet()
    pair.peer.ask_initial()
    largest: list[int] = []

    class Counting(ScriptedConnection):
        def receive_into(self, place: memoryview) -> int | None:
            largest.append(len(place))
            return super().receive_into(place)

    pair.peer.attach(Counting(header(FrameKind.INITIAL, nbytes) + save({"weights": torch.ones(16)}), closes=False))
    pair.peer.receive()
    assert max(largest) < 1 << 23
