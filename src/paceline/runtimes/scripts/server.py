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
from paceline.assembly.preflight import announce_rule
from paceline.assembly.run import make_roster
from paceline.config import RunConfig, from_dict
from paceline.core.messages import Join
from paceline.core.schedules import Budget, Training
from paceline.core.server import Server
from paceline.core.worker import LocalWorker
from paceline.errors import ProtocolError, RunFailed, UserError
from paceline.runs.folder import RunFolder
from paceline.runs.recovery import rebuild
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
        num_fitting = sum(_expected(hello) == expected for _, hello in introductions)
        folder = RunFolder(Path(spec["folder"]))
        resolved, model, server = learn(config, first, num_fitting, folder)
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
    return {name: first.facts[name] for name in ("layout", "state_layout", "num_samples")}


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


def learn(config: RunConfig, first: Hello, workers: int, folder: RunFolder) -> tuple[RunConfig, ScriptModel, Server]:
    """Make the server from the first worker's weights. Its data and the number of workers give the budget."""
    facts = first.facts
    config = dataclasses.replace(config, batch_size=int(facts["batch_size"]), **facts["settings"])
    model = ScriptModel(facts["layout"], facts["state_layout"], facts["sources"], load_frozen(folder.frozen_file))
    torch.set_num_threads(server_threads(config, model.layout))
    size = int(facts["num_samples"])
    own = config.epoch_mode == "own"
    passes = max(1, round(config.epochs * (int(facts["shard_samples"]) if own else size)))
    budget = Budget(passes * (workers if own else 1), size, steps=config.steps, per_worker=own)
    rule, policy, training = (
        make_rule(config, model.layout, skew=facts["skew"]),
        make_policy(config),
        Training(budget, make_schedule(config)),
    )
    return config, model, Server(first.slot.weights.clone(), rule, policy, training, make_roster(config))
