"""A worker's doors to all servers of a run, as one: a push goes to all, and they answer at one version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from paceline.core.memory import Memory
from paceline.core.messages import Join, Push, Reply
from paceline.errors import Forgotten, PacelineError, ProtocolError, UserError
from paceline.transports.connection import ANYWHERE, parse_address
from paceline.transports.shared_memory import Timing
from paceline.transports.tcp_worker import TcpWorkerDoor

OpenDoor: TypeAlias = Callable[[str, str | None], TcpWorkerDoor]
"""To a server at an address, with a certificate of this fingerprint."""
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class _Part:
    """One server: the door to it, and its range of the weights."""

    door: TcpWorkerDoor
    span: slice


class ShardDoors:
    """The worker's only door, whatever the number of servers. The first alone decides; the others have parts."""

    def __init__(self, address: str, open_door: OpenDoor, first: TcpWorkerDoor) -> None:
        self._host, self._open = parse_address(address)[0], open_door
        self._first = first
        self._span: slice | None = None
        self._others: list[_Part] = []
        self._pool: ThreadPoolExecutor | None = None
        self.farewell: str | None = None

    def apply(self, fields: Mapping[str, Any], patience: float) -> dict[str, Any]:
        """Ask the first server for a place."""
        return self._first.apply(fields, patience)

    def reach(self, welcome: Mapping[str, Any], size: int) -> None:
        """Find the other servers, which the first one's welcome names."""
        self._forsake_others()
        shards = welcome.get("shards")
        self._span = slice(*shards[0]["span"]) if shards else None
        if not shards:
            return
        if shards[-1]["span"][1] != size:
            raise UserError(
                f"the server's model has {shards[-1]['span'][1]} floats, and the one made here {size}: give it the "
                "same code and the same data"
            )
        who = {"worker": welcome["worker"], "incarnation": welcome["incarnation"]}
        for shard in shards[1:]:
            host, port = parse_address(shard["address"])
            host = self._host if host in ANYWHERE else host
            door = self._open(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", shard["fingerprint"])
            self._others.append(_Part(door, slice(*shard["span"])))
            door.apply(who)
        self._pool = ThreadPoolExecutor(len(self._others), "paceline-shard")

    def hello(self, join: Join, memory: Memory, facts: dict[str, Any]) -> Reply | None:
        """Say what we bring to every server, and wait for the first weights."""
        if self._span is None:
            return self._first.hello(join, memory, facts)
        own = memory.part(self._span, with_rest=True)

        def ask(part: _Part) -> Reply | None:
            return part.door.hello(join, memory.part(part.span, with_rest=False), {})

        return self._together(lambda: self._first.hello(join, own, facts), ask)

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        """Send every server its part of a push and wait for all replies; None when one is gone for good."""
        span = self._span
        if span is None:
            return self._first.exchange(push, timing)

        def ask(part: _Part) -> Reply | None:
            return part.door.exchange(push._replace(update=push.update[part.span], state=push.state[:0]), timing)

        return self._together(lambda: self._first.exchange(push._replace(update=push.update[span]), timing), ask)

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
        """The reply of another server; it may be gone for ever, as the first, which beats meanwhile, finds out."""
        while True:
            try:
                return future.result(LOOK_SECONDS)
            except TimeoutError:
                if self._first.forgotten is not None:
                    self._forsake_others()
                    raise Forgotten(self._first.forgotten) from None

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
