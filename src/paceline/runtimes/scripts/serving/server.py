"""The server of `paceline run`: it takes the model from the scripts' first message, then serves like any other."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.assembly.cpu_sharing import server_threads
from paceline.assembly.own_loop import announce_loop, decided_by_script, loop_config, loop_server
from paceline.config import RunConfig, from_dict
from paceline.core.buffers import BufferSizes
from paceline.core.own_loop.compression import largest_capacities
from paceline.core.own_loop.settings import LoopLayout
from paceline.core.own_loop.torch_optimizer import OptimizerFailed
from paceline.core.server import Server
from paceline.errors import DiskError, Interrupted, PacelineError, ProtocolError, RunFailed, UserError
from paceline.interfaces import Layout, Report
from paceline.runs.folder import ALL_GONE, LOOPS_ENDED, RunFolder
from paceline.runs.recording import ScriptCall
from paceline.runs.recovery import kept_pushes, rebuild
from paceline.runs.result import status_of
from paceline.runtimes.scripts.adopt import MAX_NAME
from paceline.runtimes.scripts.optimizer import MAX_OPTIMIZERS, split_states
from paceline.runtimes.scripts.serving.agreement import expected_facts, require_same_loops
from paceline.runtimes.scripts.serving.requests import LoopRequests
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.process import reporting
from paceline.runtimes.server.runtime import ABSENT_SECONDS, Peers, Runtime, SupervisorChannel, absent
from paceline.runtimes.server.service import Service
from paceline.settings.features import SCRIPT_MAY_DECIDE
from paceline.settings.preprocessing import split_of
from paceline.system.signals import INTERRUPTED, TERMINATED
from paceline.tasks.script_model import ScriptModel, load_tensors
from paceline.transports.frames import (
    ANYTHING,
    OBJECT,
    Field,
    Schema,
    checked,
    integer,
    listed,
    nullable,
    number,
    optional,
    record,
    text,
)
from paceline.transports.protocol import Hello, InitialTensors, unreadable
from paceline.transports.shared_memory import SharedMemoryPeer

NO_STEP = "no step reached the server: give session.prepare(...) the optimizer whose step() the loop calls"
ENDING_SECONDS = 0.5
MAX_NOTE, MAX_NUMBER = 1 << 12, 1e15
_LENGTH = integer(0, 1 << 48)


def _is_row(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) == 4 and isinstance(value[1], list | tuple)
    return is_list and isinstance(value[0], str) and len(value[1]) <= 64 and all(map(_LENGTH.accepts, value[1]))


_ROW = Field("the name, shape, offset and decay of a tensor", _is_row)


def _is_decided(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= set(SCRIPT_MAY_DECIDE):
        return False
    try:
        from_dict(value)
    except UserError:
        return False
    return True


_DECIDED = Field("settings that a script may decide", _is_decided)
_NAMES = Field("names by name", lambda value: isinstance(value, dict) and all(type(v) is str for v in value.values()))
LOOP_FACTS: Schema = {
    **dict.fromkeys(("layout", "state_layout"), listed(_ROW, 0, 1 << 20)),
    "num_samples": nullable(integer(0, 1 << 48)),
    "steps": nullable(integer(1, 1 << 48)),
    "order": ANYTHING,
    "skew": nullable(number(0.0, MAX_NUMBER)),
    "epochs": nullable(number(0.0, MAX_NUMBER)),
    **dict.fromkeys(("batch_size", "max_samples"), integer(1)),
    "settings": _DECIDED,
    "names": optional(record(dict.fromkeys(("model", "dataset"), optional(text(MAX_NAME)))), {}),
    "sources": nullable(_NAMES),
    "optimizers": listed(record({"class": OBJECT, "settings": _DECIDED, "loop": OBJECT}), 0, MAX_OPTIMIZERS),
    "loaders": integer(0, 1 << 10),
    "numbers": integer(0),
    "notes": listed(text(MAX_NOTE), 0, 100),
}
"""What an own loop must say of its model and data in its hello."""


def check_facts(hello: Hello) -> None:
    """Raise ProtocolError unless a hello says what an own loop must, and its buffers fit the model that it tells."""
    facts, sizes = checked(hello.facts, LOOP_FACTS), hello.slot.sizes
    state = Layout.from_rows(facts["state_layout"]).size if facts["state_layout"] else 0
    told = Layout.from_rows(facts["layout"]).size, state, facts["numbers"]
    if told != (sizes.weights, sizes.state, sizes.loop):
        found = f"{sizes.weights} weights, {sizes.state} of state and {sizes.loop} of its loop"
        raise ProtocolError(f"worker {hello.join.worker} has buffers of {found} for a model of {told}")
    try:
        loops = [LoopLayout.from_facts(one["loop"]) for one in facts["optimizers"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise unreadable(hello.join.worker, error) from error
    steps = sum(loop.num_parameters for loop in loops), max((loop.size for loop in loops), default=0)
    if loops and (steps[0] != len(facts["layout"]) or steps[1] > sizes.loop):
        what = f"optimizers of {steps[0]} parameters that say {steps[1]} numbers"
        raise ProtocolError(f"worker {hello.join.worker} told {what}, for {len(facts['layout'])} and {sizes.loop}")


def loop_sizes(host: Host, model: ScriptModel, expected: dict[str, Any]) -> BufferSizes:
    """The sizes of the buffers of every own loop."""
    state = model.state_layout.size if model.state_layout.parameters else 0
    capacities = largest_capacities(one.codecs for one in host.server.by_optimizer)
    return BufferSizes(model.layout.size, state, *capacities, loop=expected["numbers"])


def main(spec: dict[str, Any], fds: list[int]) -> int:
    """Wait for the first message of every script, then serve the run until the last script has left."""
    config = from_dict(spec["config"])

    def serve(control: SupervisorChannel) -> None:
        control.send({"kind": "serving"})
        awaited: set[int] = set()
        found = _gather(control, config, awaited)
        require_same_loops([hello for _, hello in found])
        first, folder, peers = found[0][1], RunFolder(Path(spec["folder"])), Peers[SharedMemoryPeer]()
        learned = learn(config, [first], folder)
        host = host_of_loops(learned, first, folder, control.send, peers, spec["facts"], bool(spec.get("resume")))
        model = learned.model
        expected = expected_facts(first)
        service = Service(host, peers, control, expected, loop_sizes(host, model, expected))
        ending = partial(control.send, {"kind": "ending"})
        awaits = partial(getattr, service, "awaits_worker")
        service.serve_loops(LoopRequests(host, model, peers.by_worker, awaits, control.note, ending))
        for peer, _ in found:
            service.admit(peer)
        for worker in awaited:
            service.expect(worker)
        for peer, hello in found:
            service.join(peer, hello)
        for worker in set(range(config.workers or 1)) - {peer.worker for peer, _ in found}:
            what = f"worker {worker} ended before session.prepare(...): the others go on without it"
            control.note(what + ", and without its part of the data" * (split_of(learned.config).kind != "full"))
            service.miss(worker)
        with torch.inference_mode(), saved_at_mistakes(host):
            service.run()
        finish_loops(host)

    return reporting(serve, fds[0], spec["folder"])


class LearnedRun(NamedTuple):
    """What a worker's first message tells: the settings that its script decides, the model, and so the server."""

    config: RunConfig
    model: ScriptModel
    server: Server


def host_of_loops(
    learned: LearnedRun,
    first: Hello,
    folder: RunFolder,
    report: Report,
    runtime: Runtime,
    facts: dict[str, Any],
    resume: bool,
) -> Host:
    """Start the host of own loops, whose model the `first` hello has told; or go on with one from its folder."""
    resolved, model, server = learned
    rebuilt = None
    if resume:
        kept = kept_pushes(resolved, folder, report)
        make_source = kept.sources(first.slot.sizes) if kept is not None else None
        rebuilt = rebuild(server, make_source, model, resolved, folder, report)
    else:
        folder.update_config(resolved)
        announce_loop(resolved, first.facts, report)
    now = rebuilt.now if rebuilt is not None else 0.0
    told = checked(first.facts, {"names": LOOP_FACTS["names"]})["names"]
    told |= {"decided_by_script": decided_by_script(resolved, first.facts)}
    told |= {"unit": "pushes"} if not first.facts["loaders"] else {}  # a loop that draws its own batches
    host = Host(server, model, None, resolved, folder, report, runtime, now, {**facts, **told})
    host.verify_with(None, "only your own loop computes its pushes")
    if rebuilt is not None:
        host.resume_from(rebuilt)
    return host


@contextlib.contextmanager
def saved_at_mistakes(host: Host) -> Iterator[None]:
    """Save the run as stopped, close its host and raise RunFailed, if a mistake in the script ends it while it trains.

    An optimizer that fails in the server may have changed a part of the weights: they are not saved.
    """
    try:
        yield
    except UserError as error:
        if isinstance(error, DiskError) or isinstance(error.__cause__, OptimizerFailed) or discard_untrained(host):
            raise
        host.stop(str(error))
        result = host.finish()
        host.close()
        raise RunFailed(f"{error}: {host.folder.stopped_hint(result)}") from error


def nothing_trained(reason: str, before: str) -> PacelineError:
    """The error of a run that was stopped before something; with the exit code of Ctrl-C if that was the reason."""
    kind = Interrupted if reason in (INTERRUPTED, TERMINATED) else RunFailed
    return kind(f"{reason}, before {before}: nothing was trained")


def discard_untrained(host: Host) -> bool:
    """Whether a new run has made no update. Then its log is removed, so that its folder counts as unstarted."""
    server = host.server
    if server.version or server.divergence is not None or host.first_incarnation:
        return not server.pushes
    host.close()
    host.folder.arrivals_file.unlink(missing_ok=True)
    return True


def finish_loops(host: Host) -> dict[str, Any]:
    """Save the weights and the result after the last script has left, and close the host; return the result.

    A run that was stopped before its first update leaves nothing: RunFailed, or Interrupted by Ctrl-C.
    """
    reason = host.stop_reason
    is_early = (
        reason not in (None, ALL_GONE) and status_of(host.server, reason) == "stopped" and discard_untrained(host)
    )
    if not host.server.pushes or is_early:
        host.close()
        if reason not in (None, ALL_GONE) and not str(reason).startswith(LOOPS_ENDED):
            raise nothing_trained(
                str(reason), "the first update" if host.server.pushes else "the first step of a script"
            )
        raise UserError(NO_STEP)
    result = host.finish()
    host.close()
    return result


def _gather(control: SupervisorChannel, config: RunConfig, awaited: set[int]) -> list[tuple[SharedMemoryPeer, Hello]]:
    """Wait for the hello of every script. Return them in worker order, without scripts that ended before.

    `awaited` gets the numbers of workers that are to join later.
    With `--restart-workers` a script that ended is waited for, until the supervisor says that it is gone. If one ended
    without a hello, the supervisor has `ENDING_SECONDS` to stop the run, because its exception may come later.
    """
    selector, until = selectors.DefaultSelector(), -math.inf
    selector.register(control.connection, selectors.EVENT_READ)
    pending: set[int] = set(range(config.workers or 1))
    found: dict[int, tuple[SharedMemoryPeer, Hello]] = {}
    name_at = time.monotonic() + ABSENT_SECONDS
    while pending or time.monotonic() < until:
        end = name_at if pending else until
        for key, _ in selector.select(None if end == math.inf else end - time.monotonic()):
            if key.data is None:
                order, fds = control.receive()
                if order["kind"] == "stop":
                    raise nothing_trained(order["reason"], "a script had called session.prepare(...)")
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
                    check_facts(message)
                    found[key.data.worker] = key.data, message
                else:
                    until = time.monotonic() + ENDING_SECONDS
                if isinstance(message, Hello) or not config.restart_workers:
                    pending.discard(key.data.worker)
            except ProtocolError as error:
                control.note(str(error))
                pending.discard(key.data.worker)
        name_at = _name_absent(control, pending, name_at)
    if not found:
        raise UserError(
            "the script ended without calling paceline.join() and session.prepare(...), or failed in them: nothing was "
            "trained"
        )
    return [found[worker] for worker in sorted(found)]


def _name_absent(control: SupervisorChannel, pending: set[int], at: float) -> float:
    """Name the workers whose hello is missing at that time, once; return the next time."""
    if not pending or time.monotonic() < at:
        return at
    control.note(absent(sorted(pending), "called session.prepare(...)"))
    return math.inf


def learn(
    config: RunConfig, hellos: list[Hello], folder: RunFolder, brought: InitialTensors | None = None
) -> LearnedRun:
    """Make the server from the first worker's weights, and the model's names from what it says of it.

    `brought` is what that worker has sent besides, for a folder that does not hold it yet.
    """
    first, facts = hellos[0], hellos[0].facts
    config = loop_config(config, facts)
    frozen, used = load_tensors(folder.frozen_file), load_tensors(folder.optimizer_file)
    if brought is not None:
        frozen, used = frozen or brought.frozen, used or brought.optimizers
    model = ScriptModel(facts["layout"], facts["state_layout"], facts["sources"], frozen)
    torch.set_num_threads(server_threads(config, model.layout))
    script = ScriptCall.load(folder).path if folder.script_file.exists() else None
    return LearnedRun(config, model, loop_server(config, facts, first.slot.weights.clone(), script, split_states(used)))
