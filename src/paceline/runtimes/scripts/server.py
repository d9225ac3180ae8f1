"""The server of `paceline run`: it takes the model from the scripts' first message, then serves like any other."""

from __future__ import annotations

import dataclasses
import selectors
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.assembly.core import make_aggregate, make_policy, make_rule, make_schedule
from paceline.assembly.cpu_sharing import server_threads
from paceline.assembly.preflight import announce_rule
from paceline.assembly.run import make_roster
from paceline.config import RunConfig, from_dict
from paceline.core.buffers import BufferSizes
from paceline.core.messages import EstimatedStatistics, Join, Leave, OwnLoopInput, ReadWeights
from paceline.core.schedules import Training
from paceline.core.server import Exchange, Server
from paceline.core.worker import LocalWorker
from paceline.errors import ProtocolError, RunFailed, UserError
from paceline.runs.folder import ALL_GONE, RunFolder
from paceline.runs.recovery import rebuild
from paceline.runs.result import shared_state
from paceline.runtimes.scripts.sampler import loop_budget
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.process import reporting
from paceline.runtimes.server.runtime import Peers
from paceline.runtimes.server.service import Service, SupervisorChannel
from paceline.tasks.script_model import ScriptModel, load_frozen
from paceline.transports.frames import ANYTHING, OBJECT, Schema, checked, integer, listed, nullable
from paceline.transports.protocol import Hello
from paceline.transports.shared_memory import SharedMemoryPeer

Introductions = list[tuple[SharedMemoryPeer, Hello]]
LOOP_FACTS: Schema = {
    **dict.fromkeys(("layout", "state_layout"), listed(ANYTHING, 0, 1 << 20)),
    **dict.fromkeys(("num_samples", "quota_samples"), integer(0, 1 << 48)),
    **dict.fromkeys(("order", "skew"), ANYTHING),
    **dict.fromkeys(("batch_size", "max_samples"), integer(1)),
    "settings": OBJECT,
    "sources": nullable(OBJECT),
}
"""What an own loop must say of its model and data in its hello."""
LEFT_EARLY = "every worker ended its loop early"


class FinalStatistics:
    """Collects the running statistics that workers estimate for the final weights; their mixture is saved."""

    def __init__(self, server: Server, model: ScriptModel) -> None:
        self._server, self._model = server, model
        self._estimates: dict[int, tuple[int, Tensor]] = {}

    def read(self, peer: SharedMemoryPeer) -> None:
        """Answer a worker that reads the weights which would be saved now."""
        assert peer.slot is not None
        evaluated = self._server.evaluated
        peer.slot.weights.copy_(evaluated)
        peer.confirm(averaged=evaluated is not self._server.weights)

    def add(self, peer: SharedMemoryPeer, samples: int) -> None:
        """Take the statistics in a worker's memory; they count with the weight `samples`, 0: not at all."""
        assert peer.slot is not None
        self._estimates[peer.worker] = samples, peer.slot.state.clone()

    def all_came(self, peers: Iterable[SharedMemoryPeer]) -> bool:
        """Whether every worker that is connected has sent its statistics, and there are some."""
        return bool(self._estimates) and all(peer.worker in self._estimates for peer in peers)

    def answer(self, peers: Iterable[SharedMemoryPeer]) -> None:
        """Save the mixture with the weights, and send it to the workers."""
        counted = [self._estimates[worker] for worker in sorted(self._estimates) if self._estimates[worker][0]]
        state = self._model.mixture([state for _, state in counted], [samples for samples, _ in counted])
        if state is None:  # no worker could estimate any
            state = shared_state(self._server, self._model, self._server.evaluated)
        else:
            self._model.set_statistics(self._server.evaluated, state)
        for peer in peers:
            if peer.worker in self._estimates and peer.slot is not None:
                if state is not None:
                    peer.slot.state.copy_(state)
                peer.confirm()
        self._estimates.clear()


class ScriptService(Service):
    """Serves own loops: answers their evaluations, and at the end brings all of them to the weights that are saved."""

    def __init__(
        self,
        host: Host,
        model: ScriptModel,
        peers: Peers[SharedMemoryPeer],
        control: SupervisorChannel,
        expected: dict[str, Any],
    ) -> None:
        sizes = BufferSizes(model.layout.size, model.state_layout.size if model.state_layout.parameters else 0)
        super().__init__(host, peers, control, expected, sizes, patient=True)
        self._statistics = FinalStatistics(host.server, model)
        self._ending: dict[int, SharedMemoryPeer] = {}  # workers that wait for the final weights
        self._stop_reason = ALL_GONE

    def take_setting(self, peer: SharedMemoryPeer, message: OwnLoopInput) -> None:
        """Take a message that only a user's own loop sends."""
        if isinstance(message, ReadWeights) and message.final:
            self._await_end(peer)
            return
        self._host.handle(message)
        if isinstance(message, ReadWeights):
            self._statistics.read(peer)
        elif isinstance(message, EstimatedStatistics):
            self._statistics.add(peer, message.samples)
            self._settle()

    def _await_end(self, peer: SharedMemoryPeer) -> None:
        """Let a worker wait for the final weights. If it has work left, it leaves training now."""
        server = self._host.server
        member = server.members[peer.worker]
        if member.live and not member.inactive and not server.finished:
            self._stop_reason = LEFT_EARLY
            if member.quota is not None:
                done = f"{member.accepted + member.dropped} of its {member.quota} steps"
                self._control.note(f"worker {peer.worker} ended its loop after {done}: the others go on without it")
            self._host.handle(Leave(peer.worker, peer.incarnation))
        self._ending[peer.worker] = peer
        self._settle()

    def remove(self, peer: SharedMemoryPeer) -> None:
        """Disconnect a worker; others may have waited for it."""
        if self._ending.get(peer.worker) is peer:
            del self._ending[peer.worker]
        super().remove(peer)
        self._settle()

    def _all_know(self, deadline: float) -> bool:
        self._settle()
        return super()._all_know(deadline)

    def _settle(self) -> None:
        """Answer the workers that wait for the end, if it has come."""
        connected, host = self._peers.by_worker, self._host
        if self._ending and connected.keys() <= self._ending.keys() and not self._returning:
            host.stop(self._stop_reason)  # nothing happens if training is over
        while host.server.finished and self._ending:
            worker = min(self._ending)
            host.handle(ReadWeights(worker, final=True))
            self._statistics.read(self._ending.pop(worker))
        if self._statistics.all_came(connected.values()):
            self._statistics.answer(connected.values())


def main(spec: dict[str, Any], fds: list[int]) -> int:
    """Wait for the first message of every script, then serve the run until the last script has left."""
    config = from_dict(spec["config"])

    def serve(control: SupervisorChannel) -> None:
        introductions = _gather(control, config.workers or 1)
        first = introductions[0][1]
        expected = _expected(first)
        fitting = [hello for _, hello in introductions if _expected(hello) == expected]
        folder = RunFolder(Path(spec["folder"]))
        resolved, model, server = learn(config, fitting, folder)
        if not spec.get("resume"):
            folder.update_config(resolved)
            announce_rule(resolved, first.facts["skew"], control.send)
        peers: Peers[SharedMemoryPeer] = Peers()
        rebuilt = None
        if spec.get("resume"):
            skipping = dataclasses.replace(resolved, recovery="checkpoint")
            rebuilt = rebuild(server, _no_worker, model, skipping, folder, control.send)
        now = rebuilt.now if rebuilt is not None else 0.0
        host = Host(server, model, None, resolved, folder, control.send, peers, now, spec["facts"])
        host.verify_with(None, "only your own loop computes its pushes")
        if rebuilt is not None:
            host.resume_from(rebuilt)
        service = ScriptService(host, model, peers, control, expected)
        for peer, _ in introductions:
            service.admit(peer)
        for peer, hello in introductions:
            service.join(peer, hello)
        for worker in set(range(config.workers or 1)) - {peer.worker for peer, _ in introductions}:
            service.miss(worker)
        with torch.inference_mode():
            service.run()
        host.finish()
        host.close()

    return reporting(serve, fds[0], spec["folder"])


def _no_worker(join: Join) -> LocalWorker:
    raise AssertionError("only a script computes its pushes")


def _expected(first: Hello) -> dict[str, Any]:
    """The facts in which all scripts must agree with the first."""
    return {name: first.facts[name] for name in ("layout", "state_layout", "num_samples", "order")}


def _gather(control: SupervisorChannel, num_workers: int) -> Introductions:
    """Wait for the hello of every script. Return them in worker order, without scripts that ended before."""
    selector = selectors.DefaultSelector()
    selector.register(control.connection, selectors.EVENT_READ)
    pending: set[int] = set(range(num_workers))
    found: Introductions = []
    while pending:
        for key, _ in selector.select():
            if key.data is None:
                order, fds = control.receive()
                if order["kind"] == "stop":
                    raise RunFailed("stopped before the scripts had called session.prepare(...)")
                peer = SharedMemoryPeer(socket.socket(fileno=fds[0]), order["worker"], order["incarnation"])
                selector.register(peer.connection, selectors.EVENT_READ, peer)
                continue
            selector.unregister(key.data.connection)
            pending.discard(key.data.worker)
            try:
                message = key.data.receive()
                if isinstance(message, Hello):
                    checked(message.facts, LOOP_FACTS)
            except ProtocolError as error:
                control.note(str(error))
                continue
            if isinstance(message, Hello):
                found.append((key.data, message))
    if not found:
        raise UserError(
            "the script ended without calling paceline.join() and session.prepare(...): nothing was trained"
        )
    return sorted(found, key=lambda pair: pair[0].worker)


def learn(config: RunConfig, hellos: list[Hello], folder: RunFolder) -> tuple[RunConfig, ScriptModel, Server]:
    """Make the server from the first worker's weights. The quotas of all workers give the budget."""
    first, facts = hellos[0], hellos[0].facts
    config = dataclasses.replace(config, batch_size=int(facts["batch_size"]), **facts["settings"])
    model = ScriptModel(facts["layout"], facts["state_layout"], facts["sources"], load_frozen(folder.frozen_file))
    torch.set_num_threads(server_threads(config, model.layout))
    quota_samples = sum(int(hello.facts["quota_samples"]) for hello in hellos)
    budget = loop_budget(config, int(facts["num_samples"]), quota_samples)
    rule, policy, training = (
        make_rule(config, model.layout, skew=facts["skew"]),
        make_policy(config),
        Training(budget, make_schedule(config)),
    )
    exchange = Exchange(aggregate=make_aggregate(config))
    return config, model, Server(first.slot.weights.clone(), rule, policy, training, make_roster(config), exchange)
