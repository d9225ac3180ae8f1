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
from paceline.reports.console import Console
from paceline.runs.folder import RunFolder, holding, require_survivors, write_atomically
from paceline.runtimes.sharded.processes import ShardProcesses, serve_part
from paceline.runtimes.sharded.spans import require_cuttable
from paceline.settings.resolve import check_names, refuse_simulated, resolve
from paceline.settings.strategies import Feature, require_feature
from paceline.system.signals import stop_signals
from paceline.system.strict_json import seal, to_json
from paceline.transports.auth import ConnectOptions, _read_token, make_token, tls_of, token_of
from paceline.transports.connection import ANYWHERE, is_loopback, parse_address
from paceline.transports.tls import Tls, make_certificate, server_tls

LOOPBACK = "127.0.0.1:0"


@dataclass(frozen=True)
class Listening:
    """A server that listens: its address, and the function that ends its run from another thread."""

    address: str
    stop: Callable[[str], None]


Tell = Callable[[Listening], None]
Outcome = tuple[RunFolder, dict[str, Any]]


@dataclass(frozen=True)
class ListenOptions:
    """Where a server listens, and how workers authenticate."""

    listen: str | None = None
    token_file: str | None = None
    tls: bool = False
    certificate: str | None = None
    key: str | None = None
    servers: int | None = None  # how many servers share the weights; None: one, or as many as before
    elsewhere: bool = False  # whether the other servers are started by the user, on other machines
    wait: float | None = None  # seconds that all workers have to join; None: no limit

    @property
    def num_servers(self) -> int:
        return 1 if self.servers is None else self.servers


def serve(config: RunConfig, options: ListenOptions, console: Console, tell: Tell | None = None) -> Outcome:
    """Serve a new run to workers that connect over the network. `tell` is called when they can connect."""
    config = resolve(config)
    refuse_simulated(config)
    require_star(config, may_restart=tell is None)
    require_cuttable(config, options.num_servers)
    config, location = resolve_dataset(config)
    folder = RunFolder.create(config)
    with holding(folder):
        return folder, _keep_serving(_ServeOrder(config, folder, location, options, console, tell, resume=False))


def serve_again(
    path: Path, options: ListenOptions, console: Console, upkeep: dict[str, Any] | None = None, tell: Tell | None = None
) -> Outcome:
    """Resume serving a run at its address of before, with new settings `upkeep` about its files. Workers reconnect."""
    folder = RunFolder.open(path)
    config = dataclasses.replace(folder.config(), **(upkeep or {}))
    check_names(config)
    folder.require_unfinished()
    require_star(config, may_restart=tell is None)
    if options.listen is None:
        options = dataclasses.replace(options, listen=_address_before(folder))
    if options.servers is None:
        options = dataclasses.replace(options, servers=1 + len(folder.served().get("shards", ())))
    require_cuttable(config, options.num_servers)
    with folder.locked():
        order = _ServeOrder(config, folder, locate_data(config), options, console, tell, resume=True)
        return folder, _keep_serving(order)


def _address_before(folder: RunFolder) -> str:
    before = folder.served()
    if "address" not in before:
        raise UserError(f"{folder.path} was not served before: say where with --listen HOST:PORT")
    return str(before["address"])


def require_star(config: RunConfig, may_restart: bool) -> None:
    """Raise UserError unless a server can serve this run to other machines.

    `--restart` is refused if this process also starts the workers: a restart would replace it.
    """
    require_feature(config, Feature.SERVER)
    if config.device != "cpu":
        raise UserError(f"--device {config.device}: workers that come over the network compute on CPUs; leave it out")
    if config.faults is not None:
        raise UserError(f"--faults {config.faults}: processes of other machines are not ours to kill; leave it out")
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
        listen = _address_before(folder) if again else order.options.listen
        options = dataclasses.replace(order.options, listen=listen)
        with console:
            _serve(dataclasses.replace(order, options=options, tell=None, resume=order.resume or again))

    def lost(what: str) -> ServerLost | None:
        return ServerLost(what, folder.resume_hint(config)) if folder.has_log else None

    for number, what in enumerate(keep_going(live, config.restart, lost), start=1):
        console.note(f"{what}: going on from what its folder holds (restart {number} of {config.restart})")
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
    address = options.listen or LOOPBACK
    token, tls = _token(options, parse_address(address)[0], folder, console), _tls(options, folder, console)
    listener = Listener(address, token, tls)
    dataset = load(location, report=console.report) if location is not None else None
    line = ForegroundChannel(console.report)
    facts = {**provenance(config, location), "servers": options.num_servers}
    with ShardProcesses(options.num_servers - 1, options.elsewhere, listener, token, tls) as shards:
        peers = shards.make_peers()
        host = make_host(config, dataset, folder, console.report, peers, facts, resume)
        assert host.work is not None
        if not resume:
            for warning in startup_warnings(config, location):
                console.note(warning)
        service = shards.service(host, peers, line, console, options.wait)
        known = {"address": listener.address, "pid": os.getpid(), "by_hand": tell is None, **shards.known}
        write_atomically(folder.server_file, to_json(seal(known)).encode())
        host_name, port = parse_address(listener.address)
        how = f": workers connect to port {port} of this machine" if host_name in ANYWHERE else ""
        console.note(f"serving at {listener.address}{how}")
        with stop_signals(console.report, line.stop):
            if tell is not None:
                tell(Listening(listener.address, line.stop))
            with torch.inference_mode():
                service.run()
            result = host.finish()
        shards.end()
        service.observers.end()
    host.close()
    listener.close()
    require_survivors(result, folder)
    return result


def _tls(options: ListenOptions, folder: RunFolder, console: Console) -> Tls | None:
    if not options.tls:
        return None
    cert, key = options.certificate, options.key
    files = (Path(cert), Path(key)) if cert is not None and key is not None else make_certificate(folder.path / "tls")
    tls = server_tls(*files)
    console.note(f"TLS: workers may check --fingerprint {tls.fingerprint}")
    return tls


def _token(options: ListenOptions, host: str, folder: RunFolder, console: Console) -> bytes:
    """The given token, else the run's earlier one, else none on loopback and a new one on other interfaces."""
    given = _read_token(options.token_file)
    if given is not None:
        return given
    if folder.token_file.exists():
        return _read_token(str(folder.token_file)) or b""
    if is_loopback(host):
        return b""
    token = make_token()
    folder.token_file.touch(mode=0o600)
    folder.token_file.write_bytes(token + b"\n")
    console.note(f"token for workers, shown once: {token.decode()} (kept in {folder.token_file})")
    return token


def join_server(options: ConnectOptions, console: Console) -> bool:
    """Work for a server until its run is over. Return False if the server is gone before that."""
    parse_address(options.connect)
    token = token_of(options)
    if options.threads is not None and options.threads < 1:
        raise UserError(f"--threads {options.threads}: a worker needs at least one")
    if options.overlap < 0:
        raise UserError(f"--overlap {options.overlap}: write how many further workers this process is, 0 or more")
    _require_device(options.device)
    from paceline.runtimes.cluster.worker import ServerAddress, WorkerOptions, work

    server = ServerAddress(options.connect, token, tls_of(options), options.patience)
    own = WorkerOptions(options.data_dir, options.threads, options.worker, options.overlap, options.device)
    ended = work(server, own, _load, console.note)
    if not ended:
        console.note(f"the server at {options.connect} is gone and did not come back within {options.patience:g} s")
    return ended


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
    return serve_part(options.connect, listen, token, tls_of(options), options.patience, once, console)


def _load(config: RunConfig) -> Dataset | None:
    location = locate_data(config)
    return load(location) if location is not None else None
