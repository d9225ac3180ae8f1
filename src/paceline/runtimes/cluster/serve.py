"""`paceline server`: serve a run to workers that connect over the network."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.assembly.preflight import provenance, startup_warnings
from paceline.config import FIELDS, UPKEEP, RunConfig, is_script, to_dict
from paceline.data.datasets import Location, load, locate_data, resolve_dataset
from paceline.errors import ServerLost, UserError
from paceline.object_store.mirroring import mirrored_to_store
from paceline.reports.console import Console
from paceline.runs.arrival_log import next_incarnation
from paceline.runs.durable_files import write_atomically
from paceline.runs.folder import RunFolder, new_folder, require_survivors
from paceline.runs.recording import ScriptCall
from paceline.runtimes.cluster.credentials import Credentials, ListenOptions, as_before, make_credentials
from paceline.runtimes.scripts.launch import script_to_resume, settings_of_script
from paceline.runtimes.scripts.remote.code import ServedScript
from paceline.runtimes.sharded.processes import ShardProcesses
from paceline.runtimes.sharded.spans import require_cuttable
from paceline.settings.features import SCRIPT_DECIDES, SCRIPT_MAY_DECIDE, Feature
from paceline.settings.resolve import check_names, refuse_simulated, resolve
from paceline.settings.strategies import require_feature
from paceline.system.signals import stop_signals
from paceline.system.strict_json import seal, to_json
from paceline.transports.auth import worker_command
from paceline.transports.connection import ANYWHERE, is_loopback, parse_address

if TYPE_CHECKING:
    from paceline.runtimes.server.remote_service import ForegroundChannel
    from paceline.transports.listener import Listener


@dataclass(frozen=True)
class Listening:
    """A server that listens: its address, whether over TLS, and the function that ends its run from another thread."""

    address: str
    tls: bool
    stop: Callable[[str], None]


Tell = Callable[[Listening], None]
Outcome = tuple[RunFolder, dict[str, Any]]


def serve(
    config: RunConfig,
    options: ListenOptions,
    console: Console,
    tell: Tell | None = None,
    command: list[str] | None = None,
) -> Outcome:
    """Serve a new run to workers that connect over the network. `tell` is called when they can connect.

    `command` is the user's script and its arguments, if the workers run one.
    """
    if command is not None:
        return _serve_new_script(config, options, console, tell, command)
    config = _resolved(config, options)
    refuse_simulated(config)
    require_star(config, may_restart=tell is None)
    require_cuttable(config, options.num_servers)
    config, location = resolve_dataset(config)
    with new_folder(config) as folder, mirrored_to_store(folder, config, console.report):
        return folder, _keep_serving(_ServeOrder(config, folder, location, options, console, tell, resume=False))


def _serve_new_script(
    config: RunConfig, options: ListenOptions, console: Console, tell: Tell | None, command: list[str]
) -> Outcome:
    config, typed = settings_of_script(config, command)
    require_star(config, may_restart=tell is None)
    _require_one_server(config, options)
    call = ScriptCall.of(command)
    script = ServedScript.of(call, typed)
    with new_folder(config) as folder, mirrored_to_store(folder, config, console.report):
        call.save(folder)
        return folder, _keep_serving(_ServeOrder(config, folder, None, options, console, tell, False, script))


def serve_again(
    path: Path, options: ListenOptions, console: Console, upkeep: dict[str, Any] | None = None, tell: Tell | None = None
) -> Outcome:
    """Resume serving a run as before, with new settings `upkeep` about its files. Workers reconnect."""
    folder = RunFolder.open(path)
    config = dataclasses.replace(folder.config(), **(upkeep or {}))
    check_names(config)
    folder.require_unfinished(config.recovery)
    require_star(config, may_restart=tell is None)
    options = as_before(options, folder, console.note)
    script = None
    if is_script(config):
        _require_one_server(config, options)
        script = ServedScript.of(script_to_resume(folder, config, console.note), [])
    else:
        require_cuttable(config, options.num_servers)
    with folder.locked(), mirrored_to_store(folder, config, console.report):
        location = locate_data(config) if script is None else None
        return folder, _keep_serving(_ServeOrder(config, folder, location, options, console, tell, True, script))


def _require_one_server(config: RunConfig, options: ListenOptions) -> None:
    if options.num_servers > 1:
        require_feature(config, Feature.SEVERAL_SERVERS, f"--servers {options.num_servers}")


def serve_or_resume(
    config: RunConfig, options: ListenOptions, console: Console, command: list[str] | None = None
) -> Outcome:
    """Serve the run of this name as a supervisor restarts it: start it, resume it, or return the result it ended with.

    A signal ends this process and not the run: workers wait for the next one.
    """
    if config.name is None:
        raise UserError("--continue finds a run by its folder: add --name NAME")
    if config.restart:
        what = f"--restart {config.restart} and --continue both start a server again"
        raise UserError(f"{what}: leave out --continue, or --restart if another program starts this command again")
    options, folder = dataclasses.replace(options, supervised=True), RunFolder(Path(config.runs) / config.name)
    if not folder.has_log:
        folder.discard_unstarted()
        return serve(config, options, console, command=command)
    _require_same_settings(config, options, folder, command)
    result = folder.result()
    if result is not None and result["status"] != "stopped":
        return folder, result
    if options.listen is not None and parse_address(options.listen)[1] == 0:
        options = dataclasses.replace(options, listen=None)  # workers know the free port of the first start
    return serve_again(folder.path, options, console, {name: getattr(config, name) for name in UPKEEP})


def _resolved(config: RunConfig, options: ListenOptions) -> RunConfig:
    """The settings of a new run; a measured step needs all weights in one server, and several count pushes instead."""
    resolved = resolve(config)
    if options.num_servers > 1 and resolved.rule == "auto":
        return resolve(dataclasses.replace(config, rule="auto-counted"))
    return resolved


def _require_same_settings(
    config: RunConfig, options: ListenOptions, folder: RunFolder, command: list[str] | None
) -> None:
    """Raise UserError if a run was started with other settings of its training than it is to be continued with."""
    resolved = (
        resolve_dataset(_resolved(config, options))[0] if command is None else settings_of_script(config, command)[0]
    )
    asked, before = to_dict(resolved), to_dict(folder.config())
    ours = ["threads"] if config.threads is None else []  # by default as many as this machine has
    ours += [*SCRIPT_DECIDES, *SCRIPT_MAY_DECIDE] if command is not None else []
    for name in FIELDS:
        if name not in (*UPKEEP, *ours) and asked[name] != before[name]:
            what = f"{folder.path} was started with {name} = {before[name]!r}, and {asked[name]!r} is asked"
            raise UserError(f"{what}: --continue needs the same settings; choose another --name for a new run")
    if command is not None and command != (started := ScriptCall.load(folder).command):
        what = f"{folder.path} was started with '{shlex.join(started)}', and '{shlex.join(command)}' is asked"
        raise UserError(f"{what}: --continue needs the same command; choose another --name for a new run")


def require_star(config: RunConfig, may_restart: bool) -> None:
    """Raise UserError unless a server can serve this run to other machines.

    `--restart` is refused if this process also starts the workers: a restart would replace it.
    """
    require_feature(config, Feature.SERVER)
    if config.device != "cpu":
        raise UserError(f"--device {config.device}: workers that come over the network compute on CPUs; leave it out")
    if config.faults is not None:
        raise UserError(f"--faults {config.faults}: processes of other machines are not ours to kill; leave it out")
    if config.restart_workers:
        what = f"--restart-workers {config.restart_workers}: this command does not start the workers of other machines"
        raise UserError(f"{what}; leave it out: a worker that is started again there joins the run again")
    if config.restart and not may_restart:
        what = f"--restart {config.restart} is for 'paceline server' and for runs on one machine"
        instead = "leave it out here, and go on with 'paceline resume'"
        raise UserError(f"{what}: {instead}; under --engine ray the server is started again anyway")


@dataclass(frozen=True)
class _ServeOrder:
    config: RunConfig
    folder: RunFolder
    location: Location | None
    options: ListenOptions
    console: Console
    tell: Tell | None
    resume: bool
    script: ServedScript | None = None


def _keep_serving(order: _ServeOrder) -> dict[str, Any]:
    """Serve in this process, or with `--restart` in child processes, one after another at the same address."""
    config, folder, console = order.config, order.folder, order.console
    if not config.restart:
        return _serve(order)
    from paceline.runtimes.local.restart import keep_going

    def live(again: bool) -> None:
        options, settings, script = order.options, config, order.script
        if again:
            options = as_before(dataclasses.replace(options, listen=None), folder, console.note)
        if again and script is not None:  # its server has added to the config what the script decides
            settings, script = folder.config(), dataclasses.replace(script, typed=frozenset())
        known = dataclasses.replace(order, config=settings, options=options, script=script)
        with console:
            _serve(dataclasses.replace(known, tell=None, resume=order.resume or again))

    def lost(what: str) -> ServerLost | None:
        return ServerLost(what, folder.resume_hint(config)) if folder.has_log else None

    console.close()  # its thread must not run while a process is forked
    for number, what in enumerate(keep_going(live, config.restart, lost), start=1):
        console.note(f"{what}: going on from what its folder holds (restart {number} of {config.restart})")
        console.close()
    result = folder.result()
    assert result is not None, f"{folder.path} holds no result although its server finished"
    return result


def _serve(order: _ServeOrder) -> dict[str, Any]:
    from paceline.runtimes.server.remote_service import ForegroundChannel
    from paceline.system.memory import keep_freed_memory, raise_file_limit
    from paceline.system.subnormals import flush_subnormals
    from paceline.transports.listener import Listener

    keep_freed_memory()
    flush_subnormals()
    raise_file_limit()
    notes: list[str] = []  # said when the address is known to be free: a token of a run that never was is no use
    own = make_credentials(order.options, order.folder, notes.append)
    listener = Listener(order.options.address, own.token, own.tls)
    for note in notes:
        order.console.note(note)
    line = ForegroundChannel(order.console.report)
    facts = {**provenance(order.config, order.location), "servers": order.options.num_servers}
    how = _serve_task if order.script is None else _serve_loops
    result = how(order, own, listener, line, facts)
    listener.close()
    require_survivors(result, order.folder)
    return result


def _serve_task(
    order: _ServeOrder, own: Credentials, listener: Listener, line: ForegroundChannel, facts: dict[str, Any]
) -> dict[str, Any]:
    """Serve a built-in model or a task, whose server this process can make by itself."""
    import torch

    from paceline.runtimes.server.process import make_host

    config, folder, location, options = order.config, order.folder, order.location, order.options
    console = order.console
    dataset = load(location, report=console.report) if location is not None else None
    with ShardProcesses(options.num_servers - 1, options.elsewhere, listener, own.token, own.tls) as shards:
        peers = shards.make_peers()
        host = make_host(config, dataset, folder, console.report, peers, facts, order.resume)
        assert host.work is not None
        if not order.resume:
            for warning in startup_warnings(config, location):
                console.note(warning)
        if options.elsewhere:  # for 'paceline shard --run RUN', which it waits for
            before = order.folder.served()
            _publish(order, own, listener, {name: before[name] for name in ("shards",) if name in before})
        service = shards.service(host, peers, line, console, options.wait)
        with _stopping(order, line):
            _announce(order, own, listener, line, shards.known)
            with torch.inference_mode():
                service.run()
            result = host.finish()
        shards.end()
        service.observers.end()
    host.close()
    return result


def _serve_loops(
    order: _ServeOrder, own: Credentials, listener: Listener, line: ForegroundChannel, facts: dict[str, Any]
) -> dict[str, Any]:
    """Serve users' own loops: the first worker that says hello tells the model."""
    from paceline.runtimes.scripts.serving.introductions import Introductions, UnstartedRun

    assert order.script is not None
    config, folder = order.config, order.folder
    incarnation = next_incarnation(folder.arrivals_file, config)[0] if order.resume else 0
    run, welcome = UnstartedRun(config, folder, incarnation), {"script": order.script.to_fields()}
    introductions = Introductions(run, listener, line, welcome, order.options.wait)
    with _stopping(order, line):
        _announce(order, own, listener, line, {})
        return introductions.serve(facts, order.resume)


def _stopping(order: _ServeOrder, line: ForegroundChannel) -> contextlib.AbstractContextManager[object]:
    """Let a signal stop the run; if a supervisor restarts this command, it ends the process alone."""
    return contextlib.nullcontext() if order.options.supervised else stop_signals(order.console.report, line.stop)


def _announce(
    order: _ServeOrder, own: Credentials, listener: Listener, line: ForegroundChannel, shards: dict[str, Any]
) -> None:
    """Say where workers connect: to the user, in the run's folder, and to a launcher."""
    tell, folder = order.tell, order.folder
    _publish(order, own, listener, shards)
    host_name, port = parse_address(listener.address)
    how = f": workers connect to port {port} of this machine" if host_name in ANYWHERE else ""
    if tell is None and is_loopback(host_name):
        command = worker_command(listener.address, folder.path, order.config.workers or 1)
        how = f": start workers on this machine with {command}"
    order.console.note(f"serving at {listener.address}{how}")
    if tell is not None:
        tell(Listening(listener.address, own.tls is not None, line.stop))


def _publish(order: _ServeOrder, own: Credentials, listener: Listener, shards: dict[str, Any]) -> None:
    """Write into the run's folder how to reach its server."""
    known = {"address": listener.address, "pid": os.getpid(), "by_hand": order.tell is None, **own.kept, **shards}
    write_atomically(order.folder.server_file, to_json(seal(known)).encode())
