"""`paceline worker` and `paceline shard`: work for a server on any machine, or serve a part of its run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.config import RunConfig
from paceline.data.datasets import Dataset, load, locate_data
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runtimes.cluster.credentials import PLAIN_WARNING
from paceline.runtimes.sharded.processes import serve_part
from paceline.transports.auth import ConnectOptions, tls_of, token_of
from paceline.transports.connection import is_loopback, parse_address
from paceline.transports.handshake import TlsExpected
from paceline.transports.tls import Tls, worker_tls

if TYPE_CHECKING:
    from paceline.runtimes.scripts.remote.worker import WorkerCommand


def join_server(options: ConnectOptions, console: Console) -> bool:
    """Work for a server until its run is over. Return False if the server is gone before that."""
    if options.threads is not None and options.threads < 1:
        raise UserError(f"--threads {options.threads}: a worker needs at least one")
    if options.overlap < 0:
        raise UserError(f"--overlap {options.overlap}: write how many further workers this process is, 0 or more")
    _require_device(options.device)
    from paceline.runtimes.cluster.worker import ServerAddress, WorkerOptions, work
    from paceline.runtimes.scripts.remote.client import StartAgain

    server = ServerAddress(options.connect, token_of(options), tls_of(options), options.patience)
    placed = options.threads, options.worker, options.overlap, options.device
    own = WorkerOptions(options.data_dir, *placed, script=options.script, weights=options.weights)
    command = script_worker(options)
    _warn_of_plain(options, console)
    try:
        return _over(options, lambda tls: work(dataclasses.replace(server, tls=tls), own, _load, console.note, command))
    except StartAgain as again:
        assert isinstance(again.code, int)
        what = f"the server was restarted or took worker {again.code} for lost"
        console.note(f"{what}: its script starts again")
        console.close()
        command.replace_process(again.code)
    return False


def script_worker(options: ConnectOptions) -> WorkerCommand:
    """The command of a process that works for a server whose run has a script."""
    from paceline.runtimes.scripts.remote.worker import WorkerCommand

    return WorkerCommand.of(worker_flags(options), token_of(options))


def worker_flags(options: ConnectOptions) -> list[str]:
    """The flags of `paceline worker` that say the same, without a number, `--overlap` and the token."""
    values = {"--connect": options.connect, "--patience": options.patience, "--threads": options.threads}
    values |= {"--fingerprint": options.fingerprint, "--ca": options.ca, "--script": options.script}
    encrypts = {True: ["--tls"], False: ["--plain"], None: []}[options.tls]
    given = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
    return [*given, *(encrypts if options.fingerprint is None and options.ca is None else [])]


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
