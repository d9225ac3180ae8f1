"""A worker's doors to all servers of a run, as one: a push goes to all, and they answer at one version."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from paceline.core.buffers import Memory, Sizes
from paceline.core.messages import Join, Push, Reply
from paceline.errors import Forgotten, PacelineError, ProtocolError, UserError
from paceline.runtimes.sharded.spans import Coding
from paceline.transports.connection import ANYWHERE, parse_address
from paceline.transports.protocol import Timing
from paceline.transports.tcp_client import TcpWorkerDoor

OpenDoor: TypeAlias = Callable[[str, str | None], TcpWorkerDoor]
"""To a server at an address, with a certificate of this fingerprint."""
CodingOf: TypeAlias = Callable[[slice], Coding]
"""How the parts of pushes and replies of a range are encoded."""
LOOK_SECONDS = 0.5
OVER_SECONDS = 5.0
FORGOTTEN_SECONDS = 90.0
"""How long the first server may take to find out that we are of no use to another."""


@dataclass
class _Part:
    """One server: the door to it, its range of the weights, and what crosses there."""

    door: TcpWorkerDoor
    span: slice
    coding: Coding
    memory: Memory = field(default_factory=lambda: Memory.private(Sizes(0)))

    def of(self, whole: Memory, with_rest: bool) -> Memory:
        """Its part of a worker's memory."""
        self.memory = whole.part(self.span, with_rest, *self.coding.capacities)
        return self.memory

    def cut(self, update: Tensor) -> Tensor:
        """Its part of a push."""
        push = self.coding.push
        return update[self.span] if push is None else self.memory.update[: push.extract(update, self.memory.update)]

    def paste(self, whole: Memory) -> None:
        """Put its part of an encoded reply where the worker decodes all of it."""
        pull, nbytes = self.coding.pull, self.memory.num_pulled
        if pull is not None and nbytes:
            pull.insert(self.memory.pulled[:nbytes], whole.pulled)
            assert whole.sizes.pulled is not None
            whole.num_pulled, self.memory.num_pulled = whole.sizes.pulled, 0


class ShardDoors:
    """The worker's only door, whatever the number of servers. The first alone decides; the others have parts."""

    def __init__(self, address: str, open_door: OpenDoor, first: TcpWorkerDoor) -> None:
        self._host, self._open = parse_address(address)[0], open_door
        self._first = first
        self._own: _Part | None = None
        """Of the first server, where it is not the only one."""
        self._others: list[_Part] = []
        self._memory: Memory | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.farewell: str | None = None

    def apply(self, fields: Mapping[str, Any], patience: float) -> dict[str, Any]:
        """Ask the first server for a place."""
        return self._first.apply(fields, patience)

    def reach(self, welcome: Mapping[str, Any], size: int, coding_of: CodingOf) -> None:
        """Find the other servers, which the first one's welcome names."""
        self._forsake_others()
        self._own = None
        shards = welcome.get("shards")
        if not shards:
            return
        if shards[-1]["span"][1] != size:
            raise UserError(
                f"the server's model has {shards[-1]['span'][1]} floats, and the one made here {size}: give it the "
                "same code and the same data"
            )
        spans = [slice(*shard["span"]) for shard in shards]
        self._own = _Part(self._first, spans[0], coding_of(spans[0]))
        who = {"worker": welcome["worker"], "incarnation": welcome["incarnation"]}
        for shard, span in zip(shards[1:], spans[1:], strict=True):
            host, port = parse_address(shard["address"])
            host = self._host if host in ANYWHERE else host
            door = self._open(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", shard["fingerprint"])
            self._others.append(_Part(door, span, coding_of(span)))
            door.apply(who)
        self._pool = ThreadPoolExecutor(len(self._others), "paceline-shard")

    def hello(self, join: Join, memory: Memory, facts: dict[str, Any]) -> Reply | None:
        """Say what we bring to every server, and wait for the first weights."""
        own, self._memory = self._own, memory
        if own is None:
            return self._first.hello(join, memory, facts)

        def ask(part: _Part) -> Reply | None:
            return part.door.hello(join, part.of(memory, with_rest=False), {})

        return self._together(lambda: self._first.hello(join, own.of(memory, with_rest=True), facts), ask)

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        """Send every server its part of a push and wait for all replies; None when one is gone for good."""
        own = self._own
        if own is None:
            return self._first.exchange(push, timing)

        def ask(part: _Part) -> Reply | None:
            return part.door.exchange(push._replace(update=part.cut(push.update), state=push.state[:0]), timing)

        reply = self._together(lambda: self._first.exchange(push._replace(update=own.cut(push.update)), timing), ask)
        assert self._memory is not None
        for part in (own, *self._others):
            part.paste(self._memory)
        return reply

    def _together(self, ask_first: Callable[[], Reply | None], ask: Callable[[_Part], Reply | None]) -> Reply | None:
        assert self._pool is not None
        asked: list[Future[Reply | None]] = [self._pool.submit(ask, part) for part in self._others]
        try:
            reply = ask_first()
        except PacelineError:
            self._forsake_others()
            raise
        if reply is None:
            self._forsake_others()
            return None
        for part, future in zip(self._others, asked, strict=True):
            if reply.over:  # what the others would say is of no use any more
                wait([future], OVER_SECONDS)
                continue
            answer = self._await(future)
            if answer is None:
                return None
            if (answer.serial, answer.version) != (reply.serial, reply.version):
                raise ProtocolError(
                    f"the server of floats {part.span.start} to {part.span.stop} answered at version "
                    f"{answer.version}, the first at {reply.version}"
                )
        return reply

    def _await(self, future: Future[Reply | None]) -> Reply | None:
        """The reply of another server. It may be gone for ever, or know us no more: then so does the first, which is
        asked by beats meanwhile, and soon tells us to join anew."""
        deadline: float | None = None
        while True:
            done, _ = wait([future], LOOK_SECONDS)
            answer = future.result() if done else None
            if answer is not None or (deadline is not None and time.monotonic() > deadline):
                return answer
            if self._first.forgotten is not None:
                self._forsake_others()
                raise Forgotten(self._first.forgotten)
            if done:
                deadline = deadline or time.monotonic() + FORGOTTEN_SECONDS
                time.sleep(LOOK_SECONDS)

    def _forsake_others(self) -> None:
        """They are of a run that has forgotten us, or is over."""
        for part in self._others:
            part.door.abandon()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        for part in self._others:
            part.door.close()
        self._others = []

    def close(self) -> None:
        """Say good-bye to all."""
        for part in self._others:
            part.door.close()
        self._first.close()
        self._others = []
        if self._pool is not None:
            self._pool.shutdown()
