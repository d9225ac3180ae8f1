"""The other servers of a run as the first sees them: it sends them every input and gathers their parts."""

from __future__ import annotations

import functools
import select
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, TypeVar

import torch

from paceline.assembly.core import make_rule
from paceline.assembly.cpu_sharing import server_threads
from paceline.config import to_dict
from paceline.core.compression import PredecodedPushes
from paceline.core.messages import Input
from paceline.core.server import server_facts
from paceline.errors import ProtocolError, RunFailed, ServerLost, UserError
from paceline.runtimes.server.host import Host
from paceline.runtimes.sharded.channel import FILLED, Message, ShardChannel
from paceline.runtimes.sharded.orders import sent_to, tensors_of, to_words
from paceline.runtimes.sharded.sharded_rule import ShardedRule
from paceline.runtimes.sharded.spans import coding_of, grain_of, part_of, spans_of
from paceline.system.environment import package_version
from paceline.transports.connection import ANYWHERE, format_address, is_loopback, parse_address
from paceline.transports.frames import FLAG, Schema, checked, integer, listed, optional, text
from paceline.transports.listener import JoinRequest, Listener

ENDING_SECONDS = 8.0
LOOK_SECONDS = 0.25
SILENT_SECONDS = 20.0
"""Servers send a heartbeat every second; one that is silent for so long has stopped, or its machine has failed."""
VOTE: Schema = {
    "part": optional(listed(integer(-1), 3, 3)),
    "finite": optional(FLAG, False),
    "nbytes": optional(integer(0, 1 << 48), 0),
    "wrong": optional(text(300)),
}
"""What another server says of its part of a push: a `PushId` and its vote, or what is wrong with it; or a heartbeat."""
T = TypeVar("T")


@dataclass(frozen=True)
class ShardPeer:
    """Another server: the link to it, its range of the weights, and where workers find it."""

    number: int
    link: ShardChannel
    span: slice
    address: str
    fingerprint: str | None
    pid: int

    @property
    def row(self) -> dict[str, Any]:
        """What workers must know about it."""
        span = [self.span.start, self.span.stop]
        return {"address": self.address, "span": span, "fingerprint": self.fingerprint, "pid": self.pid}


def wait_for_shards(
    listener: Listener, count: int, children: Sequence[subprocess.Popen[bytes]], seconds: float
) -> tuple[list[JoinRequest], list[JoinRequest]]:
    """Wait until `count` servers have connected. Returns them, and the requests of workers that came meanwhile."""
    shards, others, deadline = list[JoinRequest](), list[JoinRequest](), time.monotonic() + seconds
    while len(shards) < count:
        select.select([listener], [], [], LOOK_SECONDS)
        for applicant in listener.serve():
            if not applicant.fields.get("shard"):
                others.append(applicant)
            elif applicant.fields.get("version") != package_version("paceline"):
                applicant.refuse(f"this run is served by paceline {package_version('paceline')}: install the same")
            elif not _is_address(applicant.fields["address"]):
                applicant.refuse("it does not say at which HOST:PORT it listens")
            else:
                applicant.take_on({"shard": True})
                shards.append(applicant)
        shards = [applicant for applicant in shards if not applicant.connection.is_closed()]
        ended = [child.returncode for child in children if child.poll() is not None]
        if ended or time.monotonic() > deadline:
            why = f"one ended with code {ended[0]}" if ended else f"{len(shards)} came in {seconds:g} s"
            raise RunFailed(f"--servers {count + 1} needs {count} more: {why}; see the lines above")
    return shards, others


def _is_address(text: str) -> bool:
    try:
        return bool(parse_address(text))
    except UserError:
        return False


def _reachable(applicant: JoinRequest) -> str:
    """Where workers find a server: if it listens on all interfaces, the address it connects from, unless loopback."""
    address: str = applicant.fields["address"]
    host, port = parse_address(address)
    peer, _ = parse_address(applicant.peer)
    return format_address((peer, port)) if host in ANYWHERE and not is_loopback(peer) else address


class ShardPeers:
    """All servers but the first."""

    def __init__(self, host: Host, applicants: Sequence[JoinRequest]) -> None:
        assert host.task is not None and host.work is not None
        config, server, layout = host.config, host.server, host.task.layout
        self._host = host
        self.own_span, *spans = spans_of(layout.size, len(applicants) + 1, grain_of(config))
        self.coding = coding_of(config, layout, self.own_span)
        push, pull = self.coding
        self.opened = PredecodedPushes(push, server.weights[self.own_span]) if push is not None else None
        part = make_rule(config, part_of(layout, self.own_span), skew=host.work.skew)
        self._ranged = ShardedRule(server.rule, part, self.own_span, server.weights, server.rule_state)
        self._run = {"config": to_dict(config), "layout": layout.to_rows(), "skew": host.work.skew}
        self._run |= {"budget": asdict(server.budget), "threads": server_threads(config, layout)}
        numbered = enumerate(zip(applicants, spans, strict=True), start=1)
        self.all = [self._begin(number, applicant, span) for number, (applicant, span) in numbered]
        server.updater.restrict_to(self._ranged, self.own_span, self.opened, pull.codec if pull is not None else None)
        self.heard: deque[tuple[ShardPeer, Message]] = deque()  # messages that came during `gather`
        self._changed = False

    def _begin(self, number: int, applicant: JoinRequest, span: slice) -> ShardPeer:
        """Send a server the description of the run and its part of the weights and rule state."""
        server, fields, link = self._host.server, applicant.fields, ShardChannel(applicant.connection)
        found = _reachable(applicant), fields.get("fingerprint"), fields.get("pid", 0)
        shard = ShardPeer(number, link, span, *found)
        begin = {**self._run, "span": [span.start, span.stop], "facts": server_facts(server)}
        state = self._ranged.of_span(server.rule_state, span)
        tensors = tensors_of(server.weights[span], state, [])
        self._try(shard, lambda: shard.link.send({"begin": begin}, [tensor.contiguous() for tensor in tensors]))
        return shard

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What workers must know about all servers, the first included."""
        return [{"span": [self.own_span.start, self.own_span.stop]}, *(shard.row for shard in self.all)]

    def _try(self, shard: ShardPeer, do: Callable[[], T]) -> T:
        try:
            return do()
        except (ConnectionError, ProtocolError) as error:
            raise self._lost(shard, f"is gone ({error})") from None

    def _lost(self, shard: ShardPeer, how: str) -> ServerLost:
        what = f"server {shard.number} of floats {shard.span.start} to {shard.span.stop} at {shard.address} {how}"
        what += f" at update {self._host.server.version}"
        return ServerLost(what, f"'paceline server --resume {self._host.folder.path}' continues from there")

    def require_signs(self) -> None:
        """Raise ServerLost if a server has been silent for too long, though all that came has been read."""
        now = time.monotonic()
        for shard in self.all:
            if now > shard.link.last_heard + SILENT_SECONDS:
                raise self._lost(shard, f"has said nothing for {SILENT_SECONDS:g} s")

    def excuse(self) -> None:
        """Count silence from now on, because this server has not listened for a while."""
        for shard in self.all:
            shard.link.last_heard = time.monotonic()

    def order(self, message: Input, finite: bool = True) -> None:
        """Send an input to all servers, before it is handled here."""
        self._changed = True
        self._send({"input": to_words(message), "finite": finite})

    def end(self) -> None:
        """Tell all servers that the run is over."""
        self._send({"end": True})

    def _send(self, message: Message) -> None:
        for shard in self.all:
            self._try(shard, functools.partial(shard.link.send, message))

    def receive(self, shard: ShardPeer) -> Message | None:
        """A server's next message; None if no whole one has come."""
        self._try(shard, shard.link.flush)
        message = self._try(shard, shard.link.receive)
        return message if message is None or message is FILLED else self._try(shard, lambda: checked(message, VOTE))

    @torch.inference_mode()
    def gather(self) -> None:
        """Fetch all parts of the weights, the rule state and the workers' weights, as of the last input."""
        if not self._changed:
            return
        self._changed = False
        places = [self._places(shard) for shard in self.all]
        received = [[torch.empty(place.shape, dtype=place.dtype) for place in part] for part in places]
        for shard, tensors in zip(self.all, received, strict=True):
            shard.link.expect(tensors)
        self._send({"gather": self._host.server.version})
        self.excuse()
        awaited = {shard.number: shard for shard in self.all}
        while awaited:
            writing = [shard.link for shard in self.all if shard.link.wants_write]
            select.select([shard.link for shard in awaited.values()], writing, [], LOOK_SECONDS)
            for shard in list(awaited.values()):
                while shard.number in awaited and (message := self.receive(shard)) is not None:
                    if message is FILLED:
                        del awaited[shard.number]
                    elif message.get("part") is not None:
                        self.heard.append((shard, message))
            self.require_signs()
        for place, tensor in zip(chain(*places), chain(*received), strict=True):
            place.copy_(tensor)

    def _places(self, shard: ShardPeer) -> list[torch.Tensor]:
        """The slices of this process's tensors that a server's part is copied into."""
        server, memories = self._host.server, self._host.memories
        state = self._ranged.of_span(server.rule_state, shard.span)
        sent = [weights[shard.span] for weights in sent_to(server, memories)]
        return tensors_of(server.weights[shard.span], state, sent)

    def close(self) -> None:
        """Close all links."""
        for shard in self.all:
            shard.link.close()


def terminate(children: Sequence[subprocess.Popen[bytes]], seconds: float = ENDING_SECONDS) -> None:
    """Wait for child processes to end; kill those that do not."""
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
