"""The first of several servers: it decides on order and acceptance, and takes what everybody has a part of."""

from __future__ import annotations

import functools
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.buffers import Sizes
from paceline.core.messages import Input, Push
from paceline.errors import ProtocolError
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.remote_service import BUSY_SECONDS, ClusterService, OwnLine
from paceline.runtimes.server.service import Door
from paceline.runtimes.sharded.channel import Message
from paceline.runtimes.sharded.orders import Part, is_finite, spoil
from paceline.runtimes.sharded.peers import Shard, Shards
from paceline.transports.listener import Listener
from paceline.transports.protocol import Hello

VOTE_SECONDS = 60.0
"""How long a worker may take to bring the other servers their parts of what it brought the first."""


class Vote(NamedTuple):
    """What another server says of its part: whether it is finite, and how many bytes came."""

    finite: bool
    nbytes: int


@dataclass
class Pending:
    """What a worker brings: here or not, and what the other servers that have their part say of it."""

    act: Callable[[list[Vote]], None] | None = None
    since: float = 0.0
    votes: dict[int, Vote] = field(default_factory=dict)


class ShardedService(ClusterService):
    """A push counts when every server has its part, and only if all of them are finite."""

    def __init__(
        self,
        host: Host,
        line: OwnLine,
        expected: dict[str, Any],
        largest: Sizes,
        listener: Listener,
        shards: Shards,
    ) -> None:
        payload, pulled = shards.coding.capacities
        size = shards.own.stop - shards.own.start
        largest = largest._replace(weights=size, payload=payload, pulled=pulled)
        super().__init__(host, line, expected, largest, listener)
        self._shards = shards
        self._welcome["shards"] = shards.rows
        self._pending: dict[Part, Pending] = {}
        self._broken: set[Part] = set()
        host.announce = self._announce
        for shard in shards.all:
            self._listen(shard.link, functools.partial(self._hear_shard, shard))

    def _no_room_for_servers(self) -> str:
        return f"all {len(self._shards.all) + 1} servers of this run are here"

    # what is told to the others

    def _announce(self, message: Input) -> None:
        """Every input goes to all servers, but a push that came before: that is answered again, and changes nothing."""
        finite = True
        if isinstance(message, Push):
            if self._came_before(message):
                return
            part = Part(message.worker, message.incarnation, message.seq)
            finite = part not in self._broken
            self._broken.discard(part)
        self._shards.order(message, finite)
        for shard in self._shards.all:
            self._watch_shard(shard)

    def _watch_shard(self, shard: Shard) -> None:
        self._poll.modify(shard.link.fileno(), select.EPOLLIN | (select.EPOLLOUT if shard.link.wants_write else 0))

    def _came_before(self, push: Push) -> bool:
        member = self.host.server.members.get(push.worker)
        return member is not None and member.incarnation == push.incarnation and push.seq <= member.seq

    # what the others tell

    def _hear_shard(self, shard: Shard) -> None:
        while (message := self._shards.receive(shard)) is not None:
            if "part" in message:
                self._count(shard, message)
        self._watch_shard(shard)

    def _look_around(self) -> None:
        if time.monotonic() - self._looked > BUSY_SECONDS:
            self._shards.excuse()
        self._shards.require_signs()
        super()._look_around()
        while self._shards.heard:
            self._count(*self._shards.heard.popleft())
        late = time.monotonic() - VOTE_SECONDS
        for worker in {part.worker for part, pending in self._pending.items() if pending.act and pending.since < late}:
            self._note(f"worker {worker} did not bring every server its part in {VOTE_SECONDS:g} s: it is sent away")
            self._send_off(self._tcp[worker])

    def _count(self, shard: Shard, message: Message) -> None:
        """A server has its part of something."""
        part = Part(*message["part"])
        door = self._tcp.get(part.worker)
        if door is None or door.incarnation != part.incarnation:
            return  # its worker is gone
        member = self.host.server.members.get(part.worker)
        if member is not None and member.incarnation == part.incarnation and part.seq <= member.seq:
            return  # it came before
        if "wrong" in message:
            self._note(f"worker {part.worker}: {message['wrong']}")
            self._send_off(door)
            return
        vote = Vote(bool(message["finite"]), int(message["nbytes"]))
        self._pending.setdefault(part, Pending()).votes[shard.number] = vote
        self._act_on(part)

    def _wait_for(self, part: Part, act: Callable[[list[Vote]], None]) -> None:
        pending = self._pending.setdefault(part, Pending())
        pending.act, pending.since = act, time.monotonic()
        self._act_on(part)

    def _act_on(self, part: Part) -> None:
        pending = self._pending[part]
        if pending.act is not None and len(pending.votes) == len(self._shards.all):
            del self._pending[part]
            pending.act(list(pending.votes.values()))

    # workers

    def _take(self, door: Door, push: Push) -> None:
        """A push is handed on when everybody has its part of it."""
        if self._came_before(push):
            super()._take(door, push)
            return
        part = Part(push.worker, push.incarnation, push.seq)
        if part in self._pending and self._pending[part].act is not None:
            return  # again, after a reconnect: it is waited for already
        try:
            opened = self._open(push)
        except ProtocolError as error:
            self._note(f"worker {door.worker}: {error}")
            self._send_off(door)
            return
        here, nbytes = is_finite(opened.update), push.update.nbytes

        def act(elsewhere: list[Vote]) -> None:
            if not (here and all(vote.finite for vote in elsewhere)):
                spoil(opened.update)
                self._broken.add(part)
            self._weigh([nbytes, *(vote.nbytes for vote in elsewhere)])
            ClusterService._take(self, door, opened)

        self._wait_for(part, act)

    def _open(self, push: Push) -> Push:
        opened = self._shards.opened
        return push if opened is None else push._replace(update=opened.open(push.update))

    def _weigh(self, parts: list[int]) -> None:
        """What the push weighs that is about to be taken; where every server is sent all of it, it counts once."""
        opened, push = self._shards.opened, self._shards.coding.push
        if opened is not None and push is not None:
            opened.nbytes = parts[0] if push.is_replicated else sum(parts)

    def _capacities(self) -> tuple[int | None, int | None]:
        return self._shards.coding.capacities

    def welcome(self, door: Door, hello: Hello) -> None:
        """So is a worker let in; its memory here is the part of one that `gather` can fill."""
        weights = self.host.server.weights
        whole = hello.slot.widened(weights.new_zeros(weights.shape), self._shards.own)

        def act(elsewhere: list[Vote]) -> None:
            ClusterService.welcome(self, door, Hello(hello.join, whole, hello.facts))

        self._wait_for(Part(door.worker, door.incarnation, -1), act)

    def _send_off(self, door: Door) -> None:
        for part in [part for part in self._pending if part[:2] == (door.worker, door.incarnation)]:
            del self._pending[part]
        super()._send_off(door)
