"""Serve one shard of the weights: take this part of every push, and apply inputs in the first server's order.

It runs the same pure Server on the same inputs in the same order, so it replies at the same version as the first.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.assembly.core import make_aggregate, make_policy, make_rule, make_training
from paceline.assembly.run import key_of, make_roster
from paceline.config import from_dict
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.compression import Codecs, PredecodedPushes
from paceline.core.messages import Disposition, Input, Join, Leave, Push
from paceline.core.schedules import Budget
from paceline.core.server import Exchange, Server, restore_server
from paceline.errors import PacelineError, ProtocolError
from paceline.interfaces import Layout
from paceline.runtimes.sharded.channel import FILLED, Message, ShardChannel
from paceline.runtimes.sharded.orders import PushId, from_words, is_finite, poison, sent_to, tensors_of
from paceline.runtimes.sharded.spans import SpanCodecs, coding_of, part_of
from paceline.system.event_loop import EventLoop
from paceline.system.terminal import printable
from paceline.transports.frames import ANYTHING, FLAG, OBJECT, Schema, checked, integer, listed, optional
from paceline.transports.listener import JoinRequest, Listener
from paceline.transports.protocol import Hello, Keepalive
from paceline.transports.tcp_server import TcpPeer

GRACE_SECONDS = 5.0
LOOK_SECONDS = 0.5
MAX_INCARNATIONS = 2  # of one worker at once: a new one may come before the first server says that the old one left
BEAT_SECONDS = 1.0


ORDER: Schema = {
    "input": optional(listed(ANYTHING, 1, 16)),
    "finite": optional(FLAG, True),
    "begin": optional(OBJECT),
    "gather": optional(integer(0, 1 << 63)),
    "end": optional(FLAG, False),
}
"""What the first server orders: take an input, begin with this description of the run, send your part, end."""


@contextlib.contextmanager
def _describing() -> Iterator[None]:
    """Blame the first server if its description of the run cannot be used."""
    try:
        yield
    except PacelineError as error:
        raise ProtocolError(f"a run that cannot be served ({error})") from None
    except Exception as error:
        raise ProtocolError(f"a run that cannot be served ({type(error).__name__}: {printable(str(error))})") from error


def make_part(order: Message) -> tuple[Server, SpanCodecs, PredecodedPushes | None]:
    """Build the server of a range as the first server describes it, without its tensors; its codecs and decoder."""
    config, span, whole = from_dict(order["config"]), slice(*order["span"]), Layout.from_rows(order["layout"])
    layout, coding = part_of(whole, span), coding_of(config, whole, span)
    torch.set_num_threads(int(order["threads"]))
    weights = torch.zeros(layout.size)
    opened = PredecodedPushes(coding.push, weights) if coding.push is not None else None
    codecs = Codecs(pull=coding.pull.codec if coding.pull is not None else None, key=key_of(config))
    rule, training = make_rule(config, layout, skew=order["skew"]), make_training(config, Budget(**order["budget"]))
    exchange = Exchange(codecs, aggregate=make_aggregate(config), decoder=opened)
    return Server(weights, rule, make_policy(config), training, make_roster(config), exchange), coding, opened


class ShardService:
    """Serves workers and obeys the first server."""

    def __init__(self, link: ShardChannel, listener: Listener, say: Callable[[str], None]) -> None:
        self._link, self._listener, self._say = link, listener, say
        self._server: Server | None = None
        self._coding = SpanCodecs()
        self._opened: PredecodedPushes | None = None
        self._peers: dict[tuple[int, int], TcpPeer] = {}
        """By worker and incarnation: a new one may connect before this server learns that the old one left."""
        self._parts: dict[tuple[int, int], Push] = {}
        self._memories: dict[int, WorkerBuffers] = {}
        self._facts: dict[str, Any] = {}
        self._ended: float | None = None
        self._next_beat = 0.0
        self._loop = EventLoop()
        self._loop.register(link, self._hear_first)
        self._loop.register(listener, self._admit)

    def run(self) -> bool:
        """Serve until the first server ends the run; False if it is gone before that."""
        try:
            while not self._is_over():
                self._loop.poll(LOOK_SECONDS)
                now = time.monotonic()
                if now >= self._next_beat and self._ended is None and not self._link.wants_write:
                    self._link.send({"beat": True})  # a heartbeat; bytes that wait to be sent serve as one
                    self._next_beat = now + BEAT_SECONDS
                self._loop.watch_writes(self._link)
                self._listener.expire(time.monotonic())
                for text in self._listener.complaints():
                    self._say(text)
        except (ConnectionError, ProtocolError) as error:
            self._say(f"the first server is gone: {error}")
            return False
        finally:
            self._loop.close()
            self._link.close()
            for peer in self._peers.values():
                peer.close()
        return True

    def _is_over(self) -> bool:
        """Whether every worker has its last reply, or has had the time for it."""
        return self._ended is not None and (not self._peers or time.monotonic() > self._ended + GRACE_SECONDS)

    # the first server

    def _hear_first(self) -> None:
        self._link.flush()
        while self._ended is None and (message := self._link.receive()) is not None:
            self._obey(message)

    def _obey(self, message: Message) -> None:
        if message is FILLED:
            with _describing():
                restore_server(self._known, self._facts, self._known.weights, self._known.rule_state)
            return
        order = checked(message, ORDER)
        if order["input"] is not None:
            self._handle(order["input"], order["finite"])
        elif order["begin"] is not None:
            with _describing():
                self._server, self._coding, self._opened = make_part(order["begin"])
                self._facts = order["begin"]["facts"]
            self._link.expect(tensors_of(self._known.weights, self._known.rule_state, []))
        elif order["gather"] is not None:
            server, sent = self._known, sent_to(self._known, self._memories)
            found = [tensor.clone() for tensor in tensors_of(server.weights, server.rule_state, sent)]
            self._link.send({"gathered": order["gather"]}, found)
        elif order["end"]:
            self._ended = time.monotonic()
            self._loop.unregister(self._link)
            self._link.close()

    @property
    def _known(self) -> Server:
        if self._server is None:
            raise ProtocolError("an order came before the description of the run")
        return self._server

    @property
    def _sizes(self) -> BufferSizes:
        """Of each worker's memory here."""
        return BufferSizes(self._known.weights.numel(), 0, *self._coding.capacities)

    def _handle(self, words: list[Any], finite: bool) -> None:
        message, server = self._to_input(words, finite), self._known
        if isinstance(message, Join):
            peer = self._peers.get((message.worker, message.incarnation))
            if peer is None or peer.slot is None:
                raise ProtocolError(f"worker {message.worker} joins, but has sent this server no hello")
            self._memories[message.worker] = peer.slot
        outcome = server.handle(message)
        for reply in outcome.replies:
            if outcome.disposition != Disposition.REPEATED:
                server.send_weights(reply, self._memories[reply.worker])
                answered = self._peers.get((reply.worker, reply.incarnation))
                if answered is not None:
                    answered.answer(reply)
                    self._loop.watch_writes(answered)
        if isinstance(message, Leave):
            for key in [key for key in self._peers if key[0] == message.worker and key[1] <= message.incarnation]:
                self._forget(self._peers[key])

    def _to_input(self, words: list[Any], finite: bool) -> Input:
        """Turn an order into an input: a push gets the part that its worker sent here."""
        message = from_words(words)
        if not isinstance(message, Push):
            return message
        part = self._parts.get((message.worker, message.incarnation))
        if part is None or part.seq != message.seq:
            return message  # of an unknown worker: the server rejects it
        if not finite:
            poison(part.update)
        return message._replace(update=part.update)

    # workers

    def _admit(self) -> None:
        for applicant in self._listener.serve():
            self._admit_one(applicant)

    def _admit_one(self, applicant: JoinRequest) -> None:
        worker, incarnation = applicant.fields["worker"], applicant.fields["incarnation"]
        if self._server is None or worker is None or incarnation is None:
            applicant.refuse("a part of a run is served here: connect workers and observers to its first server")
            return
        known = self._peers.get((worker, incarnation))
        if applicant.fields.get("again"):
            if known is None or not known.is_of(applicant.fields):
                applicant.refuse("this worker was taken for lost")
                return
            self._hang_up(known)
            applicant.welcome_back(known, {})
        else:
            if known is not None and known.slot is not None:  # after its hello the worker itself says "again"
                applicant.refuse("this worker is here already")
                return
            if known is not None:
                self._forget(known)
            here = sum(1 for number, _ in self._peers if number == worker)
            if worker >= self._server.max_workers or here >= MAX_INCARNATIONS:
                applicant.refuse(f"worker {worker} of 0 to {self._server.max_workers - 1} is here already, or none")
                return
            known = applicant.welcome({"worker": worker, "incarnation": incarnation}, self._sizes)
            self._peers[worker, incarnation] = known
        self._loop.register(known, functools.partial(self._serve, known))
        self._loop.watch_writes(known)

    def _serve(self, peer: TcpPeer) -> None:
        if peer.wants_write:
            peer.flush()
        try:
            message = peer.receive()
            if isinstance(message, Hello) and message.slot.sizes != self._sizes:
                raise ProtocolError(f"worker {peer.worker} sent buffers that do not fit this part of the weights")
        except ProtocolError as error:
            self._blame(peer, str(error))
            return
        if message is None:
            if peer.left or peer.slot is None or self._known.finished:
                self._forget(peer)
            else:
                self._hang_up(peer)  # it reconnects, or the first server gives it up
            return
        if isinstance(message, Hello):
            self._vote(PushId(peer.worker, peer.incarnation, -1), finite=True)
        elif isinstance(message, Push):
            self._take(peer, message)
        else:
            assert isinstance(message, Keepalive) or message.worker == peer.worker
        self._loop.watch_writes(peer)

    def _take(self, peer: TcpPeer, push: Push) -> None:
        """Keep a part of a push until the order for it comes, and vote on it."""
        member = self._known.members.get(push.worker)
        if member is not None and member.incarnation == push.incarnation and push.seq <= member.seq:
            if not member.waiting and push.seq == member.seq:  # repeated, because its reply was lost
                peer.answer(self._known.last_answer(push.worker))
            return
        part, known = PushId(push.worker, push.incarnation, push.seq), self._parts.get((push.worker, push.incarnation))
        nbytes = push.update.nbytes
        if known is None or known.seq != push.seq:  # else it came before the connection broke
            try:
                known = push if self._opened is None else push._replace(update=self._opened.open(push.update))
            except ProtocolError as error:
                self._blame(peer, f"worker {push.worker}: {error}")
                return
            self._parts[push.worker, push.incarnation] = known
        self._vote(part, is_finite(known.update), nbytes)

    def _blame(self, peer: TcpPeer, why: str) -> None:
        """Hang up on a worker because of what it sent, and tell the first server, which expels it."""
        self._say(why)
        self._hang_up(peer)
        member = self._known.members.get(peer.worker)
        is_member = member is not None and member.incarnation == peer.incarnation
        part = PushId(peer.worker, peer.incarnation, member.seq + 1 if member is not None and is_member else -1)
        if self._ended is None:
            self._link.send({"part": part, "wrong": why})

    def _vote(self, part: PushId, finite: bool, nbytes: int = 0) -> None:
        if self._ended is None:
            self._link.send({"part": part, "finite": finite, "nbytes": nbytes})

    def _hang_up(self, peer: TcpPeer) -> None:
        self._loop.unregister(peer)
        peer.close()

    def _forget(self, peer: TcpPeer) -> None:
        self._hang_up(peer)
        key = peer.worker, peer.incarnation
        if self._peers.get(key) is peer:
            del self._peers[key]
            self._parts.pop(key, None)
