"""The server's side of TCP: one non-blocking peer per worker, which receives and sends without copies."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from paceline.core.buffers import BufferSizes, WorkerBuffers, view
from paceline.core.messages import (
    DataAssignment,
    EstimatedStatistics,
    OwnLoopInput,
    Push,
    ReadOptimizer,
    ReadWeights,
    Reply,
)
from paceline.errors import ProtocolError
from paceline.interfaces import State
from paceline.system.memory import available_memory
from paceline.transports import frames
from paceline.transports.connection import Connection
from paceline.transports.frames import (
    ANSWER_HEAD,
    PUSH_HEAD,
    REPLY_HEAD,
    REQUEST_HEAD,
    FrameKind,
    FrameReader,
    Reading,
    SendQueue,
    padding,
)
from paceline.transports.protocol import (
    BY_SAMPLES,
    HEARD,
    Hello,
    InitialTensors,
    Keepalive,
    Message,
    Peer,
    RequestKind,
    Timing,
    check_push,
    pack_assignment,
    parse_figures,
    parse_hello,
    parse_sizes,
    require_fitting,
    unreadable,
)

_SCRATCH = 1 << 18
FROZEN, USED, WEIGHTS = "frozen.", "optimizer.", "weights"
"""Names in the frame of initial tensors: the prefixes of frozen ones and of optimizer states, and the flat weights."""


class BufferViews:
    """The buffers' bytes as memoryviews, made once: making them for every push would cost too much."""

    def __init__(self, memory: WorkerBuffers) -> None:
        self.update, self.state, self.weights = view(memory.update), view(memory.state), view(memory.weights)
        self.source = memory.weights  # the tensor that `weights` views; a sharded server replaces it


class TcpPeer(Peer):
    """One worker's connection, and its buffers, which survive a broken connection.

    `largest` limits these buffers; None if only the worker knows its model, as a user's own loop does.
    """

    def __init__(self, connection: Connection, worker: int, incarnation: int, largest: BufferSizes | None) -> None:
        self.connection, self.worker, self.incarnation = connection, worker, incarnation
        self.secret = secrets.token_hex(16)
        """Told to this worker alone. Servers of a run that was resumed twice may give out an incarnation twice."""
        self.slot: WorkerBuffers | None = None
        self._views: BufferViews | None = None  # views of the buffers in `slot`
        self.timing = Timing(0.0, 0.0, 0.0)  # of the last push
        self.left = False  # whether the worker left for good
        self.last_heard = time.monotonic()
        self.wants_state = False
        """Whether replies ask the worker to send its local state with the next push, until a push has brought it."""
        self.ending = frames.Ending.FINISHED  # what its last reply is to say
        self.state_seq = -1  # the last push that brought the local state, as saved with it and before it
        self._largest = largest
        self._most = {FrameKind.BEAT: frames.BEAT_BODY.size, FrameKind.BYE: 0}
        self._most |= {FrameKind.HELLO: frames.MAX_HELLO, FrameKind.FIGURES: frames.MAX_FIGURES}
        """The kinds of frames that are accepted and their largest sizes; pushes only after the buffers exist."""
        self._num_steps = 0  # steps that the worker has begun, by its last heartbeat
        self._seq: dict[int, int] = {}  # the last push of each optimizer that has arrived completely
        self._sent_assignment: DataAssignment | None = None  # the last one on this connection
        self._greeted: Reply | None = None  # the reply to the hello, until the first push comes
        self._is_asked = False  # whether the worker is asked for what its model begins with, and has not sent it
        self._request = 0, RequestKind.WEIGHTS  # the last request of an own loop: its number and kind
        self._answer: tuple[bytes | memoryview, ...] | None = None  # to that request, until the next message
        self._outbox = SendQueue()
        self._filler: FrameReader[Message] | None = None
        """The message being read. It refers to this peer, so `close` drops it to free the buffers."""

    def fileno(self) -> int:
        """The connection's descriptor, which changes with a reconnect."""
        return self.connection.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether to call `flush` when the connection accepts bytes."""
        return bool(self._outbox)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
        self._filler = None

    def is_of(self, fields: Mapping[str, Any]) -> bool:
        """Whether a request to reconnect comes from the worker that this peer was made for."""
        return self.incarnation == fields.get("incarnation") and hmac.compare_digest(
            self.secret.encode(), str(fields.get("secret")).encode()
        )

    def attach(self, connection: Connection) -> None:
        """Continue on another connection, because the worker reconnected. Discard messages that are not complete."""
        self.connection.close()
        self.connection, self.last_heard = connection, time.monotonic()
        self._outbox, self._filler, self._sent_assignment = SendQueue(), None, None

    def receive(self) -> Message | None:
        """Return the next message, PARTIAL if it is not complete yet, or None if the connection is gone.

        Raise ProtocolError if the bytes are malformed. A push counts only when its last byte has arrived.
        """
        filler, self._filler = self._filler or FrameReader(self._message()), None
        try:
            whole = filler.fill(self.connection.receive_into)
        except ConnectionError:
            return None
        except ProtocolError:
            raise
        except Exception as error:  # of the bytes of this worker alone: nothing has been applied
            raise unreadable(self.worker, error) from error
        self.last_heard = time.monotonic()
        if whole is None:
            self._filler = filler
            return Keepalive.PARTIAL
        return None if self.left else whole[0]

    def _message(self) -> Reading[Message]:
        """Read one frame of any kind."""
        try:
            kind, nbytes = yield from frames.read_header(self._most)
            if kind is FrameKind.PUSH:
                assert self.slot is not None and self._views is not None
                return (yield from self._push(nbytes, self.slot, self._views))
            if kind is FrameKind.REQUEST:
                assert self.slot is not None
                return (yield from self._loop_request(nbytes, self.slot))
            if kind is FrameKind.INITIAL:
                return (yield from self._initial(nbytes))
            if kind is FrameKind.BEAT:
                return (yield from self._beat(nbytes))
            if kind is FrameKind.BYE:
                self.left = True
                return HEARD
            fields = yield from frames.read_fields(nbytes)
            return self._hello(fields) if kind is FrameKind.HELLO else parse_figures(self.worker, fields)
        except ProtocolError as error:
            raise ProtocolError(f"worker {self.worker} sent {error}") from None

    def _beat(self, nbytes: int) -> Reading[Keepalive]:
        if nbytes != frames.BEAT_BODY.size:
            raise ProtocolError(f"a heartbeat of {nbytes} bytes")
        (num_steps,) = frames.BEAT_BODY.unpack((yield from frames.read_bytes(nbytes)))
        if num_steps <= self._num_steps:
            return HEARD
        self._num_steps = num_steps
        return Keepalive.STEPPED

    def _hello(self, fields: dict[str, Any]) -> Hello | Keepalive:
        join, asked, facts = parse_hello(self.worker, self.incarnation, fields)
        sizes = parse_sizes(asked)
        require_fitting(sizes, self._largest)
        if self.slot is not None:  # the worker did not get the reply to its first hello
            if sizes != self.slot.sizes or self._seq:
                raise ProtocolError("a second hello")
            self._greet_again()
            return HEARD
        self.slot = slot = WorkerBuffers.private(sizes)
        self._views = BufferViews(slot)
        bodies = slot.update.nbytes + slot.state.nbytes + slot.saved_states.nbytes + slot.loop.nbytes
        self._most[FrameKind.PUSH] = PUSH_HEAD.size + bodies + len(padding(bodies))
        if join.own_loop:
            self._most[FrameKind.REQUEST] = REQUEST_HEAD.size + slot.state.nbytes + len(padding(slot.state.nbytes))
        return Hello(join, self.slot, facts)

    def _greet_again(self) -> None:
        """Answer a worker that did not get the answer to its hello."""
        if self._is_asked:
            self.ask_initial()
        elif self._greeted is not None:
            self.answer(self._greeted)

    def ask_initial(self) -> None:
        """Ask the worker for what its model begins with; `receive` then returns InitialTensors."""
        self._is_asked = True
        self._most[FrameKind.INITIAL] = available_memory() // 4  # its bytes, a copy, and its tensors
        self.send(frames.header(FrameKind.WANTED, 0))

    def _initial(self, nbytes: int) -> Reading[InitialTensors | Keepalive]:
        if not self._is_asked:  # sent again after a reconnect
            yield from self._throw_away(nbytes)
            self._greet_again()
            return HEARD
        content = yield from frames.read_arriving(nbytes)
        assert self.slot is not None
        try:
            tensors = load(bytes(content))
        except (SafetensorError, ValueError, KeyError) as error:
            raise ProtocolError(f"initial tensors that cannot be read ({error})") from None
        weights = tensors.pop(WEIGHTS, None)
        if weights is None or weights.dtype != torch.float32 or weights.shape != self.slot.weights.shape:
            raise ProtocolError("initial tensors without the weights of its model")
        self._is_asked = False
        frozen, used = (
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            for prefix in (FROZEN, USED)
        )
        return InitialTensors(self.worker, weights, frozen, used)

    def _loop_request(self, nbytes: int, slot: WorkerBuffers) -> Reading[OwnLoopInput | Keepalive]:
        """Read what an own loop asks for. A request that is sent again after a reconnect gets the same answer."""
        if nbytes < REQUEST_HEAD.size:
            raise ProtocolError(f"a request of {nbytes} bytes")
        number, code, optimizer, samples = REQUEST_HEAD.unpack((yield from frames.read_bytes(REQUEST_HEAD.size)))
        if code not in set(RequestKind):
            raise ProtocolError(f"a request of unknown kind {code}")
        kind = RequestKind(code)
        body = slot.state.nbytes if kind is RequestKind.STATISTICS else 0
        if nbytes != REQUEST_HEAD.size + body + len(padding(body)):
            raise ProtocolError(f"a request {kind.name.lower()} of {nbytes} bytes")
        again = 0 < number == self._request[0]
        if not again and number != self._request[0] + 1:
            raise ProtocolError(f"request {number} after request {self._request[0]}")
        if body and again:
            yield from self._throw_away(body)
        elif body:
            yield view(slot.state)
        yield from frames.read_bytes(len(padding(body)))
        if again:
            if self._answer is not None:
                self.send(*self._answer)
            return HEARD
        self._request, self._answer = (number, kind), None
        if kind is RequestKind.OPTIMIZER:
            return ReadOptimizer(self.worker, optimizer)
        if kind is RequestKind.STATISTICS:
            return EstimatedStatistics(self.worker, samples)
        return ReadWeights(self.worker, final=kind is RequestKind.FINAL_WEIGHTS)

    def confirm(self, averaged: bool = False) -> None:
        """Answer the last request with the weights or the statistics in the worker's buffers."""
        assert self.slot is not None
        is_state = self._request[1] is RequestKind.STATISTICS
        self._answer_request(view(self.slot.state if is_state else self.slot.weights), averaged)

    def send_optimizer(self, state: State) -> None:
        """Answer the last request with an optimizer's state, as the bytes of a safetensors file."""
        content = save({name: tensor.contiguous() for name, tensor in state.items()})
        self._answer_request(memoryview(content), False)

    def _answer_request(self, body: memoryview, averaged: bool) -> None:
        pad = padding(len(body))
        head = ANSWER_HEAD.pack(self._request[0], averaged, len(pad))
        first = frames.header(FrameKind.ANSWER, len(head) + len(body) + len(pad)) + head
        self._answer = first, body, pad
        self.send(*self._answer)

    def _push(self, nbytes: int, slot: WorkerBuffers, views: BufferViews) -> Reading[Push]:
        if nbytes < PUSH_HEAD.size:
            raise ProtocolError(f"a push of {nbytes} bytes")
        packed = yield from frames.read_bytes(PUSH_HEAD.size)
        seq, reply, samples, optimizer, *sizes, loss, cpu, wall, waited, packed_weight = PUSH_HEAD.unpack(packed)
        num_update, num_state, num_local_state, num_loop = sizes
        timing, weight = Timing(cpu, wall, waited), None if packed_weight == BY_SAMPLES else packed_weight
        check_push(seq, reply, samples, loss, timing, weight)
        bodies = sum(sizes)
        pad, most = len(padding(bodies)), slot.update.nbytes
        fits = num_update == most if slot.sizes.payload is None else num_update <= most
        fits = fits and num_state == slot.state.nbytes and num_local_state in (0, slot.saved_states.nbytes)
        fits = fits and num_loop <= slot.loop.nbytes and num_loop % slot.loop.itemsize == 0
        if not fits or nbytes != len(packed) + bodies + pad:
            parts = f"{num_update} bytes of update, {num_state} of state, {num_local_state} of local state, {num_loop}"
            parts += " of its loop"
            raise ProtocolError(f"a push of {parts} in a frame of {nbytes}, which does not fit its buffers")
        update = slot.update if slot.sizes.payload is None else slot.update[:num_update]
        if seq == self._seq.get(
            optimizer
        ):  # sent again after a reconnect: the server may still use the first copy, so keep it
            yield from self._throw_away(bodies)
        else:
            yield views.update[:num_update]
            yield views.state
            if num_local_state:
                yield view(slot.saved_states)
                self.state_seq, self.wants_state = seq, False
            if num_loop:
                yield view(slot.loop)[:num_loop]
        yield from frames.read_bytes(pad)
        self._seq[optimizer], self._greeted, self._answer = seq, None, None
        self.timing = timing
        tensors = update, slot.state, weight, slot.loop
        return Push(self.worker, self.incarnation, seq, reply, samples, loss, *tensors, optimizer)

    @staticmethod
    def _throw_away(nbytes: int) -> Reading[None]:
        scratch = memoryview(bytearray(_SCRATCH))
        while nbytes:
            place = scratch[:nbytes]
            nbytes -= len(place)
            yield place

    def answer(self, reply: Reply) -> None:
        """Queue a reply and its weights, and send as much as possible at once.

        If the worker is gone, the next `receive` says so, and the worker asks again after it reconnects. The weights
        are not copied: they do not change before the worker's next push, which follows this reply.
        """
        slot, views = self.slot, self._views
        assert slot is not None and views is not None, "a worker gets a reply only after its hello"
        if not self._seq:
            self._greeted = reply
        if views.source is not slot.weights:
            views = self._views = BufferViews(slot)
        encoded = slot.sizes.pulled is not None and reply.serial > 0
        body = view(slot.pulled[: slot.num_pulled]) if encoded else views.weights
        generation, members = self._new_members(reply.assignment)
        facts = reply.serial, reply.version, reply.batch, reply.lr, reply.steps, generation
        over = self.ending if reply.finished else 0
        loop = view(slot.loop) if not reply.serial else memoryview(b"")  # what the last incarnation said
        state = view(slot.state) if not reply.serial and slot.brings_state else memoryview(b"")
        counts = len(members), len(body), reply.discarded, reply.dropped, len(loop), len(state)
        head = REPLY_HEAD.pack(over, encoded, self.wants_state, reply.optimizer, *facts, *counts)
        bodies = len(members) + len(body) + len(loop) + len(state)
        pad = padding(bodies)
        first = frames.header(FrameKind.REPLY, len(head) + bodies + len(pad)) + head + members
        self.send(first, body, loop, state, pad)

    def _new_members(self, assignment: DataAssignment | None) -> tuple[int, bytes]:
        """The generation of a data assignment, and its members unless this connection has already sent them."""
        if assignment is None:
            return 0, b""
        known, self._sent_assignment = assignment == self._sent_assignment, assignment
        return assignment.generation, b"" if known else pack_assignment(assignment)

    def dismiss(self, reason: str) -> None:
        """Refuse the worker for good, with a reason that it shows its user."""
        self.send(frames.refusal_frame(reason))

    def send(self, *parts: bytes | memoryview) -> None:
        """Queue a frame, and send as much as possible at once."""
        self._outbox.add(*parts)
        self._send()

    def flush(self) -> bool:
        """Continue sending. Return whether the worker accepted bytes, which shows that it is alive."""
        left = self._outbox.nbytes
        self._send()
        is_heard = self._outbox.nbytes < left
        if is_heard:
            self.last_heard = time.monotonic()
        return is_heard

    def _send(self) -> None:
        try:
            self._outbox.flush(self.connection.send)
        except ConnectionError:
            self._outbox = SendQueue()
