"""The connection of a user's own loop to a server on another machine: TCP, and what a loop asks for beside replies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from paceline.core.buffers import WorkerBuffers, view
from paceline.core.messages import Join, Push, Reply
from paceline.errors import ProtocolError, UnknownWorker
from paceline.interfaces import State
from paceline.system.memory import available_memory
from paceline.transports.frames import (
    ALIGNMENT,
    ANSWER_HEAD,
    REQUEST_HEAD,
    FrameKind,
    Reading,
    header,
    padding,
    read_arriving,
    read_bytes,
)
from paceline.transports.protocol import RequestKind, ScriptTransport, Timing
from paceline.transports.tcp_client import FIRST_PATIENCE_SECONDS, TcpClient
from paceline.transports.tcp_server import FROZEN, USED, WEIGHTS

ReadAnswer = Callable[[int], Reading[None]]
"""Reads an answer of so many bytes; raises ProtocolError if there is no place of that size. Called again after a
reconnect in the middle of the answer."""
_SAME_PLACE = ("worker", "incarnation", "run", "config", "script")
"""What a new welcome must repeat so that a script that has not joined yet can go on with it."""


class StartAgain(SystemExit):
    """Ends a script whose server does not know this worker any more: a restarted server. The script starts again."""


class LoopClient(TcpClient, ScriptTransport):
    """A worker's connection to the server of users' own loops; of any other worker unless `runs_script`."""

    runs_script = True
    """Whether a script calls this client: `StartAgain` ends it where other workers join again."""
    is_leaving: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this process was asked to leave the run: KeyboardInterrupt ends its script after its push."""
    _num_requests = 0
    _initial_state: tuple[State, State] = ({}, {})
    _welcome: Mapping[str, Any] = MappingProxyType({})

    def apply(
        self,
        fields: Mapping[str, Any],
        patience: float = FIRST_PATIENCE_SECONDS,
        beats: bool = True,
        fresh: Callable[[], Mapping[str, Any]] = dict,
    ) -> dict[str, Any]:
        """Ask to join, and keep the welcome: the script begins with what it says."""
        welcome = super().apply(fields, patience, beats, fresh)
        self._welcome = welcome
        return welcome

    @property
    def has_joined(self) -> bool:
        """Whether the script has said hello."""
        return self._memory is not None

    def keep(self, frozen: State, optimizers: State) -> None:
        """Keep what no push brings, for a server that asks for it: frozen tensors, and states of used optimizers."""
        self._initial_state = frozen, optimizers

    def hello(self, join: Join, memory: WorkerBuffers, facts: dict[str, Any]) -> Reply | None:
        """Join, with the initial weights if the server asks for them, and wait for the first weights."""
        if not self.runs_script:
            return super().hello(join, memory, facts)
        reply = self._unless_refused(self._join(join, memory, facts))
        if reply is not None and not isinstance(reply, Reply):
            reply = self._unless_refused(self._asking(self._initial(memory), lambda: self._reply(join)))
        self._initial_state = {}, {}
        return reply if isinstance(reply, Reply) else None

    def _join(self, join: Join, memory: WorkerBuffers, facts: dict[str, Any]) -> Reply | FrameKind | None:
        """Say hello, and again to a server that has forgotten this worker before that and still has its place."""
        while True:
            frame = self._begin(join, memory, facts)
            try:
                return self._ask([frame], lambda: self._reply_or_wanted(join))
            except UnknownWorker as unknown:
                if any(unknown.welcome.get(name) != self._welcome.get(name) for name in _SAME_PLACE):
                    raise StartAgain from None

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        """Send a push and wait for its reply. Return None if the server is gone for good."""
        if not self.runs_script:
            return super().exchange(push, timing)
        with self._starting_again():
            reply = self._unless_refused(super().exchange(push, timing))
        if self.is_leaving():
            raise KeyboardInterrupt
        return reply

    def read_weights(self, final: bool) -> bool | None:
        """Get the weights that would be saved now into this worker's buffers. Return whether they are averaged."""
        assert self._memory is not None
        kind = RequestKind.FINAL_WEIGHTS if final else RequestKind.WEIGHTS
        return self._request(kind, _into(view(self._memory.weights)))

    def read_optimizer(self, number: int) -> State | None:
        """Return the optimizer's state as the server has it."""
        content = bytearray()

        def read_content(nbytes: int) -> Reading[None]:
            nonlocal content
            content = yield from read_arriving(nbytes)

        if self._request(RequestKind.OPTIMIZER, read_content, optimizer=number) is None:
            return None
        try:
            return load(bytes(content))
        except (SafetensorError, ValueError, KeyError) as error:
            raise ProtocolError(f"the server sent a state of an optimizer that cannot be read ({error})") from None

    def merge_statistics(self, samples: int) -> bool:
        """Replace the statistics in this worker's buffers by those of all workers."""
        assert self._memory is not None
        state = view(self._memory.state)
        return self._request(RequestKind.STATISTICS, _into(state), samples, state) is not None

    def _asking(self, parts: list[memoryview], reading: Callable[[], Reading[Any]]) -> Any:
        with self._starting_again():
            return self._ask(parts, reading)

    @contextlib.contextmanager
    def _starting_again(self) -> Iterator[None]:
        """End a script, which cannot join again in its process, if the server does not know this worker any more."""
        try:
            yield
        except UnknownWorker:
            raise StartAgain from None

    def _request(
        self,
        kind: RequestKind,
        reading: ReadAnswer,
        samples: int = 0,
        body: memoryview | None = None,
        optimizer: int = 0,
    ) -> bool | None:
        """Ask for something and wait for it. Return the answer's flag, None if the server is gone."""
        self._num_requests += 1
        number, body = self._num_requests, memoryview(b"") if body is None else body
        head = REQUEST_HEAD.pack(number, kind, optimizer, samples)
        pad = padding(len(body))
        first = header(FrameKind.REQUEST, len(head) + len(body) + len(pad)) + head
        found = self._asking([memoryview(first), body, memoryview(pad)], lambda: self._answer(number, reading))
        return None if self._unless_refused(found) is None else bool(found)

    def _answer(self, number: int, reading: ReadAnswer) -> Reading[bool]:
        _, nbytes = yield from self._header({FrameKind.ANSWER: available_memory()})
        answered, averaged, pad = ANSWER_HEAD.unpack((yield from read_bytes(ANSWER_HEAD.size)))
        if answered != number or nbytes < ANSWER_HEAD.size + pad or pad >= ALIGNMENT:
            raise ProtocolError(f"an answer of {nbytes} bytes to request {answered} instead of {number}")
        yield from reading(nbytes - ANSWER_HEAD.size - pad)
        yield from read_bytes(pad)
        return bool(averaged)

    def _reply_or_wanted(self, join: Join) -> Reading[Reply | FrameKind]:
        kind, nbytes = yield from self._header({FrameKind.REPLY: self._largest_reply, FrameKind.WANTED: 0})
        if kind is FrameKind.WANTED:
            return kind
        return (yield from self._reply_body(join.worker, join.incarnation, nbytes))

    def _initial(self, memory: WorkerBuffers) -> list[memoryview]:
        """The frame of what the model begins with."""
        frozen, used = self._initial_state
        named = {WEIGHTS: memory.weights, **_prefixed(FROZEN, frozen), **_prefixed(USED, used)}
        content = save({name: tensor.contiguous() for name, tensor in named.items()})
        return [memoryview(header(FrameKind.INITIAL, len(content))), memoryview(content)]


def _prefixed(prefix: str, tensors: State) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _into(place: memoryview) -> ReadAnswer:
    def reading(nbytes: int) -> Reading[None]:
        if len(place) != nbytes:
            raise ProtocolError(f"an answer of {nbytes} bytes for buffers of {len(place)}")
        yield place

    return reading
