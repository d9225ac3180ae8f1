"""A worker's connections to all servers of a sharded run, as one transport: every server gets its part of a push."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Join, Push, Reply
from paceline.errors import PacelineError, ProtocolError, UnknownWorker, UserError
from paceline.runtimes.sharded.spans import SpanCodecs
from paceline.transports.connection import ANYWHERE, parse_address
from paceline.transports.protocol import Timing, Transport
from paceline.transports.tcp_client import TcpClient

OpenClient: TypeAlias = Callable[[str, str | None], TcpClient]
"""Create a client for the server at an address, with a certificate of this fingerprint."""
CodingOf: TypeAlias = Callable[[slice], SpanCodecs]  # the codecs for a range of the weights
LOOK_SECONDS = 0.5
OVER_SECONDS = 5.0
FORGOTTEN_SECONDS = 90.0  # how long the first server may take to notice that another server has lost this worker


@dataclass
class _ShardConnection:
    """One server: its client, its range of the weights, and its part of the worker's buffers."""

    client: TcpClient
    span: slice
    coding: SpanCodecs
    memory: WorkerBuffers = field(default_factory=lambda: WorkerBuffers.private(BufferSizes(0)))

    def of(self, whole: WorkerBuffers, with_rest: bool) -> WorkerBuffers:
        """Make its part of the worker's buffers."""
        self.memory = whole.part(self.span, with_rest, *self.coding.capacities)
        return self.memory

    def extract(self, update: Tensor) -> Tensor:
        """Return its part of a push."""
        push = self.coding.push
        return update[self.span] if push is None else self.memory.update[: push.extract(update, self.memory.update)]

    def insert(self, whole: WorkerBuffers) -> None:
        """Copy its part of an encoded reply to where the worker decodes the whole."""
        pull, nbytes = self.coding.pull, self.memory.num_pulled
        if pull is not None and nbytes:
            pull.insert(self.memory.pulled[:nbytes], whole.pulled)
            assert whole.sizes.pulled is not None
            whole.num_pulled, self.memory.num_pulled = whole.sizes.pulled, 0


class ShardedClient(Transport):
    """One transport to any number of servers. The first server decides; the others hold parts of the weights."""

    def __init__(self, address: str, open_client: OpenClient, first: TcpClient) -> None:
        self._address, self._host, self._open = address, parse_address(address)[0], open_client
        self.first = self._first = first
        self._own: _ShardConnection | None = None  # the first server's part, if there are several servers
        self._others: list[_ShardConnection] = []
        self._memory: WorkerBuffers | None = None
        self._pool: ThreadPoolExecutor | None = None

    @property
    def farewell(self) -> str | None:
        """Why the first server refused the worker, if it did."""
        return self._first.farewell

    @property
    def ending(self) -> int:
        """Why the last reply ended the work of this worker, as an `Ending`; 0: it goes on."""
        return self._first.ending

    def apply(
        self, fields: Mapping[str, Any], patience: float, fresh: Callable[[], Mapping[str, Any]] = dict
    ) -> dict[str, Any]:
        """Ask the first server to join."""
        return self._first.apply(fields, patience, fresh=fresh)

    def count_steps(self, num_steps: Callable[[], int]) -> None:
        """Let the heartbeats to the first server say how many steps the worker has begun."""
        self._first.num_steps = num_steps

    def reach(self, welcome: Mapping[str, Any], size: int, coding_of: CodingOf) -> None:
        """Connect to the other servers, which the first one's welcome names."""
        self._drop_others()
        self._own = None
        if not (shards := welcome.get("shards")):
            return
        spans = [slice(*shard["span"]) for shard in shards]
        if [span.start for span in spans] != [0, *(span.stop for span in spans[:-1])]:
            raise ProtocolError("the server divides the weights into parts with gaps or overlaps")
        if spans[-1].stop != size:
            what = f"the server's model has {spans[-1].stop} floats, and the one made here {size}"
            raise UserError(f"{what}: give it the same code and the same data")
        self._own = _ShardConnection(self._first, spans[0], coding_of(spans[0]))
        known = {"worker": welcome["worker"], "incarnation": welcome["incarnation"]}
        for shard, span in zip(shards[1:], spans[1:], strict=True):
            host, port = parse_address(shard["address"])
            host = self._host if host in ANYWHERE else host
            client = self._open(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", shard["fingerprint"])
            self._others.append(_ShardConnection(client, span, coding_of(span)))
            client.apply(known)
        self._pool = ThreadPoolExecutor(len(self._others), "paceline-shard")

    def hello(self, join: Join, memory: WorkerBuffers, facts: dict[str, Any]) -> Reply | None:
        """Join at every server, and wait for the first weights."""
        self._memory = memory
        if (own := self._own) is None:
            return self._first.hello(join, memory, facts)

        def ask(part: _ShardConnection) -> Reply | None:
            return part.client.hello(join, part.of(memory, with_rest=False), {})

        return self._together(lambda: self._first.hello(join, own.of(memory, with_rest=True), facts), ask)

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        """Send every server its part of a push and wait for all replies. Return None if a server is gone for good."""
        if (own := self._own) is None:
            return self._unless_expelled(self._first.exchange(push, timing))

        def ask(part: _ShardConnection) -> Reply | None:
            return part.client.exchange(push._replace(update=part.extract(push.update), state=push.state[:0]), timing)

        reply = self._together(
            lambda: self._first.exchange(push._replace(update=own.extract(push.update)), timing), ask
        )
        assert self._memory is not None
        for part in (own, *self._others):
            part.insert(self._memory)
        return self._unless_expelled(reply)

    def _unless_expelled(self, reply: Reply | None) -> Reply | None:
        """Raise UserError with the first server's reason if it has expelled this worker."""
        if reply is None and self._first.farewell is not None:
            raise UserError(f"{self._address}: {self._first.farewell}")
        return reply

    def report(self, figures: dict[str, float]) -> None:
        """Send metrics that belong in the run's result to the first server, which keeps the run's folder."""
        self._first.report(figures)

    def _together(
        self, ask_first: Callable[[], Reply | None], ask: Callable[[_ShardConnection], Reply | None]
    ) -> Reply | None:
        assert self._pool is not None
        futures = [self._pool.submit(ask, part) for part in self._others]
        try:
            reply = ask_first()
        except PacelineError:
            self._drop_others()
            raise
        if reply is None:
            self._drop_others()
            return None
        for part, future in zip(self._others, futures, strict=True):
            if reply.finished:  # the other replies do not matter any more
                wait([future], OVER_SECONDS)
                continue
            answer = self._await(future)
            if answer is None:
                return None
            if (answer.serial, answer.version) != (reply.serial, reply.version):
                server = f"the server of floats {part.span.start} to {part.span.stop}"
                raise ProtocolError(f"{server} answered at version {answer.version}, the first at {reply.version}")
        return reply

    def _await(self, future: Future[Reply | None]) -> Reply | None:
        """Wait for the reply of another server.

        If that server is gone or has lost this worker, the first server drops the worker too, and its answer to a
        heartbeat says so.
        """
        deadline: float | None = None
        while True:
            done, _ = wait([future], LOOK_SECONDS)
            answer = future.result() if done else None
            if answer is not None or (deadline is not None and time.monotonic() > deadline):
                return answer
            if self._first.forgotten is not None:
                self._drop_others()
                raise UnknownWorker(self._first.forgotten)
            if done:
                deadline = deadline or time.monotonic() + FORGOTTEN_SECONDS
                time.sleep(LOOK_SECONDS)

    def _drop_others(self) -> None:
        """Close the connections to the other servers, because the run is over or has lost this worker."""
        for part in self._others:
            part.client.abandon()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        for part in self._others:
            part.client.close()
        self._others = []

    def close(self) -> None:
        """Leave the run at all servers."""
        for part in self._others:
            part.client.close()
        self._first.close()
        self._others = []
        if self._pool is not None:
            self._pool.shutdown()
