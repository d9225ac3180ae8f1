"""A star whose processes a launcher started: rank 0 serves, and publishes its address and token; the others work."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import replace
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import PacelineError, RunFailed, UserError
from paceline.reports.console import Console
from paceline.runs.folder import RunFolder
from paceline.runtimes.cluster.credentials import ListenOptions
from paceline.runtimes.cluster.join import join_server, script_worker
from paceline.runtimes.cluster.serve import Listening, Outcome, serve
from paceline.settings.ranks import Rank
from paceline.transports.auth import TOKEN_VARIABLE, ConnectOptions, make_token
from paceline.transports.connection import parse_address
from paceline.transports.rendezvous import FileRendezvous, RendezvousStore

START_SECONDS = 300.0
RESULT_SECONDS = 600.0
LINGER_SECONDS = 10.0


def train_as_rank_of_star(
    config: RunConfig, rank: Rank, console: Console, tls: bool | None = None, command: list[str] | None = None
) -> Outcome:
    """Serve as rank 0, or work for it as another rank. Every rank returns the result.

    `command` is the user's script, if the workers run one.
    """
    with contextlib.closing(_open_store(config, rank)) as store:
        if rank.leads:
            return _lead(config, rank, store, console, tls, command)
        return _follow(config, rank, store, console, command)


def _open_store(config: RunConfig, rank: Rank) -> RendezvousStore:
    """Files that only the user can read under Slurm, the launcher's store under torchrun."""
    if rank.step is not None:
        return FileRendezvous(Path(config.runs), rank.step, rank.leads)
    from paceline.runtimes.ring.process_group import ProcessGroup

    return ProcessGroup(rank)


def _lead(
    config: RunConfig,
    rank: Rank,
    store: RendezvousStore,
    console: Console,
    tls: bool | None,
    command: list[str] | None,
) -> Outcome:
    known = TOKEN_VARIABLE in os.environ  # then the other ranks have it too
    token = os.environ.setdefault(TOKEN_VARIABLE, make_token().decode())
    launcher = "srun" if rank.step is not None else "torchrun"
    many = "1 worker" if config.workers == 1 else f"{config.workers} workers"
    console.note(f"{launcher} started {rank.size} processes (world size {rank.size}): rank 0 serves {many}")

    def tell(server: Listening) -> None:
        where = f"{_own_name(rank)}:{parse_address(server.address)[1]}"
        store.tell("server", {"address": where, "token": None if known else token, "tls": server.tls})

    listen = "127.0.0.1:0" if rank.is_alone else "0.0.0.0:0"
    try:
        folder, result = serve(config, ListenOptions(listen, tls=tls), console, tell, command)
    except BaseException as error:
        failure = {"failed": str(error) or type(error).__name__}  # no rank waits for a server that will not start
        with contextlib.suppress(OSError, RuntimeError, PacelineError):
            store.tell("server", failure)
            store.tell("result", failure)
            _linger(rank, store)
        raise
    store.tell("result", {"result": result, "folder": str(folder.path)})
    _linger(rank, store)
    return folder, result


def _own_name(rank: Rank) -> str:
    """The name of this machine for the other ranks."""
    if rank.is_alone:
        return "127.0.0.1"
    if rank.step is not None:
        return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return address_towards(rank.address, rank.port)


def address_towards(host: str, port: int) -> str:
    """The address of this machine on its route to another. Nothing is sent.

    >>> address_towards("127.0.0.1", 9)
    '127.0.0.1'
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            name: str = probe.getsockname()[0]
            return name
    except OSError as error:
        raise UserError(f"the way to {host} is not known ({error.strerror}): correct MASTER_ADDR") from None


def _linger(rank: Rank, store: RendezvousStore) -> None:
    """Wait until every rank has read the result or is gone: the store ends with this process."""
    for number in range(1, rank.size):
        if store.wait_for(f"heard/{number}", LINGER_SECONDS) is None:
            return


def _run_script_to_end(options: ConnectOptions) -> bool:
    return script_worker(options).start(options.worker).wait() == 0


def _follow(
    config: RunConfig, rank: Rank, store: RendezvousStore, console: Console, command: list[str] | None
) -> Outcome:
    news = store.wait_for("server", START_SECONDS)
    if news is None:
        where = ""
        if isinstance(store, FileRendezvous):
            where = f" (looked in {store.path}; --runs DIR must be on a file system that all nodes share)"
        raise RunFailed(f"rank {rank.number} was not told within {START_SECONDS:g} s where rank 0 serves{where}")
    try:
        if "failed" not in news:
            if news["token"] is not None:
                os.environ[TOKEN_VARIABLE] = news["token"]
            where, data_dir, worker = news["address"], config.data_dir, rank.number - 1
            reached = ConnectOptions(where, None, news["tls"], data_dir=data_dir, worker=worker)
            options = replace(reached, threads=config.threads, weights=config.weights)
            if command is not None:
                options = replace(options, script=command[0], data_dir=None, weights=None)
            is_over = join_server(options, console) if command is None else _run_script_to_end(options)
            if not is_over:
                raise RunFailed(f"rank {rank.number} lost the server of rank 0: its own output says why")
            news = store.wait_for("result", RESULT_SECONDS)
    finally:
        with contextlib.suppress(OSError, PacelineError):
            store.tell(f"heard/{rank.number}", {})
    if news is None or "failed" in news:
        why = news["failed"] if news is not None else f"nothing more was heard within {RESULT_SECONDS:g} s"
        raise RunFailed(f"rank 0, which serves, failed: {why}")
    return RunFolder(Path(news["folder"])), news["result"]
