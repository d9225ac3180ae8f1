"""What a runtime provides to its Host, and the runtimes that send replies to a function or to connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from paceline.core.messages import Input, OwnLoopInput, Push, Reply
from paceline.core.server import Server
from paceline.runtimes.server.accounting import TimeShares, Way
from paceline.system.event_loop import EventLoop
from paceline.transports.frames import Ending
from paceline.transports.protocol import Peer, ScriptPeer
from paceline.transports.tcp_server import TcpPeer


class Runtime(Protocol):
    """What a runtime provides to its Host. The defaults fit one server that holds all weights; `send` has none."""

    way: Way = "server"  # what the time between a worker's push and its arrival at the server counts as
    groups_inputs: bool = False
    """Whether the runtime calls `Host.commit` after a group of inputs; else the host commits after each."""
    is_sharded: bool = False  # whether other servers hold parts of the weights. `announce` is called only if so.

    def send(self, reply: Reply, with_state: bool) -> None:
        """Send a reply whose weights are in the worker's memory.

        With `with_state`, a checkpoint is due: the worker's next push should include its local state.
        """

    def announce(self, message: Input) -> None:
        """Pass an input on to the other servers, before it is handled here."""
        return

    def gather(self) -> None:
        """Fetch all weights and rule state from the other servers."""
        return

    def can_checkpoint(self, server: Server) -> bool:
        """Whether the workers' memories hold everything that a checkpoint needs."""
        return True

    def time_shares(self, worker: int) -> TimeShares | None:
        """Where a worker's time went, if the runtime measures it itself."""
        return None


class LocalRuntime(Runtime):
    """Replies go to a function of this process."""

    def __init__(self, deliver: Callable[[Reply], None], way: Way = "server") -> None:
        self._deliver, self.way = deliver, way

    def send(self, reply: Reply, with_state: bool) -> None:
        """Call the function."""
        self._deliver(reply)


class LoopService(Protocol):
    """What a service calls if its workers run users' own loops."""

    def check_push(self, push: Push) -> None:
        """Look at a push before it is taken. Raise UserError if the run cannot go on with it."""

    def take(self, peer: ScriptPeer, message: OwnLoopInput) -> None:
        """Take a message that only a user's own loop sends."""

    def forget(self, peer: ScriptPeer) -> None:
        """A worker is gone: the others do not wait for it."""

    def settle(self) -> None:
        """Answer the workers that wait for the end, if it has come."""


P = TypeVar("P", bound=Peer)


class Peers(Runtime, Generic[P]):
    """The workers' connections by worker number. Replies go to them."""

    groups_inputs = True

    def __init__(self) -> None:
        self.by_worker: dict[int, P] = {}
        self.released: set[int] = set()  # workers that were sent their last reply

    def add(self, peer: P) -> None:
        """Register a connection; its worker replaces an earlier one of the same number."""
        self.by_worker[peer.worker] = peer
        self.released.discard(peer.worker)

    def remove(self, peer: P) -> None:
        """Forget a connection, unless its worker number has a newer one."""
        if self.by_worker.get(peer.worker) is peer:
            del self.by_worker[peer.worker]

    def send(self, reply: Reply, with_state: bool) -> None:
        """Send a reply, unless the incarnation that it answers is gone."""
        peer = self.by_worker.get(reply.worker)
        if peer is not None and peer.incarnation == reply.incarnation:
            peer.answer(reply)
            if reply.finished:
                self.released.add(reply.worker)


class TcpPeers(Peers[TcpPeer]):
    """The workers' TCP connections. A broken connection stays until its worker reconnects or is lost."""

    way = "sending"

    def __init__(self) -> None:
        super().__init__()
        self.loop = EventLoop()
        self.ending_of: Callable[[int], Ending] = lambda worker: Ending.FINISHED  # set by the service, which knows more

    def send(self, reply: Reply, with_state: bool) -> None:
        """Send a reply; what the connection does not take at once is sent when it can be written."""
        peer = self.by_worker.get(reply.worker)
        if peer is not None:
            peer.wants_state = with_state and _has_state(peer)
            if reply.finished:
                peer.ending = self.ending_of(reply.worker)
            super().send(reply, with_state)
            self.loop.watch_writes(peer)

    def send_rest(self) -> None:
        """Go on with what connections have not taken at once, when they can be written."""
        for peer in self.by_worker.values():
            self.loop.watch_writes(peer)

    def can_checkpoint(self, server: Server) -> bool:
        """Whether every worker's latest push brought its local state, as it does once a checkpoint is due."""
        for worker, peer in self.by_worker.items():
            member = server.members.get(worker)
            awaited = member is not None and member.live and not member.inactive and member.seq >= 0
            if member is not None and awaited and _has_state(peer) and peer.state_seq != member.seq:
                return False
        return True


def _has_state(peer: TcpPeer) -> bool:
    return peer.slot is not None and peer.slot.sizes.local_state > 0
