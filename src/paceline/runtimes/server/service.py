"""Serve workers on this machine: one thread owns the weights and handles messages in order of arrival."""

from __future__ import annotations

import functools
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from paceline.assembly.task import why_builds_differ
from paceline.core.buffers import BufferSizes
from paceline.core.membership import Member
from paceline.core.messages import EstimatedStatistics, Leave, Push, ReadOptimizer, ReadWeights
from paceline.core.own_loop.torch_optimizer import OptimizerFailed
from paceline.core.step_balancing import StepBalancer
from paceline.errors import ProtocolError, UserError, mismatched_keys
from paceline.runs.folder import ALL_GONE
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import ABSENT_SECONDS, LoopService, Peers, SupervisorChannel, absent
from paceline.system.event_loop import EventLoop
from paceline.system.signals import INTERRUPTED, TERMINATED
from paceline.transports.frames import UINT32
from paceline.transports.protocol import Hello, Peer, ReportedFigures
from paceline.transports.shared_memory import SharedMemoryPeer

CHECK_SECONDS, BUSY_SECONDS = 0.5, 1.0
"""How often time alone is checked; if it takes so much longer, the server itself was busy, and no worker stalled."""
GRACE_SECONDS = 5.0  # after the end of training: how long to wait until every worker has its last reply

LocalPeers: TypeAlias = Peers[SharedMemoryPeer]


class Dispatcher:
    """Turns what workers send into inputs of the host, and tells the supervisor when the training clock runs."""

    def __init__(self, host: Host, control: SupervisorChannel, expected: dict[str, Any]) -> None:
        """`expected` are the facts about model and data in which every worker must agree with the run."""
        self._host, self._control, self._expected = host, control, expected
        self.note = control.note
        self._loop_samples: dict[int, int] = {}  # by worker, the most samples of a step, as its own loop declared
        self._pacing = StepBalancer() if host.config.local_steps == "speed" else None
        self._clock_runs = False
        self._checked, self._excused = host.clock.source(), 0.0
        host.accounting.stall_detector.drop_after = host.config.stall

    def check(self, drop: Callable[[int, str], None]) -> None:
        """Carry out requests, and name workers that compute without progress.

        `drop` a worker if `paceline drain --now` or `--stall` asks for it, and give the reason.
        """
        host, stalls = self._host, self._host.accounting.stall_detector
        now = host.clock.source()
        gap = now - self._checked - (stalls.extended - self._excused)
        if gap > CHECK_SECONDS + BUSY_SECONDS:
            stalls.extend(gap)
        self._checked, self._excused = now, stalls.extended
        if host.server.finished:
            return
        host.requests.look()
        while host.requests.to_drop:
            worker = host.requests.to_drop.pop()
            drop(worker, f"worker {worker} is dropped, as 'paceline drain --now' asked")
        new, again = host.accounting.look_for_stalls(now)
        to_drop = stalls.to_drop(now)
        for worker in new:
            stall = host.accounting.stall(worker, host.server, now)
            host.events.write("stalled", host.clock.now(), **stall._asdict())
            if worker not in to_drop:
                how = f"'paceline drain {host.folder.path} {worker} --now' or --stall SECONDS drops it"
                self.note(f"{stall}: {how}")
        for worker in again:
            if host.server.members[worker].live:
                self.note(f"worker {worker} makes steps again")
        for worker in to_drop:
            stall = host.accounting.stall(worker, host.server, now)
            drop(worker, f"{stall}: it is dropped (--stall {host.config.stall:g})")

    def push(self, peer: Peer, push: Push) -> None:
        """Hand a push to the host. ProtocolError if it cannot be decoded or lies; then nothing has changed."""
        host, worker, timing = self._host, push.worker, peer.timing
        if push.optimizer >= len(host.server.by_optimizer):
            raise ProtocolError(f"worker {worker} pushed for optimizer {push.optimizer}, which this run does not have")
        member = host.server.by_optimizer[push.optimizer].members.get(worker)
        if member is None:
            raise ProtocolError(f"worker {worker} pushed before it joined")
        if member.live and push.incarnation == member.incarnation and push.seq > member.seq:
            self._require_asked(push, member)  # else it is repeated, or of somebody who has left
        steps = max(1, member.steps)
        host.timings.add(worker, timing, steps)
        if self._pacing is not None:
            change = self._pacing.look(host.server, worker, timing.wall / steps)
            if change is not None:
                host.handle(change)
        try:
            host.handle(push)
        except ProtocolError as error:
            raise ProtocolError(f"worker {worker}: {error}") from None
        except OptimizerFailed as error:
            raise UserError(f"the optimizer of the script fails in the server: {error}") from error

    def _require_asked(self, push: Push, member: Member) -> None:
        """Raise ProtocolError unless a reply asked for this push, and its samples are those of the assigned batch."""
        if member.waiting or push.reply != member.serial:
            raise ProtocolError(f"worker {push.worker} pushed without a reply that asks for it")
        if self._host.work is not None:
            least = most = self._host.work.samples_of(self._host.server.last_answer(push.worker), self._host.config)
        else:
            least, most = int(push.weight is None), self._loop_samples[push.worker]
        if not least <= push.samples <= most:
            asked = f"{most}" if least == most else f"at most {most}"
            raise ProtocolError(f"worker {push.worker} counted {push.samples} samples in a batch of {asked}")

    def is_expelled(self, worker: int) -> bool:
        """Whether the server has turned a worker out; then its connection is closed."""
        member = self._host.server.members.get(worker)
        return member is not None and member.expelled

    def join(self, hello: Hello, sizes: BufferSizes) -> str | None:
        """Let a worker join whose memory has these sizes. Returns why not if its model, data or codecs differ."""
        if self.is_expelled(hello.join.worker):
            return "this run has expelled it"
        join, work, found = hello.join, self._host.work, hello.slot.sizes
        wrong = mismatched_keys(self._expected, hello.facts)
        wrong += ["size"] * (found.weights != sizes.weights) + ["state"] * (found.state != sizes.state)
        wrong += ["codecs"] * (found[2:] != sizes[2:])
        wrong += ["own loop"] * (join.own_loop is not (work is None))
        if work is not None:
            wrong += ["quota"] * (join.quota != work.quotas[join.worker])
        elif type(most := hello.facts.get("max_samples")) is int and 1 <= most <= UINT32:
            self._loop_samples[join.worker] = most
        else:
            wrong.append("samples of a step")
        if wrong:
            return f"it differs from this run in {' and '.join(wrong)}"
        self._host.memories[join.worker] = hello.slot
        self._host.handle(join)
        self.tell_clock()
        return None

    def leave(self, worker: int, incarnation: int, returns: bool = False) -> None:
        """Let a worker leave the run; if it may return, the run does not end without it."""
        self._host.handle(Leave(worker, incarnation, returns=returns))
        self.tell_clock()

    def miss(self, worker: int) -> None:
        """Stop waiting for a worker that has not joined, or not joined again."""
        member = self._host.server.members.get(worker)
        self._host.handle(Leave(worker, member.incarnation + 1 if member is not None else 0))

    def tell_clock(self) -> None:
        """Tell the supervisor if the training clock has started or stopped: it injects faults by this clock."""
        runs = self._host.server.started and not self._host.server.finished
        if self._clock_runs != runs:
            self._clock_runs = runs
            self._control.send({"kind": "clock", "now": self._host.clock.now(), "runs": runs})


def serve_until(
    host: Host, loop: EventLoop, all_know: Callable[[float], bool], check: Callable[[], float] | None = None
) -> None:
    """Serve until training is over and `all_know` that, given the end of the grace period.

    `check` is called between messages when it is due; it returns the time (`perf_counter`) of its next call.
    """
    next_check = 0.0 if check is not None else float("inf")
    deadline: float | None = None
    while True:
        if host.unsent:
            host.commit()
        if host.server.finished:
            deadline = deadline or time.monotonic() + GRACE_SECONDS
            if all_know(deadline):
                return
        seconds = min(host.next_due, next_check) - time.perf_counter()
        loop.poll(seconds if deadline is None else min(seconds, 0.5))
        now = time.perf_counter()
        if now >= host.next_due:
            host.housekeep()
        if check is not None and now >= next_check:
            next_check = check()


class Service:
    """Serves workers over shared memory; the supervisor starts them and passes their connections on."""

    def __init__(
        self,
        host: Host,
        peers: LocalPeers,
        control: SupervisorChannel,
        expected: dict[str, Any],
        sizes: BufferSizes,
    ) -> None:
        """`peers` is the host's runtime, `sizes` are those of every worker's memory."""
        self._host, self._peers, self._control = host, peers, control
        self._sizes, self._expected = sizes, expected
        self._loops: LoopService | None = None
        self._dispatcher = Dispatcher(host, control, expected)
        self._returning: set[int] = set()  # workers that the supervisor will start again, or may
        self._gone: set[tuple[int, int]] = set()
        """Workers and incarnations whose processes have ended and that the supervisor will not start again."""
        self._began: float | None = time.monotonic()  # None once the workers that have not joined were named
        self._loop = EventLoop()
        self._loop.register(control.connection, self._on_order)
        self._wakeup, writer = socket.socketpair()
        writer.setblocking(False)
        self._loop.register(self._wakeup, self._on_sigterm)
        signal.set_wakeup_fd(writer.detach())
        signal.signal(signal.SIGTERM, lambda number, frame: None)

    def serve_loops(self, loops: LoopService) -> None:
        """Serve users' own loops: each asks for more than replies, and the service runs until every worker has left."""
        self._loops = loops

    @property
    def awaits_worker(self) -> bool:
        """Whether the supervisor will start a worker again, or may."""
        return bool(self._returning)

    def run(self) -> None:
        """Serve until training is over and every worker knows it."""
        self._control.send({"kind": "serving"})
        serve_until(self._host, self._loop, self._all_know, self._check)
        for peer in self._peers.by_worker.values():
            peer.close()

    def _all_know(self, deadline: float) -> bool:
        self._dispatcher.tell_clock()
        if self._loops is not None:
            self._loops.settle()
            return not self._peers.by_worker
        return self._peers.by_worker.keys() <= self._peers.released or time.monotonic() > deadline

    def _check(self) -> float:
        """Do what time alone makes due; returns the time of the next call."""
        self._dispatcher.check(self._drop)
        server, now = self._host.server, time.monotonic()
        if self._loops is not None:
            for worker, why in self._loops.silent(now):
                self._drop(worker, why)
        if self._began is not None and not server.started and now >= self._began + ABSENT_SECONDS:
            self._began = None
            self._control.note(absent(server.pending_workers, "joined"))
        return time.perf_counter() + CHECK_SECONDS

    def _drop(self, worker: int, why: str) -> None:
        """Go on without a worker that hangs, and let the supervisor kill its process."""
        peer = self._peers.by_worker.get(worker)
        if peer is not None:
            self._control.note(why)
            self._control.send({"kind": "drop", "worker": worker, "incarnation": peer.incarnation})
            self.remove(peer)

    def admit(self, peer: SharedMemoryPeer) -> None:
        """Listen to one more worker, or to the next incarnation of one."""
        earlier = self._peers.by_worker.get(peer.worker)
        if earlier is not None:  # its process has ended, but the end of its connection has not been read yet
            self.remove(earlier, returns=True)
        self._peers.add(peer)
        self._returning.discard(peer.worker)
        self._loop.register(peer, functools.partial(self._on_message, peer))

    def _on_order(self) -> None:
        order, fds = self._control.receive()
        if order["kind"] == "worker":
            self.admit(SharedMemoryPeer(socket.socket(fileno=fds[0]), order["worker"], order["incarnation"]))
        elif order["kind"] == "stop":
            self._host.stop(order["reason"])
            if self._loops is not None and order["reason"] in (INTERRUPTED, TERMINATED):
                self._loops.interrupt(time.monotonic())
        elif order["kind"] == "expected":
            self.expect(order["worker"])
        elif order["kind"] == "gone":
            self._on_gone(order["worker"], order["incarnation"])
        elif order["kind"] == "fault":
            self._on_fault(order["fault"], order["returns"])

    def expect(self, worker: int) -> None:
        """Wait for a worker that is to join, even if no other is left."""
        self._returning.add(worker)

    def _on_gone(self, worker: int, incarnation: int) -> None:
        """Stop waiting for a worker whose process has ended and is not started again (`--restart-workers`)."""
        self._gone.add((worker, incarnation))
        if worker in self._returning and worker not in self._peers.by_worker:
            self._returning.discard(worker)
            self._dispatcher.miss(worker)
            self.stop_if_all_gone()

    def _on_fault(self, fault: dict[str, Any], returns: bool) -> None:
        """Record an injected fault; if its worker `returns`, the run waits for it even without other workers."""
        if returns:
            self._returning.add(fault["worker"])
        elif fault["kind"] == "join":
            self._returning.discard(fault["worker"])  # it has joined already
        self._host.note_fault(fault)
        if fault["kind"] == "drain":
            self._host.drain(fault["worker"])

    def _on_sigterm(self) -> None:
        """End the run between two inputs."""
        self._wakeup.recv(64)
        self._host.stop(TERMINATED)

    def _on_message(self, peer: SharedMemoryPeer) -> None:
        """Handle a worker's next message. A malformed one, or a closed connection, ends the worker's membership."""
        try:
            message = peer.receive()
            if isinstance(message, Push):
                self._on_push(peer, message)
                return
            if isinstance(message, ReadWeights | ReadOptimizer | EstimatedStatistics) and self._loops is not None:
                self._loops.take(peer, message)
        except ProtocolError as error:
            self._control.note(str(error))
            self._host.note_expelled(peer.worker, str(error))
            self.remove(peer)
            return
        if message is None:
            self.remove(peer, returns=self._may_return(peer))
            return
        self._host.accounting.stall_detector.record_progress(peer.worker, self._host.clock.source())
        if isinstance(message, Hello):
            self.join(peer, message)
        elif isinstance(message, ReportedFigures):
            self._host.note_figures(message.worker, message.values)

    def _on_push(self, peer: SharedMemoryPeer, push: Push) -> None:
        """Take a push; disconnect its worker if the server expels it."""
        if self._loops is not None:
            self._loops.check_push(push)
        self._dispatcher.push(peer, push)
        if self._dispatcher.is_expelled(peer.worker):
            self.remove(peer)

    def join(self, peer: SharedMemoryPeer, hello: Hello) -> None:
        """Let a worker join, or refuse and disconnect it. UserError if a task is another one in each process."""
        if not self._host.server.version and (why := why_builds_differ(self._host.config, self._expected, hello.facts)):
            raise UserError(why)
        if (why_not := self._dispatcher.join(hello, self._sizes)) is not None:
            self._host.note_expelled(peer.worker, why_not)
            self._control.note(f"worker {peer.worker} was refused: {why_not}")
            self.remove(peer)

    def miss(self, worker: int) -> None:
        """Stop waiting for a worker that has not joined."""
        self._dispatcher.miss(worker)

    def _may_return(self, peer: SharedMemoryPeer) -> bool:
        """Whether the supervisor may start the worker of a closed connection again; it will say so, or that it is gone.

        The connection of a killed process can end before the supervisor's order arrives, and the other way round.
        """
        server, worker = self._host.server, peer.worker
        if not self._host.config.restart_workers or server.finished or (worker, peer.incarnation) in self._gone:
            return False
        member = server.members.get(worker)
        is_known = member is not None and member.incarnation == peer.incarnation
        return not is_known or (member is not None and member.live and not member.inactive)

    def remove(self, peer: SharedMemoryPeer, returns: bool = False) -> None:
        """Disconnect a worker; stop the run if it was the last and none will return."""
        if self._loops is not None:
            self._loops.forget(peer)
        self._loop.unregister(peer)
        peer.close()
        self._peers.remove(peer)
        if returns:
            self._returning.add(peer.worker)
        self._dispatcher.leave(peer.worker, peer.incarnation, returns)
        self.stop_if_all_gone()

    def stop_if_all_gone(self) -> None:
        """Stop the run if no worker is left and none will return."""
        if not self._peers.by_worker and not self._returning and not self._host.server.finished:
            self._host.stop(ALL_GONE)
        if self._loops is not None:  # others may have waited for the one that left
            self._loops.settle()
