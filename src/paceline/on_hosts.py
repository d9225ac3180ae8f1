"""`paceline train --hosts FILE`: this machine serves, the hosts of a file work, started over ssh.

The run's folder, its progress and Ctrl-C stay where the command was typed, and no host needs more than a worker does.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.assemble import resolve
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.host_checks import Wanted
from paceline.hosts import HostLine, num_workers, read_hosts
from paceline.launch import settle_data
from paceline.ranks import rank_here
from paceline.reports.console import Console
from paceline.runs.environment import package_version
from paceline.runs.folder import ALL_GONE, RunFolder
from paceline.runtimes.host_probe import code_digest, find_file
from paceline.runtimes.remote_hosts import Ready, RemoteWorkers, check_hosts, settle
from paceline.serving import Entrance, Opened, require_star, serve
from paceline.transports.auth import VARIABLE, make_token
from paceline.transports.connection import format_address, parse_address

WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Hosts:
    """What the user says of them."""

    file: str
    listen: str | None = None
    skip_failed: bool = False
    tls: bool = False


def train_on_hosts(config: RunConfig, hosts: Hosts, console: Console) -> tuple[RunFolder, dict[str, Any]]:
    """Look at every host, serve here, and let all of them work."""
    if rank_here() is not None:
        raise UserError(f"--hosts {hosts.file} starts its own workers: leave the launcher (torchrun, srun) out")
    lines = read_hosts(Path(hosts.file))
    total = num_workers(lines)
    if config.workers not in (None, total):
        raise UserError(
            f"--workers {config.workers}, but {hosts.file} lists {total}: leave --workers out, or correct workers="
        )
    settled = resolve(replace(config, workers=total))
    require_star(settled)
    wanted, data_dir = _wanted(settled), settled.data_dir
    with _bound(hosts, lines) as probe:
        host, port = probe.getsockname()[:2]
        seen = None if host in WILDCARDS else host
        console.note(f"looking at {len(lines)} host{'s' if len(lines) > 1 else ''}")
        found = check_hosts(lines, wanted, data_dir, config.threads, (seen, port), console.note)
    ready = settle(*found, hosts.skip_failed, console.note)
    os.environ.setdefault(VARIABLE, make_token().decode())  # the server reads it there; workers get it by their pipes
    config = replace(config, workers=sum(place.host.workers for place in ready))
    entrance = Entrance(format_address((host, port)), tls=hosts.tls)
    return _train(config, entrance, ready, data_dir, console)


def _train(
    config: RunConfig, entrance: Entrance, ready: list[Ready], data_dir: str | None, console: Console
) -> tuple[RunFolder, dict[str, Any]]:
    workers = RemoteWorkers(console.note)

    def start(server: Opened) -> None:
        more = ["--tls"] if entrance.tls else []
        workers.start(ready, os.environ[VARIABLE], data_dir, more, lambda: server.stop(ALL_GONE))

    try:
        folder, result = serve(config, entrance, console, start)
    except BaseException:
        workers.close(grace=0.0)
        raise
    workers.close()
    return folder, result


def _bound(hosts: Hosts, lines: list[HostLine]) -> socket.socket:
    """A listener in the server's place while hosts try whether they get through; its port is the server's then."""
    off_machine = "0.0.0.0:0" if any(not line.is_here for line in lines) else "127.0.0.1:0"
    asked = hosts.listen or off_machine
    host, port = parse_address(asked)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--listen {asked} is not possible here ({error.strerror}): choose another address") from None


def _wanted(config: RunConfig) -> Wanted:
    """What this machine has, so that hosts can be compared with it."""
    config, location = settle_data(config)
    data = {"name": config.dataset, "sample": location.sample} if location is not None else None
    task = None
    if config.task is not None and ".py:" in config.task:
        file = config.task.rpartition(":")[0]
        digest = find_file(file)
        if digest is None:
            raise UserError(f"--task {config.task}: there is no file {file} here")
        task = {"file": file, "digest": digest}
    code = code_digest(Path(__file__).parent)
    return Wanted(package_version("paceline"), package_version("torch"), code, data, task)
