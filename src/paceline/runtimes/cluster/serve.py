"""`paceline server` and `paceline worker`: a run whose workers come over the network."""

from __future__ import annotations

import dataclasses
import json
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


def serve(
    config: RunConfig, entrance: ListenOptions, console: Console, tell: Tell | None = None
) -> tuple[RunFolder, dict[str, Any]]:
    """Serve a new run to workers that come over the network; `tell` is called once they can connect."""
    config = resolve(config)
    refuse_simulated(config)
    require_star(config)
    require_cuttable(config, entrance.num_servers)
    if tell is not None:
        refuse_restarts(config)
    config, location = resolve_dataset(config)
    folder = RunFolder.create(config)
    with holding(folder):
        return folder, _keep_serving(_ServeOrder(config, folder, location, entrance, console, tell, resume=False))


def serve_again(
    path: Path,
    entrance: ListenOptions,
    console: Console,
    upkeep: dict[str, Any] | None = None,
    tell: Tell | None = None,
) -> tuple[RunFolder, dict[str, Any]]:
    """Resume serving a run at the address where it was served before; its workers reconnect by themselves.

    `upkeep` are settings about the run's files that change from here on.
    """
    folder = RunFolder.open(path)
    config = dataclasses.replace(folder.config(), **(upkeep or {}))
    check_names(config)
    folder.require_unfinished()
    require_star(config)
    if tell is not None:
        refuse_restarts(config)
    if entrance.listen is None:
        entrance = dataclasses.replace(entrance, listen=_address_before(folder))
    if entrance.servers is None:
        entrance = dataclasses.replace(entrance, servers=1 + len(folder.served().get("shards", ())))
    require_cuttable(config, entrance.num_servers)
    with folder.locked():
        order = _ServeOrder(config, folder, locate_data(config), entrance, console, tell, resume=True)
        return folder, _keep_serving(order)


def refuse_restarts(config: RunConfig) -> None:
    """Refuse `--restart` if this process also starts the workers: a restart would replace it."""
    if config.restart:
        raise UserError(
            f"--restart {config.restart} is for 'paceline server' and for runs on one machine: leave it out here, and "
            "go on with 'paceline resume'; under --engine ray the server is started again anyway"
        )


def _address_before(folder: RunFolder) -> str:
    before = folder.served()
    if "address" not in before:
        raise UserError(f"{folder.path} was not served before: say where with --listen HOST:PORT")
    return str(before["address"])


def require_star(config: RunConfig) -> None:
    require_feature(config, Feature.SERVER)
    if config.device != "cpu":
        raise UserError(f"--device {config.device}: workers that come over the network compute on CPUs; leave it out")
    if config.faults is not None:
        raise UserError(f"--faults {config.faults}: processes of other machines are not ours to kill; leave it out")


@dataclass(frozen=True)
class _ServeOrder:
    """One run to be served, and how."""

    config: RunConfig
    folder: RunFolder
    location: Location | None
    entrance: ListenOptions
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
        door = order.entrance
        door = dataclasses.replace(door, listen=_address_before(folder)) if again else door
        with console:
            _serve(dataclasses.replace(order, entrance=door, tell=None, resume=order.resume or again))

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
    from paceline.transports.listener import Listener

    keep_freed_memory()
    raise_file_limit()
    config, folder, location, entrance = order.config, order.folder, order.location, order.entrance
    console, tell, resume = order.console, order.tell, order.resume
    token = _token(entrance, parse_address(entrance.listen or LOOPBACK)[0], folder, console)
    tls = _tls(entrance, folder, console)
    listener = Listener(entrance.listen or LOOPBACK, token, tls)
    dataset = load(location, report=console.report) if location is not None else None
    line = ForegroundChannel(console.report)
    facts = {**provenance(config, location), "servers": entrance.num_servers}
    with ShardProcesses(entrance.num_servers - 1, entrance.elsewhere, listener, token, tls) as retinue:
        peers = retinue.make_peers()
        host = make_host(config, dataset, folder, console.report, peers, facts, resume)
        assert host.work is not None
        if not resume:
            for warning in startup_warnings(config, location, host.work.skew):
                console.note(warning)
        service = retinue.service(host, peers, line, console, entrance.wait)
        known = {"address": listener.address, "pid": os.getpid(), "by_hand": tell is None, **retinue.known}
        write_atomically(folder.server_file, json.dumps(known).encode())
        console.note(_where(listener.address))
        with stop_signals(console.report, line.stop):
            if tell is not None:
                tell(Listening(listener.address, line.stop))
            with torch.inference_mode():
                service.run()
            result = host.finish()
        retinue.end()
        service.observers.end()
    host.close()
    listener.close()
    require_survivors(result, folder)
    return result


def _where(address: str) -> str:
    host, port = parse_address(address)
    return f"serving at {address}" + (f": workers connect to port {port} of this machine" if host in ANYWHERE else "")


def _tls(entrance: ListenOptions, folder: RunFolder, console: Console) -> Tls | None:
    if not entrance.tls:
        return None
    if entrance.certificate is not None and entrance.key is not None:
        files = Path(entrance.certificate), Path(entrance.key)
    else:
        files = make_certificate(folder.path / "tls")
    tls = server_tls(*files)
    console.note(f"TLS: workers may check --fingerprint {tls.fingerprint}")
    return tls


def _token(entrance: ListenOptions, host: str, folder: RunFolder, console: Console) -> bytes:
    """The given token, else the run's earlier one, else none on loopback and a new one on other interfaces."""
    given = _read_token(entrance.token_file)
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


def join_server(visitor: ConnectOptions, console: Console) -> bool:
    """Work for a server until its run is over; False if the server is gone before that."""
    parse_address(visitor.connect)
    token = token_of(visitor)
    if visitor.threads is not None and visitor.threads < 1:
        raise UserError(f"--threads {visitor.threads}: a worker needs at least one")
    if visitor.overlap < 0:
        raise UserError(f"--overlap {visitor.overlap}: write how many further workers this process is, 0 or more")
    _require_device(visitor.device)
    from paceline.runtimes.cluster.worker import ServerAddress, WorkerOptions, work

    connection = ServerAddress(visitor.connect, token, tls_of(visitor), visitor.patience)
    options = WorkerOptions(visitor.data_dir, visitor.threads, visitor.worker, visitor.overlap, visitor.device)
    ended = work(connection, options, _load, console.note)
    if not ended:
        console.note(f"the server at {visitor.connect} is gone and did not come back within {visitor.patience:g} s")
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


def join_as_shard(visitor: ConnectOptions, listen: str | None, once: bool, console: Console) -> bool:
    """Serve a part of a run until it is over; False if its first server is gone before that."""
    token = token_of(visitor)
    return serve_part(visitor.connect, listen, token, tls_of(visitor), visitor.patience, once, console)


def _load(config: RunConfig) -> Dataset | None:
    location = locate_data(config)
    return load(location) if location is not None else None
