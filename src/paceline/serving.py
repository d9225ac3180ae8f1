"""`paceline server` and `paceline worker`: a run whose workers come over the network."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.assemble import check_names, on_ring, parse_strategy, resolve
from paceline.config import RunConfig
from paceline.data.datasets import Dataset, Location, load
from paceline.errors import ServerLost, UserError
from paceline.launch import (
    facts_of,
    hint,
    holding,
    locate_data,
    refuse_imagined,
    require_survivors,
    settle_data,
    stop_signals,
)
from paceline.reports.console import Console
from paceline.runs.folder import RunFolder, write_atomically
from paceline.transports.auth import make_token, read_token
from paceline.transports.connection import is_loopback, parse_address
from paceline.transports.tls import Tls, make_certificate, server_tls, worker_tls

if TYPE_CHECKING:
    from paceline.transports.listener import Listener

LOOPBACK = "127.0.0.1:0"


@dataclass(frozen=True)
class Entrance:
    """Where a server listens, and what a worker must show there."""

    listen: str | None = None
    token_file: str | None = None
    tls: bool = False
    certificate: str | None = None
    key: str | None = None


def serve(config: RunConfig, entrance: Entrance, console: Console) -> tuple[RunFolder, dict[str, Any]]:
    """Serve a new run to workers that come over the network."""
    config = resolve(config)
    refuse_imagined(config)
    _require_star(config)
    config, location = settle_data(config)
    folder = RunFolder.create(config)
    with holding(folder):
        return folder, _keep_serving(config, folder, location, entrance, console, resume=False)


def serve_again(
    path: Path, entrance: Entrance, console: Console, upkeep: dict[str, Any] | None = None
) -> tuple[RunFolder, dict[str, Any]]:
    """Go on serving a run whose server ended, where it was served before: its workers find back by themselves.

    `upkeep` are settings about the run's files that are to be others from here on.
    """
    folder = RunFolder.open(path)
    config = dataclasses.replace(folder.config(), **(upkeep or {}))
    check_names(config)
    result = folder.result()
    if result is not None and result["status"] != "stopped":
        raise UserError(f"{path} is {result['status']} after {result['updates']} updates: there is nothing to resume")
    _require_star(config)
    if entrance.listen is None:
        entrance = dataclasses.replace(entrance, listen=_address_before(folder))
    with folder.locked():
        return folder, _keep_serving(config, folder, locate_data(config), entrance, console, resume=True)


def _address_before(folder: RunFolder) -> str:
    try:
        return str(json.loads(folder.server_file.read_text())["address"])
    except (OSError, ValueError, KeyError):
        raise UserError(f"{folder.path} was not served before: say where with --listen HOST:PORT") from None


def _require_star(config: RunConfig) -> None:
    if on_ring(config) or parse_strategy(config.strategy).name == "classic":
        raise UserError(f"--strategy {config.strategy} has no server: choose sync, async, bounded:S or backup:B")
    if config.device != "cpu":
        raise UserError(f"--device {config.device}: workers that come over the network compute on CPUs; leave it out")
    if config.faults is not None:
        raise UserError(f"--faults {config.faults}: processes of other machines are not ours to kill; leave it out")


def _keep_serving(
    config: RunConfig,
    folder: RunFolder,
    location: Location | None,
    entrance: Entrance,
    console: Console,
    resume: bool,
) -> dict[str, Any]:
    """Serve in this process, or with `--restart` in others that replace each other at the same address."""
    if not config.restart:
        return _serve(config, folder, location, entrance, console, resume)
    from paceline.runtimes.keeper import keep_going

    def live(again: bool) -> None:
        door = dataclasses.replace(entrance, listen=_address_before(folder)) if again else entrance
        with console:
            _serve(config, folder, location, door, console, resume or again)

    def lost(what: str) -> ServerLost | None:
        way_on = f"'paceline server --resume {folder.path}' goes on from there"
        return ServerLost(what, way_on) if folder.arrivals_file.exists() else None

    for number, what in enumerate(keep_going(live, config.restart, lost), start=1):
        console.note(f"{what}: going on from what its folder holds (restart {number} of {config.restart})")
    result = folder.result()
    assert result is not None, f"{folder.path} holds no result although its server finished"
    return result


def _serve(
    config: RunConfig,
    folder: RunFolder,
    location: Location | None,
    entrance: Entrance,
    console: Console,
    resume: bool,
) -> dict[str, Any]:
    import torch

    from paceline.crew import identity_of, sizes_of
    from paceline.runtimes.allocator import keep_freed_memory
    from paceline.runtimes.cluster_server import ClusterService, OwnLine
    from paceline.runtimes.server_process import allow_many_files, make_host

    keep_freed_memory()
    allow_many_files()
    listener = _open(entrance, folder, console)
    dataset = load(location, report=console.report) if location is not None else None
    line = OwnLine(console.report)
    host = make_host(config, dataset, folder, console.report, facts_of(config, location), resume)
    assert host.task is not None and host.work is not None
    if not resume:
        hint(config, location, console, host.work.skew)
    largest = sizes_of(config, host.task, host.work)
    service = ClusterService(host, line, identity_of(host.task), largest, listener)
    write_atomically(folder.server_file, json.dumps({"address": listener.address, "pid": os.getpid()}).encode())
    console.note(_where(listener.address))
    with stop_signals(console, line.stop):
        with torch.inference_mode():
            service.run()
        result = host.finish()
    host.close()
    listener.close()
    require_survivors(result, folder)
    return result


def _where(address: str) -> str:
    host, port = parse_address(address)
    anywhere = host in ("0.0.0.0", "::")
    return f"serving at {address}" + (f": workers connect to port {port} of this machine" if anywhere else "")


def _open(entrance: Entrance, folder: RunFolder, console: Console) -> Listener:
    """Listen; off loopback only with a token, which is made and shown once where none is given."""
    from paceline.transports.listener import Listener

    address = entrance.listen or LOOPBACK
    token = _token(entrance, parse_address(address)[0], folder, console)
    return Listener(address, token, _tls(entrance, folder, console))


def _tls(entrance: Entrance, folder: RunFolder, console: Console) -> Tls | None:
    if not entrance.tls:
        return None
    if entrance.certificate is not None and entrance.key is not None:
        files = Path(entrance.certificate), Path(entrance.key)
    else:
        files = make_certificate(folder.path / "tls")
    tls = server_tls(*files)
    console.note(f"TLS: workers may check --fingerprint {tls.fingerprint}")
    return tls


def _token(entrance: Entrance, host: str, folder: RunFolder, console: Console) -> bytes:
    """What was given; else what the run had before; else nothing on loopback, and a new one elsewhere."""
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


def _read_token(file: str | None) -> bytes | None:
    return read_token(Path(file) if file is not None else None, os.environ)


@dataclass(frozen=True)
class Visitor:
    """How a worker finds its server and shows that it may come, and what it decides itself."""

    connect: str
    token_file: str | None = None
    tls: bool = False
    fingerprint: str | None = None
    ca: str | None = None
    patience: float = 300.0
    data_dir: str | None = None
    threads: int | None = None
    worker: int | None = None
    overlap: int = 0


def join_server(visitor: Visitor, console: Console) -> bool:
    """Work for a server until it is over; False where it went away before."""
    parse_address(visitor.connect)
    token = _read_token(visitor.token_file) or b""
    if visitor.threads is not None and visitor.threads < 1:
        raise UserError(f"--threads {visitor.threads}: a worker needs at least one")
    if visitor.overlap < 0:
        raise UserError(f"--overlap {visitor.overlap}: write how many further workers this process is, 0 or more")
    from paceline.runtimes.cluster_worker import Connection, Own, work

    authorities = Path(visitor.ca) if visitor.ca is not None else None
    tls = worker_tls(visitor.fingerprint, authorities) if visitor.tls or visitor.fingerprint or authorities else None
    connection = Connection(visitor.connect, token, tls, visitor.patience)
    own = Own(visitor.data_dir, visitor.threads, visitor.worker, visitor.overlap)
    ended = work(connection, own, _load, console.note)
    if not ended:
        console.note(f"the server at {visitor.connect} is gone and did not come back within {visitor.patience:g} s")
    return ended


def _load(config: RunConfig) -> Dataset | None:
    location = locate_data(config)
    return load(location) if location is not None else None
