"""What a runtime provides to its Host, and the runtimes that send replies to a function or to connections."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from paceline.core.messages import Input, OwnLoopInput, Push, Reply
from paceline.core.server import Server
from paceline.runtimes.server.accounting import TimeShares, Way
from paceline.system.event_loop import EventLoop
from paceline.system.memory import receive_fds
from paceline.system.strict_json import to_json
from paceline.system.terminal import seconds_text
from paceline.transports.frames import Ending
from paceline.transports.protocol import Peer, ScriptPeer
from paceline.transports.tcp_server import TcpPeer

ABSENT_SECONDS = 30.0  # after which workers of this machine that do not come are named


def absent(workers: Iterable[int], what: str) -> str:
    """One line that names workers which have not done something in time.

    >>> print(absent([1], "joined")), print(absent([1, 3], "joined"))
    worker 1 has not joined after 30 s
    workers 1 and 3 have not joined after 30 s
    (None, None)
    """
    *first, last = map(str, workers)
    who = f"workers {', '.join(first)} and {last} have" if first else f"worker {last} has"
    return f"{who} not {what} after {seconds_text(ABSENT_SECONDS)}"


class Runtime(Protocol):
    """What a runtime provides to its Host. The defaults fit one server that holds all weights; `send` has none."""

    way: Way = "server"  # what the time between a worker's push and its arrival at the server counts as
    groups_inputs: bool = False
    """Whether the runtime calls `Host.commit` after a group of inputs; else the host commits after each."""
    brings_own_states: bool = True  # whether the first replies of a resumed run bring workers their own states
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


class SupervisorChannel:
    """The connection to the supervisor: it sends workers' connections and stops, the server sends progress."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, row: dict[str, Any]) -> None:
        """Send a message. Progress is dropped if the supervisor is slow; everything else waits."""
        flags = socket.MSG_DONTWAIT if row["kind"] == "progress" else 0
        try:
            self.connection.send(to_json(row).encode(), flags)
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)

    def note(self, text: str) -> None:
        """Show the user one line."""
        self.send({"kind": "note", "text": text})

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next order and its descriptors; ends this process if the supervisor is gone."""
        packet, fds = receive_fds(self.connection, 1 << 16, 1)
        if not packet:
            os._exit(1)
        return dict(json.loads(packet)), fds


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

    def interrupt(self, now: float) -> None:
        """Ctrl-C or SIGTERM has come: every loop is to end."""

    def silent(self, now: float) -> list[tuple[int, str]]:
        """Workers whose loops have not ended in time after that, and why to go on without them."""
        return []


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
    brings_own_states = False

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
