"""`paceline server` and `paceline worker`: a run whose workers connect over the network."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.assembly.preflight import provenance, startup_warnings
from paceline.config import RunConfig
from paceline.data.datasets import Dataset, Location, load, locate_data, resolve_dataset
from paceline.errors import ServerLost, UserError
from paceline.object_store.mirroring import mirrored_to_store
from paceline.reports.console import Console
from paceline.runs.durable_files import write_atomically
from paceline.runs.folder import RunFolder, new_folder, require_survivors
from paceline.runtimes.cluster.credentials import PLAIN_WARNING, ListenOptions, as_before, make_credentials
from paceline.runtimes.sharded.processes import ShardProcesses, serve_part
from paceline.runtimes.sharded.spans import require_cuttable
from paceline.settings.resolve import check_names, refuse_simulated, resolve
from paceline.settings.strategies import Feature, require_feature
from paceline.system.signals import stop_signals
from paceline.system.strict_json import seal, to_json
from paceline.transports.auth import ConnectOptions, tls_of, token_of
from paceline.transports.connection import ANYWHERE, is_loopback, parse_address
from paceline.transports.handshake import TlsExpected
from paceline.transports.tls import Tls, worker_tls


@dataclass(frozen=True)
class Listening:
    """A server that listens: its address, whether over TLS, and the function that ends its run from another thread."""

    address: str
    tls: bool
    stop: Callable[[str], None]


Tell = Callable[[Listening], None]
Outcome = tuple[RunFolder, dict[str, Any]]


def serve(config: RunConfig, options: ListenOptions, console: Console, tell: Tell | None = None) -> Outcome:
    """Serve a new run to workers that connect over the network. `tell` is called when they can connect."""
    config = resolve(config)
    refuse_simulated(config)
    require_star(config, may_restart=tell is None)
    require_cuttable(config, options.num_servers)
    config, location = resolve_dataset(config)
    with new_folder(config) as folder, mirrored_to_store(folder, config, console.report):
        return folder, _keep_serving(_ServeOrder(config, folder, location, options, console, tell, resume=False))


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
    require_cuttable(config, options.num_servers)
    with folder.locked(), mirrored_to_store(folder, config, console.report):
        order = _ServeOrder(config, folder, locate_data(config), options, console, tell, resume=True)
        return folder, _keep_serving(order)


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


def _keep_serving(order: _ServeOrder) -> dict[str, Any]:
    """Serve in this process, or with `--restart` in child processes, one after another at the same address."""
    config, folder, console = order.config, order.folder, order.console
    if not config.restart:
        return _serve(order)
    from paceline.runtimes.local.restart import keep_going

    def live(again: bool) -> None:
        options = order.options
        if again:
            options = as_before(dataclasses.replace(options, listen=None), folder, console.note)
        with console:
            _serve(dataclasses.replace(order, options=options, tell=None, resume=order.resume or again))

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
    import torch

    from paceline.runtimes.server.process import make_host
    from paceline.runtimes.server.remote_service import ForegroundChannel
    from paceline.system.memory import keep_freed_memory, raise_file_limit
    from paceline.system.subnormals import flush_subnormals
    from paceline.transports.listener import Listener

    keep_freed_memory()
    flush_subnormals()
    raise_file_limit()
    config, folder, location, options = order.config, order.folder, order.location, order.options
    console, tell, resume = order.console, order.tell, order.resume
    own = make_credentials(options, folder, console.note)
    listener = Listener(options.address, own.token, own.tls)
    dataset = load(location, report=console.report) if location is not None else None
    line = ForegroundChannel(console.report)
    facts = {**provenance(config, location), "servers": options.num_servers}
    with ShardProcesses(options.num_servers - 1, options.elsewhere, listener, own.token, own.tls) as shards:
        peers = shards.make_peers()
        host = make_host(config, dataset, folder, console.report, peers, facts, resume)
        assert host.work is not None
        if not resume:
            for warning in startup_warnings(config, location):
                console.note(warning)
        service = shards.service(host, peers, line, console, options.wait)
        known = {"address": listener.address, "pid": os.getpid(), "by_hand": tell is None, **own.kept, **shards.known}
        write_atomically(folder.server_file, to_json(seal(known)).encode())
        host_name, port = parse_address(listener.address)
        how = f": workers connect to port {port} of this machine" if host_name in ANYWHERE else ""
        if tell is None and is_loopback(host_name):
            how = f": start workers on this machine with 'paceline worker --run {folder.path}'"
        console.note(f"serving at {listener.address}{how}")
        with stop_signals(console.report, line.stop):
            if tell is not None:
                tell(Listening(listener.address, own.tls is not None, line.stop))
            with torch.inference_mode():
                service.run()
            result = host.finish()
        shards.end()
        service.observers.end()
    host.close()
    listener.close()
    require_survivors(result, folder)
    return result


def join_server(options: ConnectOptions, console: Console) -> bool:
    """Work for a server until its run is over. Return False if the server is gone before that."""
    if options.threads is not None and options.threads < 1:
        raise UserError(f"--threads {options.threads}: a worker needs at least one")
    if options.overlap < 0:
        raise UserError(f"--overlap {options.overlap}: write how many further workers this process is, 0 or more")
    _require_device(options.device)
    from paceline.runtimes.cluster.worker import ServerAddress, WorkerOptions, work

    server = ServerAddress(options.connect, token_of(options), tls_of(options), options.patience)
    own = WorkerOptions(options.data_dir, options.threads, options.worker, options.overlap, options.device)
    _warn_of_plain(options, console)
    return _over(options, lambda tls: work(dataclasses.replace(server, tls=tls), own, _load, console.note))


def _over(options: ConnectOptions, join: Callable[[Tls | None], bool]) -> bool:
    """Join with or without TLS. Change to TLS if the server expects it and the user has not chosen."""
    try:
        return join(tls_of(options))
    except TlsExpected:  # a server for other machines, reached over loopback
        if options.tls is not None:
            raise
        return join(worker_tls())


def _warn_of_plain(options: ConnectOptions, console: Console) -> None:
    if options.tls is False and not is_loopback(parse_address(options.connect)[0]):
        console.note(PLAIN_WARNING)


def _require_device(device: str) -> None:
    name, _, number = device.partition(":")
    if device == "cpu":
        return
    if name != "cuda" or (number and not number.isdecimal()) or device.endswith(":"):
        raise UserError(f"--device {device}: a worker computes on cpu, cuda or one of several as in cuda:1")
    import torch

    if not torch.cuda.is_available() or int(number or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count() if torch.cuda.is_available() else "no"
        raise UserError(f"--device {device}: this machine has {found} CUDA devices that torch can use")


def join_as_shard(options: ConnectOptions, listen: str | None, once: bool, console: Console) -> bool:
    """Serve a part of a run until it is over. Return False if its first server is gone before that."""
    token = token_of(options)
    _warn_of_plain(options, console)
    return _over(options, lambda tls: serve_part(options.connect, listen, token, tls, options.patience, once, console))


def _load(config: RunConfig) -> Dataset | None:
    location = locate_data(config)
    return load(location) if location is not None else None
