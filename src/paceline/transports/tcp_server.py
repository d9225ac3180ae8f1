"""The server's side of TCP: one non-blocking peer per worker, which receives and sends without copies."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Mapping
from typing import Any

from paceline.core.buffers import BufferSizes, WorkerBuffers, view
from paceline.core.messages import DataAssignment, Push, Reply
from paceline.errors import ProtocolError
from paceline.transports import frames
from paceline.transports.connection import Connection
from paceline.transports.frames import PUSH_HEAD, REPLY_HEAD, FrameKind, FrameReader, Reading, SendQueue, padding
from paceline.transports.protocol import (
    HEARD,
    Hello,
    Keepalive,
    Peer,
    ReportedFigures,
    Timing,
    check_push,
    pack_assignment,
    parse_figures,
    parse_hello,
    parse_sizes,
    unreadable,
)

_SCRATCH = 1 << 18


class BufferViews:
    """The buffers' bytes as memoryviews, made once: making them for every push would cost too much."""

    def __init__(self, memory: WorkerBuffers) -> None:
        self.update, self.state, self.weights = view(memory.update), view(memory.state), view(memory.weights)
        self.source = memory.weights  # the tensor that `weights` views; a sharded server replaces it


def _within(size: int | None, most: int | None) -> bool:
    """Whether the size of a part is allowed; None if there is no such part."""
    return size is most if size is None or most is None else 0 <= size <= most


def require_fitting(sizes: BufferSizes, most: BufferSizes) -> None:
    """Check the sizes of a worker's buffers before allocating them.

    >>> require_fitting(BufferSizes(10), BufferSizes(10))
    >>> require_fitting(BufferSizes(11), BufferSizes(10))
    Traceback (most recent call last):
    paceline.errors.ProtocolError: buffers with weights of 11, which may have at most 10
    """
    for name, count, limit in zip(BufferSizes._fields, sizes, most, strict=True):
        if not _within(count, limit):
            raise ProtocolError(f"buffers with {name} of {count}, which may have at most {limit}")


class TcpPeer(Peer):
    """One worker's connection, and its buffers, which survive a broken connection."""

    def __init__(self, connection: Connection, worker: int, incarnation: int, largest: BufferSizes) -> None:
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
        self.is_drained = False  # whether its last reply is to say that it alone leaves
        self.state_seq = -1  # the last push that brought the local state, as saved with it and before it
        self._largest = largest
        self._most = {FrameKind.BEAT: frames.BEAT_BODY.size, FrameKind.BYE: 0}
        self._most |= {FrameKind.HELLO: frames.MAX_HELLO, FrameKind.FIGURES: frames.MAX_FIGURES}
        """The kinds of frames that are accepted and their largest sizes; pushes only after the buffers exist."""
        self._num_steps = 0  # steps that the worker has begun, by its last heartbeat
        self._seq = -1  # the last push that has arrived completely
        self._sent_assignment: DataAssignment | None = None  # the last one on this connection
        self._greeted: Reply | None = None  # the reply to the hello, until the first push comes
        self._outbox = SendQueue()
        self._filler: FrameReader[Hello | Push | ReportedFigures | Keepalive] | None = None
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

    def receive(self) -> Hello | Push | ReportedFigures | Keepalive | None:
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

    def _message(self) -> Reading[Hello | Push | ReportedFigures | Keepalive]:
        """Read one frame of any kind."""
        try:
            kind, nbytes = yield from frames.read_header(self._most)
            if kind is FrameKind.PUSH:
                assert self.slot is not None and self._views is not None
                return (yield from self._push(nbytes, self.slot, self._views))
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
            if sizes != self.slot.sizes or self._seq >= 0:
                raise ProtocolError("a second hello")
            if self._greeted is not None:
                self.answer(self._greeted)
            return HEARD
        self.slot = slot = WorkerBuffers.private(sizes)
        self._views = BufferViews(slot)
        bodies = slot.update.nbytes + slot.state.nbytes + slot.saved_states.nbytes
        self._most[FrameKind.PUSH] = PUSH_HEAD.size + bodies + len(padding(bodies))
        return Hello(join, self.slot, facts)

    def _push(self, nbytes: int, slot: WorkerBuffers, views: BufferViews) -> Reading[Push]:
        if nbytes < PUSH_HEAD.size:
            raise ProtocolError(f"a push of {nbytes} bytes")
        packed = yield from frames.read_bytes(PUSH_HEAD.size)
        seq, reply, samples, num_update, num_state, num_local_state, loss, *seconds, weight = PUSH_HEAD.unpack(packed)
        timing = Timing(*seconds)
        check_push(seq, reply, samples, loss, timing, weight)
        bodies = num_update + num_state + num_local_state
        pad, most = len(padding(bodies)), slot.update.nbytes
        fits = num_update == most if slot.sizes.payload is None else num_update <= most
        fits = fits and num_state == slot.state.nbytes and num_local_state in (0, slot.saved_states.nbytes)
        if not fits or nbytes != len(packed) + bodies + pad:
            parts = f"{num_update} bytes of update, {num_state} of state and {num_local_state} of local state"
            raise ProtocolError(f"a push of {parts} in a frame of {nbytes}, which does not fit its buffers")
        update = slot.update if slot.sizes.payload is None else slot.update[:num_update]
        if seq == self._seq:  # sent again after a reconnect: the server may still use the first copy, so keep it
            yield from self._throw_away(bodies)
        else:
            yield views.update[:num_update]
            yield views.state
            if num_local_state:
                yield view(slot.saved_states)
                self.state_seq, self.wants_state = seq, False
        yield from frames.read_bytes(pad)
        self._seq, self._greeted = seq, None
        self.timing = timing
        return Push(self.worker, self.incarnation, seq, reply, samples, loss, update, slot.state, weight or None)

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
        if self._seq < 0:
            self._greeted = reply
        if views.source is not slot.weights:
            views = self._views = BufferViews(slot)
        encoded = slot.sizes.pulled is not None and reply.serial > 0
        body = view(slot.pulled[: slot.num_pulled]) if encoded else views.weights
        generation, members = self._new_members(reply.assignment)
        facts = reply.serial, reply.version, reply.batch, reply.lr, reply.steps, generation
        over = frames.DRAINED if reply.finished and self.is_drained else reply.finished
        head = REPLY_HEAD.pack(over, encoded, self.wants_state, *facts, len(members), len(body), reply.discarded)
        pad = padding(len(members) + len(body))
        nbytes = len(head) + len(members) + len(body) + len(pad)
        self.send(frames.header(FrameKind.REPLY, nbytes) + head + members, body, pad)

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
