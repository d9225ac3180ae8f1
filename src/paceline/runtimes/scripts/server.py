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

from paceline.assembly.cpu_sharing import server_threads
from paceline.assembly.own_loop import announce_loop, loop_config, loop_server, optimizer_state
from paceline.config import RunConfig, from_dict
from paceline.core.buffers import BufferSizes
from paceline.core.messages import EstimatedStatistics, Join, Leave, OwnLoopInput, Push, ReadOptimizer, ReadWeights
from paceline.core.own_loop.compression import gradient_digest, largest_capacities
from paceline.core.own_loop.torch_optimizer import OptimizerFailed
from paceline.core.server import Server
from paceline.core.worker import LocalWorker
from paceline.errors import ProtocolError, RunFailed, UserError
from paceline.runs.folder import ALL_GONE, LOOPS_ENDED, ONE_ENDED, RunFolder
from paceline.runs.recording import ScriptCall
from paceline.runs.recovery import kept_pushes, rebuild
from paceline.runs.result import shared_state
from paceline.runtimes.scripts.optimizer import MAX_OPTIMIZERS, split_states
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.process import reporting
from paceline.runtimes.server.runtime import Peers
from paceline.runtimes.server.service import Service, SupervisorChannel
from paceline.settings.preprocessing import split_of
from paceline.settings.strategies import strategy_of
from paceline.tasks.script_model import ScriptModel, load_tensors
from paceline.transports.frames import ANYTHING, OBJECT, Schema, checked, integer, listed, nullable
from paceline.transports.protocol import Hello
from paceline.transports.shared_memory import SharedMemoryPeer

NO_STEP = "no step reached the server: give session.prepare(...) the optimizer whose step() the loop calls"
Introductions = list[tuple[SharedMemoryPeer, Hello]]
LOOP_FACTS: Schema = {
    **dict.fromkeys(("layout", "state_layout"), listed(ANYTHING, 0, 1 << 20)),
    "num_samples": nullable(integer(0, 1 << 48)),
    "steps": nullable(integer(1, 1 << 48)),
    **dict.fromkeys(("order", "skew", "epochs"), ANYTHING),
    **dict.fromkeys(("batch_size", "max_samples"), integer(1)),
    "settings": OBJECT,
    "sources": nullable(OBJECT),
    "optimizers": listed(OBJECT, 0, MAX_OPTIMIZERS),
    "loaders": integer(0, 1 << 10),
    "numbers": integer(0),
    "notes": listed(ANYTHING, 0, 100),
}
"""What an own loop must say of its model and data in its hello."""


class FinalStatistics:
    """Collects the running statistics that workers estimate for the final weights; their mixture is saved."""

    def __init__(self, server: Server, model: ScriptModel) -> None:
        self.server, self._model = server, model
        self._estimates: dict[int, tuple[int, Tensor]] = {}

    def read(self, peer: SharedMemoryPeer) -> None:
        """Answer a worker that reads the weights which would be saved now."""
        assert peer.slot is not None
        evaluated = self.server.evaluated
        peer.slot.weights.copy_(evaluated)
        peer.confirm(averaged=evaluated is not self.server.weights)

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
            state = shared_state(self.server, self._model, self.server.evaluated)
        else:
            self._model.set_statistics(self.server.evaluated, state)
        for peer in peers:
            if peer.worker in self._estimates and peer.slot is not None:
                if state is not None:
                    peer.slot.state.copy_(state)
                peer.confirm()
        self.clear()

    def clear(self) -> None:
        """Forget what was sent."""
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
        state = model.state_layout.size if model.state_layout.parameters else 0
        capacities = largest_capacities(one.codecs for one in host.server.by_optimizer)
        sizes = BufferSizes(model.layout.size, state, *capacities, loop=expected["numbers"])
        super().__init__(host, peers, control, expected, sizes, patient=True)
        self._statistics = FinalStatistics(host.server, model)
        self._ending: dict[int, SharedMemoryPeer] = {}  # workers that wait for the final weights
        self._stop_reason = ALL_GONE
        self._first_pushes: dict[int, bytes | None] | None = (
            {} if _needs_other_data(host) else None
        )  # hashes, by worker

    def on_push(self, peer: SharedMemoryPeer, push: Push) -> None:
        """Take a push. Stop the run if two workers push the same gradient first: then they see the same data."""
        if self._first_pushes is not None and push.worker not in self._first_pushes and push.weight != 0.0:
            self._compare_first(push, self._first_pushes)
        try:
            super().on_push(peer, push)
        except OptimizerFailed as error:
            raise UserError(f"the optimizer of the script fails in the server: {error}") from error

    def _compare_first(self, push: Push, known: dict[int, bytes | None]) -> None:
        digest = gradient_digest(push, self._host.server.by_optimizer[push.optimizer].updater)
        same = next((worker for worker, other in known.items() if other == digest), None)
        if same is not None and digest is not None:
            what = f"workers {same} and {push.worker} pushed the same gradient first: they train on the same data"
            walks = "if the loop walks over its data in order, data = session.split(data)"
            draws = "if it draws from a torch.Generator of its own, session.rng() gives one that differs"
            raise UserError(f"{what}; give session.prepare(...) the loader or data set; {walks}; {draws}")
        known[push.worker] = digest
        if len(known) == self._host.server.num_workers:
            self._first_pushes = None

    def take_setting(self, peer: SharedMemoryPeer, message: OwnLoopInput) -> None:
        """Take a message that only a user's own loop sends."""
        if isinstance(message, ReadWeights) and message.final:
            self._await_end(peer)
            return
        self._host.handle(message)
        if isinstance(message, ReadWeights):
            self._statistics.read(peer)
        elif isinstance(message, ReadOptimizer) and message.optimizer < len(self._host.server.by_optimizer):
            peer.send_optimizer(optimizer_state(self._host.server, message.optimizer))
        elif isinstance(message, EstimatedStatistics):
            self._statistics.add(peer, message.samples)
            self._settle()

    def _await_end(self, peer: SharedMemoryPeer) -> None:
        """Let a worker wait for the final weights. If it has work left, it leaves training now."""
        server = self._host.server
        member = server.members[peer.worker]
        if member.live and not member.inactive and not server.finished:
            self._stop_reason = LOOPS_ENDED
            if strategy_of(self._host.config).needs_all:
                self._host.stop(f"{ONE_ENDED} (worker {peer.worker}), and {self._host.config.strategy} needs all")
            else:
                self._host.handle(Leave(peer.worker, peer.incarnation, done=True))
        self._ending[peer.worker] = peer
        self._settle()

    def remove(self, peer: SharedMemoryPeer, returns: bool = False) -> None:
        """Disconnect a worker."""
        if self._ending.get(peer.worker) is peer:
            del self._ending[peer.worker]
        super().remove(peer, returns)

    def stop_if_all_gone(self) -> None:
        """Stop the run if no worker is left and none will return; others may have waited for the one that left."""
        super().stop_if_all_gone()
        self._settle()

    def _all_know(self, deadline: float) -> bool:
        self._settle()
        return super()._all_know(deadline)

    def _settle(self) -> None:
        """Answer the workers that wait for the end, if it has come."""
        connected, host = self._peers.by_worker, self._host
        if self._ending and connected.keys() <= self._ending.keys() and not self._returning:
            lost = f"; {len(set(host.lost))} of {host.server.num_workers} workers were lost" if host.lost else ""
            host.stop(f"{self._stop_reason}{lost}" if self._stop_reason == LOOPS_ENDED else self._stop_reason)
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
        awaited: set[int] = set()
        introductions = _gather(control, config, awaited)
        first = introductions[0][1]
        expected = _expected(first)
        fitting = [hello for _, hello in introductions if _expected(hello) == expected]
        folder = RunFolder(Path(spec["folder"]))
        resolved, model, server = learn(config, fitting, folder)
        if not spec.get("resume"):
            folder.update_config(resolved)
            announce_loop(resolved, first.facts, control.send)
        peers: Peers[SharedMemoryPeer] = Peers()
        rebuilt = None
        if spec.get("resume"):
            kept = kept_pushes(resolved, folder, control.send)
            make_source = kept.sources(first.slot.sizes) if kept is not None else _no_worker
            recovery = resolved if kept is not None else dataclasses.replace(resolved, recovery="checkpoint")
            rebuilt = rebuild(server, make_source, model, recovery, folder, control.send)
        now = rebuilt.now if rebuilt is not None else 0.0
        host = Host(server, model, None, resolved, folder, control.send, peers, now, spec["facts"])
        host.verify_with(None, "only your own loop computes its pushes")
        if rebuilt is not None:
            host.resume_from(rebuilt)
        service = ScriptService(host, model, peers, control, expected)
        for peer, _ in introductions:
            service.admit(peer)
        for worker in awaited:
            service.expect(worker)
        for peer, hello in introductions:
            service.join(peer, hello)
        for worker in set(range(config.workers or 1)) - {peer.worker for peer, _ in introductions}:
            service.miss(worker)
        with torch.inference_mode():
            service.run()
        if not server.pushes:
            host.close()
            raise UserError(NO_STEP)
        host.finish()
        host.close()

    return reporting(serve, fds[0], spec["folder"])


def _no_worker(join: Join) -> LocalWorker:
    raise AssertionError("only a script computes its pushes")


def _expected(first: Hello) -> dict[str, Any]:
    """The facts in which all scripts must agree with the first."""
    return {name: first.facts[name] for name in ("layout", "state_layout", "num_samples", "order", "numbers")}


def _gather(control: SupervisorChannel, config: RunConfig, awaited: set[int]) -> Introductions:
    """Wait for the hello of every script. Return them in worker order, without scripts that ended before.

    `awaited` gets the numbers of workers that are to join later.
    With `--restart-workers` a script that ended is waited for, until the supervisor says that it is gone.
    """
    selector = selectors.DefaultSelector()
    selector.register(control.connection, selectors.EVENT_READ)
    pending: set[int] = set(range(config.workers or 1))
    found: dict[int, tuple[SharedMemoryPeer, Hello]] = {}
    while pending:
        for key, _ in selector.select():
            if key.data is None:
                order, fds = control.receive()
                if order["kind"] == "stop":
                    raise RunFailed("stopped before the scripts had called session.prepare(...)")
                worker = order["worker"]
                if worker in found:  # its process has ended since
                    found.pop(worker)[0].close()
                if order["kind"] in ("gone", "expected"):
                    (pending.discard if order["kind"] == "gone" else awaited.add)(worker)
                    continue
                pending.add(worker)
                peer = SharedMemoryPeer(socket.socket(fileno=fds[0]), worker, order["incarnation"])
                selector.register(peer.connection, selectors.EVENT_READ, peer)
                continue
            selector.unregister(key.data.connection)
            try:
                message = key.data.receive()
                if isinstance(message, Hello):
                    checked(message.facts, LOOP_FACTS)
                    found[key.data.worker] = key.data, message
                if isinstance(message, Hello) or not config.restart_workers:
                    pending.discard(key.data.worker)
            except ProtocolError as error:
                control.note(str(error))
                pending.discard(key.data.worker)
    if not found:
        raise UserError(
            "the script ended without calling paceline.join() and session.prepare(...), or failed in them: nothing was "
            "trained"
        )
    return [found[worker] for worker in sorted(found)]


def learn(config: RunConfig, hellos: list[Hello], folder: RunFolder) -> tuple[RunConfig, ScriptModel, Server]:
    """Make the server from the first worker's weights, and the model's names from what it says of it."""
    first, facts = hellos[0], hellos[0].facts
    config = loop_config(config, facts)
    model = ScriptModel(facts["layout"], facts["state_layout"], facts["sources"], load_tensors(folder.frozen_file))
    torch.set_num_threads(server_threads(config, model.layout))
    script = ScriptCall.load(folder).path if folder.script_file.exists() else None
    initial = split_states(load_tensors(folder.optimizer_file))
    return config, model, loop_server(config, facts, first.slot.weights.clone(), script, initial)


def _needs_other_data(host: Host) -> bool:
    """Whether workers must push different gradients: there are several, and not all have all data on purpose."""
    return host.server.num_workers > 1 and split_of(host.config).kind != "full" and not host.server.version
