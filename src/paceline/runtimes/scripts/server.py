"""The server of `paceline run`: it takes the model from the scripts' first message, then serves like any other."""

from __future__ import annotations

import dataclasses
import selectors
import socket
from pathlib import Path
from typing import Any

import torch

from paceline.assembly.core import make_policy, make_rule, make_schedule
from paceline.assembly.cpu_sharing import server_threads
from paceline.config import RunConfig, from_dict
from paceline.core.messages import Join
from paceline.core.schedules import Training
from paceline.core.server import Roster, Server
from paceline.core.worker import LocalWorker
from paceline.errors import ProtocolError, RunFailed, UserError
from paceline.runs.folder import RunFolder
from paceline.runs.recovery import rebuild
from paceline.runtimes.scripts.sampler import loop_budget
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.process import reporting
from paceline.runtimes.server.runtime import Peers
from paceline.runtimes.server.service import Service, SupervisorChannel
from paceline.tasks.script_model import ScriptModel, load_frozen
from paceline.transports.protocol import Hello
from paceline.transports.shared_memory import SharedMemoryPeer

Introductions = list[tuple[SharedMemoryPeer, Hello]]


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
        peers: Peers[SharedMemoryPeer] = Peers()
        rebuilt = None
        if spec.get("resume"):
            skipping = dataclasses.replace(resolved, recovery="checkpoint")
            rebuilt = rebuild(server, _no_worker, model, skipping, folder, control.send)
        now = rebuilt.now if rebuilt is not None else 0.0
        host = Host(server, model, None, resolved, folder, control.send, peers, now, spec["facts"])
        if rebuilt is not None:
            host.resume_from(rebuilt)
        service = Service(host, peers, control, expected, patient=True)
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

    return reporting(serve, fds[0])


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
        make_rule(config, model.layout),
        make_policy(config),
        Training(budget, make_schedule(config)),
    )
    return config, model, Server(first.slot.weights.clone(), rule, policy, training, Roster(config.workers or 1))
