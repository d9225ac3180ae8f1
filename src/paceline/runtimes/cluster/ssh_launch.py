"""`paceline train` and `resume --hosts FILE`: this machine serves, the hosts of a file work, started over ssh.

The run's folder, its progress and Ctrl-C stay where the command was typed, and no host needs more than a worker does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import errors
from paceline.config import RunConfig
from paceline.data.datasets import resolve_dataset
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.folder import ALL_GONE, RunFolder
from paceline.runtimes.cluster.host_probe import code_digest, find_file
from paceline.runtimes.cluster.hosts_file import HostLine, Requirements, num_workers, read_hosts
from paceline.runtimes.cluster.serve import (
    Listening,
    ListenOptions,
    Tell,
    refuse_restarts,
    require_star,
    serve,
    serve_again,
)
from paceline.runtimes.cluster.ssh import CheckedHost, RemoteWorkers, check_hosts, settle
from paceline.settings.resolve import resolve
from paceline.system.environment import package_version
from paceline.transports.auth import TOKEN_VARIABLE, make_token
from paceline.transports.connection import ANYWHERE, format_address, parse_address


@dataclass(frozen=True)
class HostOptions:
    """What the user says of them."""

    file: str
    listen: str | None = None
    skip_failed: bool = False
    tls: bool = False


@dataclass(frozen=True)
class HostPlan:
    """Where a run will take place: hosts that can take part, and where they find the server."""

    ready: list[CheckedHost]
    entrance: ListenOptions
    data_dir: str | None

    @property
    def num_workers(self) -> int:
        """How many workers these hosts have."""
        return sum(place.host.workers for place in self.ready)


def train_on_hosts(config: RunConfig, hosts: HostOptions, console: Console) -> tuple[RunFolder, dict[str, Any]]:
    """Look at every host, serve here, and let all of them work."""
    lines = read_hosts(Path(hosts.file))
    total = num_workers(lines)
    if config.workers not in (None, total):
        raise UserError(
            f"--workers {config.workers}, but {hosts.file} lists {total}: leave --workers out, or correct workers="
        )
    ground = _look(resolve(replace(config, workers=total)), config.threads, hosts, lines, console)
    config = replace(config, workers=ground.num_workers)
    return _work(ground, console, lambda start: serve(config, ground.entrance, console, start))


def resume_on_hosts(
    path: Path, hosts: HostOptions, console: Console, upkeep: dict[str, Any] | None = None
) -> tuple[RunFolder, dict[str, Any]]:
    """Go on with a run, on the same number of workers; the hosts may be others than before."""
    config, lines = RunFolder.open(path).config(), read_hosts(Path(hosts.file))
    if num_workers(lines) != config.workers:
        raise UserError(
            f"{path} has {config.workers} workers, and {hosts.file} lists {num_workers(lines)}: list as many"
        )
    ground = _look(config, None, hosts, lines, console)
    return _work(ground, console, lambda start: serve_again(path, ground.entrance, console, upkeep, start))


def _look(
    config: RunConfig, threads: int | None, hosts: HostOptions, lines: list[HostLine], console: Console
) -> HostPlan:
    """See that every host has what it needs and reaches this machine."""
    require_star(config)
    refuse_restarts(config)
    wanted = _wanted(config)
    with _bound(hosts, lines) as probe:
        host, port = probe.getsockname()[:2]
        seen = None if host in ANYWHERE else host
        console.note(f"looking at {len(lines)} host{'s' if len(lines) > 1 else ''}")
        found = check_hosts(lines, wanted, config.data_dir, threads, (seen, port), console.note)
    ready = settle(*found, hosts.skip_failed, console.note)
    return HostPlan(ready, ListenOptions(format_address((host, port)), tls=hosts.tls), config.data_dir)


def _work(
    ground: HostPlan, console: Console, serving: Callable[[Tell], tuple[RunFolder, dict[str, Any]]]
) -> tuple[RunFolder, dict[str, Any]]:
    """Serve, and have all hosts work from when the server listens until it is over."""
    os.environ.setdefault(
        TOKEN_VARIABLE, make_token().decode()
    )  # the server reads it there; workers get it by their pipes
    workers = RemoteWorkers(console.note)

    def start(server: Listening) -> None:
        more = ["--tls"] if ground.entrance.tls else []
        workers.start(ground.ready, os.environ[TOKEN_VARIABLE], ground.data_dir, more, lambda: server.stop(ALL_GONE))

    try:
        folder, result = serving(start)
    except BaseException:
        workers.close(grace=0.0)
        raise
    workers.close()
    return folder, result


def _bound(hosts: HostOptions, lines: list[HostLine]) -> socket.socket:
    """A listener in the server's place while hosts try whether they get through; its port is the server's then."""
    off_machine = "0.0.0.0:0" if any(not line.is_here for line in lines) else "127.0.0.1:0"
    asked = hosts.listen or off_machine
    host, port = parse_address(asked)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--listen {asked} is not possible here ({error.strerror}): choose another address") from None


def _wanted(config: RunConfig) -> Requirements:
    """What this machine has, so that hosts can be compared with it."""
    config, location = resolve_dataset(config)
    data = {"name": config.dataset, "sample": location.sample} if location is not None else None
    task = None
    if config.task is not None and ".py:" in config.task:
        file = config.task.rpartition(":")[0]
        digest = find_file(file)
        if digest is None:
            raise UserError(f"--task {config.task}: there is no file {file} here")
        task = {"file": file, "digest": digest}
    code = code_digest(Path(errors.__file__).parent)
    return Requirements(package_version("paceline"), package_version("torch"), code, data, task)
