"""A star whose processes a launcher started: the first of them serves, every other one is a worker.

The first tells the others where it serves and what they must know there: under torchrun through its store, under Slurm
through files that only the user can read.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.errors import PacelineError, RunFailed, UserError
from paceline.reports.console import Console
from paceline.runs.folder import RunFolder
from paceline.runtimes.cluster.serve import Listening, ListenOptions, join_server, serve
from paceline.settings.ranks import Rank
from paceline.transports.auth import TOKEN_VARIABLE, ConnectOptions, make_token
from paceline.transports.connection import parse_address
from paceline.transports.rendezvous import FileRendezvous, RendezvousStore

START_SECONDS = 300.0
RESULT_SECONDS = 600.0
LINGER_SECONDS = 10.0


def train_as_rank_of_star(
    config: RunConfig, rank: Rank, console: Console, tls: bool = False
) -> tuple[RunFolder, dict[str, Any]]:
    """Serve, or work for the first rank; every rank is told what came of it."""
    board = _board(config, rank)
    with contextlib.closing(board):
        return _lead(config, rank, board, console, tls) if rank.leads else _follow(config, rank, board, console)


def _board(config: RunConfig, rank: Rank) -> RendezvousStore:
    if rank.step is not None:
        return FileRendezvous(Path(config.runs), rank.step, rank.leads)
    from paceline.runtimes.ring.process_group import ProcessGroup

    return ProcessGroup(rank)


def _lead(
    config: RunConfig, rank: Rank, board: RendezvousStore, console: Console, tls: bool
) -> tuple[RunFolder, dict[str, Any]]:
    known = TOKEN_VARIABLE in os.environ  # then the others know it too, and it need not travel
    token = os.environ.setdefault(TOKEN_VARIABLE, make_token().decode())
    launcher = "srun" if rank.step is not None else "torchrun"
    many = "1 worker" if config.workers == 1 else f"{config.workers} workers"
    console.note(f"{launcher} started {rank.size} processes (world size {rank.size}): rank 0 serves {many}")

    def tell(server: Listening) -> None:
        where = f"{_own_name(rank)}:{parse_address(server.address)[1]}"
        board.tell("server", {"address": where, "token": None if known else token, "tls": tls})

    listen = "127.0.0.1:0" if rank.is_alone else "0.0.0.0:0"
    try:
        folder, result = serve(config, ListenOptions(listen, tls=tls), console, tell)
    except BaseException as error:
        _tell_failure(rank, board, error)
        raise
    board.tell("result", {"result": result, "folder": str(folder.path)})
    _linger(rank, board)
    return folder, result


def _tell_failure(rank: Rank, board: RendezvousStore, error: BaseException) -> None:
    """Nobody waits for a server that will not be, whatever the reason."""
    word = {"failed": str(error) or type(error).__name__}
    with contextlib.suppress(OSError, RuntimeError, PacelineError):
        board.tell("server", word)
        board.tell("result", word)
        _linger(rank, board)


def _own_name(rank: Rank) -> str:
    """What the other ranks call this machine."""
    if rank.is_alone:
        return "127.0.0.1"
    if rank.step is not None:
        return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return address_towards(rank.address, rank.port)


def address_towards(host: str, port: int) -> str:
    """The address of this machine on its way to another; nothing is sent.

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


def _linger(rank: Rank, board: RendezvousStore) -> None:
    """Until everybody has heard, or is not there any more: the board goes with its keeper."""
    for number in range(1, rank.size):
        if board.wait_for(f"heard/{number}", LINGER_SECONDS) is None:
            return


def _follow(
    config: RunConfig, rank: Rank, board: RendezvousStore, console: Console
) -> tuple[RunFolder, dict[str, Any]]:
    word = board.wait_for("server", START_SECONDS)
    if word is None:
        where = ""
        if isinstance(board, FileRendezvous):
            where = f" (looked in {board.path}; --runs DIR must be on a file system that all nodes share)"
        raise RunFailed(f"rank {rank.number} was not told within {START_SECONDS:g} s where rank 0 serves{where}")
    try:
        if "failed" not in word:
            if word["token"] is not None:
                os.environ[TOKEN_VARIABLE] = word["token"]
            where, worker = word["address"], rank.number - 1
            visitor = ConnectOptions(
                where, None, word["tls"], data_dir=config.data_dir, threads=config.threads, worker=worker
            )
            if not join_server(visitor, console):
                raise RunFailed(f"rank {rank.number} lost the server of rank 0: its own output says why")
            word = board.wait_for("result", RESULT_SECONDS)
    finally:
        with contextlib.suppress(OSError, PacelineError):
            board.tell(f"heard/{rank.number}", {})
    if word is None or "failed" in word:
        why = word["failed"] if word is not None else f"nothing more was heard within {RESULT_SECONDS:g} s"
        raise RunFailed(f"rank 0, which serves, failed: {why}")
    return RunFolder(Path(word["folder"])), word["result"]
