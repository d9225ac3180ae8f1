"""Coordinate the servers of a sharded run: the first decides on the order of inputs and whether a push counts."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.buffers import BufferSizes
from paceline.core.messages import Input, Push
from paceline.core.server import Server
from paceline.errors import ProtocolError
from paceline.runtimes.server.remote_service import PushGate
from paceline.runtimes.server.runtime import TcpPeers
from paceline.runtimes.sharded.channel import Message
from paceline.runtimes.sharded.orders import PushId, is_finite, poison
from paceline.runtimes.sharded.peers import ShardPeer, ShardPeers
from paceline.transports.protocol import Hello
from paceline.transports.tcp_server import TcpPeer

VOTE_SECONDS = 60.0  # how long a worker may take to send the other servers their parts of what it sent the first


class ShardVote(NamedTuple):
    """What another server says about its part of a push: whether it is finite, and how many bytes came."""

    finite: bool
    nbytes: int


@dataclass
class PendingPush:
    """A message of a worker, here or still to come, and the votes of the other servers on their parts of it."""

    act: Callable[[list[ShardVote]], None] | None = None
    since: float = 0.0
    votes: dict[int, ShardVote] = field(default_factory=dict)


class ShardedPeers(TcpPeers):
    """The runtime of the first of several servers: replies go to the workers, inputs to the other servers too."""

    is_sharded = True

    def __init__(self) -> None:
        super().__init__()
        self.coordinator: Coordinator | None = None  # set once the other servers are connected

    def announce(self, message: Input) -> None:
        """Pass an input on to the other servers, once they are connected."""
        if self.coordinator is not None:
            self.coordinator.announce(message)

    def gather(self) -> None:
        """Fetch all weights and rule state from the other servers, once they are connected."""
        if self.coordinator is not None:
            self.coordinator.gather()


class Coordinator(PushGate):
    """Lets a push take effect when every server has its part of it; it counts only if all parts are finite."""

    def __init__(self, server: Server, peers: ShardedPeers, shards: ShardPeers, largest: BufferSizes) -> None:
        self._server, self._peers, self._shards = server, peers, shards
        payload, pulled = shards.coding.capacities
        size = shards.own_span.stop - shards.own_span.start
        self.largest = largest._replace(weights=size, payload=payload, pulled=pulled)
        self.welcome = {"shards": shards.rows}
        self.full = f"all {len(shards.all) + 1} servers of this run are here"
        self._pending: dict[PushId, PendingPush] = {}
        self._broken: set[PushId] = set()  # pushes of which some part is not finite
        self._give_up: Callable[[TcpPeer, str], None] | None = None
        self._expel: Callable[[TcpPeer, str], None] | None = None
        peers.coordinator = self

    def open(self, give_up: Callable[[TcpPeer, str], None], expel: Callable[[TcpPeer, str], None]) -> None:
        """Listen to the other servers; both calls disconnect a worker and tell the user why."""
        self._give_up, self._expel = give_up, expel
        for shard in self._shards.all:
            self._peers.loop.register(shard.link, functools.partial(self._on_message, shard))

    # the other servers

    def announce(self, message: Input) -> None:
        """Send an input to all other servers, unless it is a repeated push, which changes nothing."""
        finite = True
        if isinstance(message, Push):
            part = PushId(message.worker, message.incarnation, message.seq)
            if self._is_repeated(part):
                return
            finite = part not in self._broken
            self._broken.discard(part)
        self._shards.order(message, finite)
        for shard in self._shards.all:
            self._peers.loop.watch_writes(shard.link)

    def gather(self) -> None:
        """Fetch all weights and rule state; votes that come meanwhile are counted after the current input."""
        self._shards.gather()
        if self._shards.heard:
            self._peers.loop.call_soon(self._count_postponed)

    def _count_postponed(self) -> None:
        while self._shards.heard:
            self._count(*self._shards.heard.popleft())

    def _is_repeated(self, part: PushId) -> bool:
        member = self._server.members.get(part.worker)
        return member is not None and member.incarnation == part.incarnation and part.seq <= member.seq

    def _on_message(self, shard: ShardPeer) -> None:
        while (message := self._shards.receive(shard)) is not None:
            if message.get("part") is not None:
                self._count(shard, message)
        self._peers.loop.watch_writes(shard.link)

    def _count(self, shard: ShardPeer, message: Message) -> None:
        part = PushId(*message["part"])
        assert self._expel is not None, "workers come after `open`"
        peer = self._peers.by_worker.get(part.worker)
        if peer is None or peer.incarnation != part.incarnation or self._is_repeated(part):
            return
        if message["wrong"] is not None:
            self._expel(peer, message["wrong"])
            return
        vote = ShardVote(message["finite"], message["nbytes"])
        self._pending.setdefault(part, PendingPush()).votes[shard.number] = vote
        self._act_if_complete(part)

    def check(self, was_busy: bool) -> None:
        """Check that the other servers are alive, and remove workers that do not send them their parts."""
        if was_busy:
            self._shards.excuse()
        self._shards.require_signs()
        late = time.monotonic() - VOTE_SECONDS
        for worker in {part.worker for part, pending in self._pending.items() if pending.act and pending.since < late}:
            what = f"worker {worker} did not send every server its part within {VOTE_SECONDS:g} s"
            assert self._give_up is not None, "workers come after `open`"
            self._give_up(self._peers.by_worker[worker], f"{what}: it is disconnected")

    # workers

    def push(self, peer: TcpPeer, push: Push, apply: Callable[[Push], None]) -> None:
        """Decode this server's part of the push, and call `apply` when all servers have theirs."""
        part = PushId(push.worker, push.incarnation, push.seq)
        if self._is_repeated(part):
            apply(push)
            return
        if part in self._pending and self._pending[part].act is not None:
            return  # sent again after a reconnect
        opened, codec, nbytes = self._shards.opened, self._shards.coding.push, push.update.nbytes
        try:
            decoded = push if opened is None else push._replace(update=opened.open(push.update))
        except ProtocolError as error:
            raise ProtocolError(f"worker {peer.worker}: {error}") from None
        finite = is_finite(decoded.update)

        def act(votes: list[ShardVote]) -> None:
            if not (finite and all(vote.finite for vote in votes)):
                poison(decoded.update)
                self._broken.add(part)
            if opened is not None and codec is not None:  # a payload that every server is sent counts once
                opened.nbytes = nbytes if codec.is_replicated else nbytes + sum(vote.nbytes for vote in votes)
            apply(decoded)

        self._wait_for(part, act)

    def hello(self, peer: TcpPeer, hello: Hello, join: Callable[[Hello], None]) -> None:
        """Call `join` when all servers know the worker; its memory becomes a part of one that `gather` can fill."""
        if hello.slot.sizes != self.largest:
            raise ProtocolError(f"worker {peer.worker} sent buffers that do not fit its part of the weights")
        weights = self._server.weights
        whole = hello.slot.full_view(weights.new_zeros(weights.shape), self._shards.own_span)
        part = PushId(peer.worker, peer.incarnation, -1)
        self._wait_for(part, lambda votes: join(Hello(hello.join, whole, hello.facts)))

    def _wait_for(self, part: PushId, act: Callable[[list[ShardVote]], None]) -> None:
        pending = self._pending.setdefault(part, PendingPush())
        pending.act, pending.since = act, time.monotonic()
        self._act_if_complete(part)

    def _act_if_complete(self, part: PushId) -> None:
        pending = self._pending[part]
        if pending.act is not None and len(pending.votes) == len(self._shards.all):
            del self._pending[part]
            pending.act(list(pending.votes.values()))

    def forget(self, peer: TcpPeer) -> None:
        """Drop what waits for votes of a worker that is gone."""
        for part in [part for part in self._pending if part[:2] == (peer.worker, peer.incarnation)]:
            del self._pending[part]
