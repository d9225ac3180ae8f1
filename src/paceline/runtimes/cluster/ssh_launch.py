"""`paceline train` and `resume --hosts FILE`: this machine serves, and the hosts of a file work, started over ssh."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import errors
from paceline.config import RunConfig, is_script
from paceline.data.datasets import resolve_dataset
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.folder import ALL_GONE, RunFolder
from paceline.runs.recording import ScriptCall
from paceline.runtimes.cluster.credentials import ListenOptions
from paceline.runtimes.cluster.host_probe import code_digest, find_file
from paceline.runtimes.cluster.hosts_file import HostLine, Requirements, num_workers, read_hosts
from paceline.runtimes.cluster.serve import Listening, Outcome, Tell, require_star, serve, serve_again
from paceline.runtimes.cluster.ssh import CheckedHost, RemoteWorkers, check_hosts, settle
from paceline.runtimes.scripts.launch import settings_of_script
from paceline.settings.resolve import resolve
from paceline.system.environment import package_version
from paceline.transports.auth import TOKEN_VARIABLE, make_token
from paceline.transports.connection import ANYWHERE, format_address, parse_address


@dataclass(frozen=True)
class HostOptions:
    """The user's options for a run on hosts."""

    file: str
    listen: str | None = None
    skip_failed: bool = False
    tls: bool | None = None


@dataclass(frozen=True)
class HostPlan:
    """The hosts of a run, and where its server listens."""

    ready: list[CheckedHost]
    listen: ListenOptions
    data_dir: str | None


def train_on_hosts(
    config: RunConfig, hosts: HostOptions, console: Console, command: list[str] | None = None
) -> Outcome:
    """Check every host, serve here, and start the workers of all hosts; they run `command` if it is given."""
    lines = read_hosts(Path(hosts.file))
    total = num_workers(lines)
    if config.workers not in (None, total):
        what = f"--workers {config.workers}, but {hosts.file} lists {total}"
        raise UserError(f"{what}: leave --workers out, or correct workers=")
    asked = replace(config, workers=total)
    resolved = resolve(asked) if command is None else settings_of_script(asked, command)[0]
    plan = _plan(resolved, config.threads, hosts, lines, console, command)
    config = replace(config, workers=num_workers([checked.host for checked in plan.ready]))
    return _work(plan, console, lambda start: serve(config, plan.listen, console, start, command))


def resume_on_hosts(path: Path, hosts: HostOptions, console: Console, upkeep: dict[str, Any] | None = None) -> Outcome:
    """Resume a run on the same number of workers. The hosts may be others than before."""
    config, lines = RunFolder.open(path).config(), read_hosts(Path(hosts.file))
    if num_workers(lines) != config.workers:
        what = f"{path} has {config.workers} workers, and {hosts.file} lists {num_workers(lines)}"
        raise UserError(f"{what}: list as many")
    command = ScriptCall.load(RunFolder.open(path)).command if is_script(config) else None
    plan = _plan(config, None, hosts, lines, console, command)
    return _work(plan, console, lambda start: serve_again(path, plan.listen, console, upkeep, start))


def _plan(
    config: RunConfig,
    threads: int | None,
    hosts: HostOptions,
    lines: list[HostLine],
    console: Console,
    command: list[str] | None,
) -> HostPlan:
    """Check that every host has what it needs and reaches this machine."""
    require_star(config, may_restart=False)
    wanted = _wanted(config, command)
    with _bound(hosts, lines) as probe:
        host, port = probe.getsockname()[:2]
        console.note(f"looking at {len(lines)} host{'s' if len(lines) > 1 else ''}")
        reachable = None if host in ANYWHERE else host, port
        found = check_hosts(lines, wanted, config, threads, reachable, console.note)
    ready = settle(*found, hosts.skip_failed, console.note)
    return HostPlan(ready, ListenOptions(format_address((host, port)), tls=hosts.tls), config.data_dir)


def _work(plan: HostPlan, console: Console, serving: Callable[[Tell], Outcome]) -> Outcome:
    """Serve, and start the workers of all hosts when the server listens. They read the token from their pipes."""
    token = os.environ.setdefault(TOKEN_VARIABLE, make_token().decode())
    workers = RemoteWorkers(console.note)

    def start(server: Listening) -> None:
        more = ["--tls" if server.tls else "--plain"]
        workers.start(plan.ready, token, plan.data_dir, more, lambda: server.stop(ALL_GONE))

    try:
        outcome = serving(start)
    except BaseException:
        workers.close(grace=0.0)
        raise
    workers.close()
    return outcome


def _bound(hosts: HostOptions, lines: list[HostLine]) -> socket.socket:
    """Listen in the server's place while hosts try to connect. The server takes this port later."""
    address = hosts.listen or ("127.0.0.1:0" if all(line.is_here for line in lines) else "0.0.0.0:0")
    host, port = parse_address(address)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--listen {address} is not possible here ({error.strerror}): choose another address") from None


def _wanted(config: RunConfig, command: list[str] | None) -> Requirements:
    """What this machine has, to compare hosts with it."""
    config, location = resolve_dataset(config) if command is None else (config, None)
    data = {"name": config.dataset, "sample": location.sample} if location is not None else None
    task = None
    if command is not None:
        task = {"kind": "script", "file": command[0], "digest": find_file(command[0]) or ""}
    elif config.task is not None and ".py:" in config.task:
        file = config.task.rpartition(":")[0]
        digest = find_file(file)
        if digest is None:
            raise UserError(f"--task {config.task}: there is no file {file} here")
        task = {"kind": "task's file", "file": file, "digest": digest}
    code = code_digest(Path(errors.__file__).parent)
    return Requirements(package_version("paceline"), package_version("torch"), code, data, task)
