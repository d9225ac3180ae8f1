"""The start of own loops over TCP: workers are welcomed at once, and the first one's model makes the server.

Only a worker knows the model. Until it has said hello, there is no server and no host; the others wait.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.config import RunConfig, max_workers_of
from paceline.core.membership import Member
from paceline.core.messages import OwnLoopInput, Push
from paceline.errors import DiskError, PacelineError, ProtocolError, RunFailed, UserError
from paceline.runs.folder import NOT_COME, RunFolder
from paceline.runtimes.scripts.served_loop import keep_in
from paceline.runtimes.scripts.serving.agreement import expected_facts
from paceline.runtimes.scripts.serving.requests import LoopRequests
from paceline.runtimes.scripts.serving.server import (
    LearnedRun,
    check_facts,
    finish_loops,
    host_of_loops,
    learn,
    loop_sizes,
    nothing_trained,
    saved_at_mistakes,
)
from paceline.runtimes.server.admission import CEILING_SECONDS, REMIND_SECONDS, Admission
from paceline.runtimes.server.file_service import FileService
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.remote_service import ForegroundChannel, RemoteService, SingleServer
from paceline.runtimes.server.runtime import TcpPeers
from paceline.system.terminal import seconds_text
from paceline.transports.listener import JoinRequest, Listener
from paceline.transports.protocol import Hello, InitialTensors, unreadable
from paceline.transports.tcp_server import TcpPeer

LOOK_SECONDS = 0.25


@dataclass
class _NoMembers:
    """Stands for a server that does not exist yet."""

    max_workers: int
    finished: bool = False
    members: Mapping[int, Member] = field(default_factory=dict)


class UnstartedRun:
    """A run whose first worker has not said hello yet, as the admission of workers sees it."""

    def __init__(self, config: RunConfig, folder: RunFolder, first_incarnation: int) -> None:
        self.config, self.folder, self.first_incarnation = config, folder, first_incarnation
        self.server = _NoMembers(max_workers_of(config))
        self.on_gpu: set[int] = set()


class Introductions:
    """Welcomes the workers of a run and collects their hellos until one of them has told the model.

    That is worker 0 of a new run, whose initial weights all begin with; of a resumed one any worker.
    """

    def __init__(
        self,
        run: UnstartedRun,
        listener: Listener,
        control: ForegroundChannel,
        welcome: Mapping[str, Any],
        wait_seconds: float | None,
    ) -> None:
        self.peers = TcpPeers()
        self.hellos: dict[int, Hello] = {}
        self.first: Hello | None = None
        """The hello of the worker that is asked for the model."""
        self.initial: InitialTensors | None = None
        """What that worker's model begins with: the run can begin."""
        self._learned: LearnedRun | None = None
        self._run, self._listener, self._control, self._wait_seconds = run, listener, control, wait_seconds
        self._welcome = welcome
        self._admission = Admission(run, self.peers, None, welcome, control.note, listener.complain)
        self._observers = FileService(run.folder)
        self._began = time.monotonic()
        self._remind_after = REMIND_SECONDS

    def serve(self, facts: dict[str, Any], resume: bool) -> dict[str, Any]:
        """Serve the run from its first worker to its end; return the result."""
        self.gather()
        with self._telling(UserError):  # of the script: to resume the run would not help
            host, service = self.begin(facts, resume)
        try:
            with torch.inference_mode(), saved_at_mistakes(host), self._telling(UserError):
                service.run()
        except UserError:
            host.close()
            raise
        result = finish_loops(host)
        service.observers.end()
        return result

    def gather(self) -> None:
        """Serve until the model is known. Raise RunFailed if the run is stopped before, and tell the workers why."""
        with self._telling(PacelineError):
            self._gather()

    @contextlib.contextmanager
    def _telling(self, kind: type[PacelineError]) -> Iterator[None]:
        """Tell all workers of such an error: they need not wait for a server that comes back.

        After an error of the disk it may come back.
        """
        try:
            yield
        except DiskError:
            raise
        except kind as error:
            for peer in self.peers.by_worker.values():
                if peer.fileno() >= 0:
                    peer.dismiss(str(error))
            raise

    def _gather(self) -> None:
        loop = self.peers.loop
        loop.register(self._control.connection, self._on_stop)
        loop.register(self._listener, lambda: self._admit(self._listener.serve()))
        while self.initial is None:
            loop.poll(LOOK_SECONDS)
            self._listener.expire(time.monotonic())
            for text in self._listener.complaints():
                self._control.note(text)
            self._drop_silent(time.monotonic())
            self._remind(time.monotonic() - self._began)
        loop.unregister(self._control.connection)
        loop.unregister(self._listener)
        for peer in self.peers.by_worker.values():
            loop.unregister(peer)

    def begin(self, facts: dict[str, Any], resume: bool) -> tuple[Host, RemoteService]:
        """Start the host of the run, after `gather`, and the service that takes over all workers."""
        first, initial, learned, run = self.first, self.initial, self._learned, self._run
        assert first is not None and initial is not None and learned is not None
        keep_in(run.folder, initial.frozen, initial.optimizers)
        report, expected = self._control.send, expected_facts(first)
        host = host_of_loops(learned, first, run.folder, report, self.peers, facts, resume)
        gate = SingleServer(host, loop_sizes(host, learned.model, expected), self._welcome)
        note = self._control.note
        loops = LoopRequests(host, learned.model, self.peers.by_worker, lambda: service.awaits_worker, note)
        service = RemoteService(
            host, self.peers, self._control, expected, self._listener, gate, self._wait_seconds, loops, self._observers
        )
        for worker, peer in list(self.peers.by_worker.items()):
            service.take_over(peer, self.hellos.get(worker))
        return host, service

    def _on_stop(self) -> None:
        reason = self._control.receive()[0]["reason"]
        raise nothing_trained(reason, "a script had called session.prepare(...)")

    def _remind(self, seconds: float) -> None:
        if self._wait_seconds is not None and seconds > self._wait_seconds:
            raise RunFailed(f"{NOT_COME}: no script has called session.prepare(...) within {self._wait_seconds:g} s")
        if seconds > self._remind_after:
            self._remind_after *= 2.0
            here = f"{len(self.peers.by_worker)} of {self._run.server.max_workers} workers are here"
            self._control.note(
                f"{here} after {seconds_text(round(seconds))}, and worker 0 has not called session.prepare(...) yet"
            )

    def _admit(self, applicants: list[JoinRequest]) -> None:
        for applicant in applicants:
            known, number = self._admission.known(applicant.fields), self._admission.number_for(applicant.fields)
            if applicant.fields.get("observer"):
                self._observers.admit(applicant)
            elif applicant.fields.get("shard"):
                self._admission.turn_away(applicant, SingleServer.full)
            elif known is not None:
                self._forget(known, keeps_place=True)
                applicant.welcome_back(known, {})
                self._listen(known)
            elif isinstance(number, str):
                self._admission.turn_away(applicant, number)
            else:
                if number in self.peers.by_worker:
                    self._forget(self.peers.by_worker[number])
                peer = self._admission.admit(applicant, number)
                self.peers.add(peer)
                self._listen(peer)

    def _listen(self, peer: TcpPeer) -> None:
        self.peers.loop.register(peer, functools.partial(self._on_message, peer))
        self.peers.loop.watch_writes(peer)

    def _on_message(self, peer: TcpPeer) -> None:
        if peer.wants_write:
            peer.flush()
        try:
            message = peer.receive()
            if isinstance(message, Hello):
                check_facts(message)
                self.hellos[peer.worker] = message
                self._ask_first()
            elif isinstance(message, InitialTensors):
                self._learn(message)
            elif isinstance(message, Push | OwnLoopInput):
                raise ProtocolError(f"worker {peer.worker} sent more than its hello before the run began")
        except ProtocolError as error:
            peer.dismiss(str(error))
            self._control.note(str(error))
            self._forget(peer)
            return
        if message is None:
            if peer.left:
                self._control.note(f"worker {peer.worker} has left: its script has ended, or has failed")
            self._forget(peer, keeps_place=not peer.left and peer.slot is not None)
            return
        self.peers.loop.watch_writes(peer)

    def _ask_first(self) -> None:
        """Ask a worker that has said hello for what its model begins with, unless one is asked already."""
        for worker, hello in self.hellos.items():
            if self.first is None and (worker == 0 or self._run.first_incarnation):
                self.first = hello
                self.peers.by_worker[worker].ask_initial()

    def _learn(self, initial: InitialTensors) -> None:
        """Learn the model. ProtocolError if what its worker told of it cannot be meant."""
        assert self.first is not None
        self.first.slot.weights.copy_(initial.weights)
        try:
            self._learned = learn(self._run.config, [self.first], self._run.folder, initial)
        except PacelineError:
            raise
        except Exception as error:  # nothing has begun: only this worker is at fault
            raise unreadable(initial.worker, error) from error
        self.initial = initial

    def _drop_silent(self, now: float) -> None:
        """Free the place of a worker whose machine is gone, or that does not reconnect."""
        for peer in list(self.peers.by_worker.values()):
            if now - peer.last_heard > CEILING_SECONDS:
                self._control.note(
                    f"worker {peer.worker} was silent for {seconds_text(round(now - peer.last_heard))}: it is lost"
                )
                self._forget(peer)

    def _forget(self, peer: TcpPeer, keeps_place: bool = False) -> None:
        """The connection of a worker broke; one that has said hello may reconnect."""
        self.peers.loop.unregister(peer)
        peer.close()
        if not keeps_place:
            self.peers.remove(peer)
            self._admission.leave(peer.worker)
            hello = self.hellos.pop(peer.worker, None)
            if hello is not None and hello is self.first:
                self.first = None
                self._ask_first()
