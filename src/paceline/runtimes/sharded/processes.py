"""The further servers of a run: started here, or awaited from elsewhere; and `paceline shard`, which is one of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.system.environment import package_version
from paceline.transports.auth import VARIABLE
from paceline.transports.connection import format_address, is_loopback, parse_address
from paceline.transports.tls import Tls, make_certificate, server_tls

if TYPE_CHECKING:
    from paceline.runtimes.server.host import Host
    from paceline.runtimes.server.remote_service import ClusterService, OwnLine
    from paceline.runtimes.sharded.peers import Shards
    from paceline.transports.listener import Listener

HERE_SECONDS, ELSEWHERE_SECONDS = 120.0, 3600.0
LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where one finds a server on this machine that listens there


class Retinue:
    """The servers beside the first. Leaving the context ends the processes that were started here."""

    def __init__(self, count: int, elsewhere: bool, listener: Listener, token: bytes, tls: Tls | None) -> None:
        self._count, self._elsewhere = count, elsewhere
        self._listener, self._token, self._tls = listener, token, tls
        self._children: list[subprocess.Popen[bytes]] = []
        self._shards: Shards | None = None

    def __enter__(self) -> Retinue:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.wait()
        if self._shards is not None:
            self._shards.close()

    def service(self, host: Host, line: OwnLine, console: Console) -> ClusterService:
        """What serves the run: alone, or with the others, which are here when this returns."""
        from paceline.assembly.run import sizes_of
        from paceline.assembly.task import identity_of
        from paceline.runtimes.server.remote_service import ClusterService

        assert host.task is not None and host.work is not None
        expected, largest = identity_of(host.task), sizes_of(host.config, host.task, host.work)
        if not self._count:
            return ClusterService(host, line, expected, largest, self._listener)
        from paceline.runtimes.sharded.coordinator import ShardedService
        from paceline.runtimes.sharded.peers import Shards, muster

        if self._elsewhere:
            console.note(f"waiting for {self._count} x 'paceline shard --connect {self._listener.address}'")
        else:
            self._children = [self._start() for _ in range(self._count)]
        seconds = ELSEWHERE_SECONDS if self._elsewhere else HERE_SECONDS
        applicants, workers = muster(self._listener, self._count, self._children, seconds)
        self._shards = Shards(host, applicants)
        service = ShardedService(host, line, expected, largest, self._listener, self._shards)
        service.look_at(workers)
        return service

    def _start(self) -> subprocess.Popen[bytes]:
        host, port = parse_address(self._listener.address)
        words = ["--connect", format_address((LOCAL.get(host, host), port)), "--listen", format_address((host, 0))]
        words.append("--once")  # whoever starts us again starts others
        if self._tls is not None and self._tls.fingerprint is not None:
            words += ["--fingerprint", self._tls.fingerprint]
        return subprocess.Popen(
            [sys.executable, "-m", "paceline", "shard", *words],
            env={**os.environ, **({VARIABLE: self._token.decode()} if self._token else {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the first server, which tells the others
        )

    @property
    def known(self) -> dict[str, Any]:
        """For whoever looks for them."""
        return {"shards": [shard.row for shard in self._shards.all]} if self._shards is not None else {}

    def end(self) -> None:
        """The run has its result: let the others tell their workers, and end."""
        from paceline.runtimes.sharded.peers import see_off

        if self._shards is not None:
            self._shards.end()
            see_off(self._children)


def serve_part(
    connect: str, listen: str | None, token: bytes, tls: Tls | None, patience: float, once: bool, console: Console
) -> bool:
    """Be a further server of the run at `connect` until it is over; False where that went away before.

    It is waited for, `patience` seconds, unless it is served `once` alone: a run that is resumed may need us again.
    """
    here = is_loopback(parse_address(connect)[0])
    listen = listen or ("127.0.0.1:0" if here else "0.0.0.0:0")
    if not token and not is_loopback(parse_address(listen)[0]):
        raise UserError(
            f"--listen {listen} lets other machines in: give the run's token, by --token-file or {VARIABLE}"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        own = server_tls(*make_certificate(Path(folder))) if tls is not None else None
    import torch

    from paceline.runtimes.sharded.channel import Link
    from paceline.runtimes.sharded.shard import ShardService
    from paceline.system.memory import keep_freed_memory, raise_file_limit
    from paceline.transports.listener import Listener
    from paceline.transports.tcp_client import TcpWorkerDoor

    keep_freed_memory()
    raise_file_limit()
    with contextlib.closing(Listener(listen, token, own)) as listener:
        words = {
            "shard": True,
            "version": package_version("paceline"),
            "address": listener.address,
            "fingerprint": own.fingerprint if own is not None else None,
            "pid": os.getpid(),
        }
        while True:
            door = TcpWorkerDoor(connect, token, tls)
            door.apply(words, patience, beats=False)
            with torch.inference_mode():
                ended = ShardService(Link(door.detach()), listener, console.note).run()
            if ended or once:
                return ended
            console.note(f"waiting {patience:g} s for {connect} to be served again")
