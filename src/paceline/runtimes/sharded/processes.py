"""Start or await the further servers of a sharded run; and `paceline shard`, which is one of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline.reports.console import Console
from paceline.system.environment import package_version
from paceline.system.process import helper_command, helper_environment
from paceline.system.terminal import counted
from paceline.transports.auth import TOKEN_VARIABLE, join_command
from paceline.transports.connection import format_address, is_loopback, parse_address
from paceline.transports.tls import Tls, make_certificate, server_tls

if TYPE_CHECKING:
    from paceline.runtimes.server.host import Host
    from paceline.runtimes.server.remote_service import ForegroundChannel, RemoteService
    from paceline.runtimes.server.runtime import TcpPeers
    from paceline.runtimes.sharded.peers import ShardPeers
    from paceline.transports.listener import Listener

HERE_SECONDS, ELSEWHERE_SECONDS = 120.0, 3600.0
LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # the loopback address of a server that listens on all interfaces


class ShardProcesses:
    """The servers beside the first. Leaving the context kills the processes that were started here."""

    def __init__(self, count: int, elsewhere: bool, listener: Listener, token: bytes, tls: Tls | None) -> None:
        self._count, self._elsewhere = count, elsewhere
        self._listener, self._token, self._tls = listener, token, tls
        self._children: list[subprocess.Popen[bytes]] = []
        self._shards: ShardPeers | None = None

    def make_peers(self) -> TcpPeers:
        """The runtime of the first server's host."""
        from paceline.runtimes.server.runtime import TcpPeers
        from paceline.runtimes.sharded.coordinator import ShardedPeers

        return ShardedPeers() if self._count else TcpPeers()

    def __enter__(self) -> ShardProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.wait()
        if self._shards is not None:
            self._shards.close()

    def service(
        self, host: Host, peers: TcpPeers, line: ForegroundChannel, console: Console, wait_seconds: float | None
    ) -> RemoteService:
        """The service of the run. Other servers are connected when this returns; `peers` come from `make_peers`."""
        from paceline.assembly.run import sizes_of
        from paceline.assembly.task import identity_of
        from paceline.runtimes.server.remote_service import RemoteService, SingleServer
        from paceline.runtimes.sharded.coordinator import Coordinator, ShardedPeers
        from paceline.runtimes.sharded.peers import ShardPeers, wait_for_shards

        assert host.task is not None and host.work is not None
        expected, largest = identity_of(host.task), sizes_of(host.config, host.task, host.work)
        if not isinstance(peers, ShardedPeers):
            gate = SingleServer(host, largest)
            return RemoteService(host, peers, line, expected, self._listener, gate, wait_seconds)
        if self._elsewhere:
            command = join_command("shard", self._listener.address, host.folder.path)
            console.note(f"waiting for {counted(self._count, 'further server')}: {command}")
        else:
            self._children = [self._start() for _ in range(self._count)]
        seconds = ELSEWHERE_SECONDS if self._elsewhere else HERE_SECONDS
        applicants, workers = wait_for_shards(self._listener, self._count, self._children, seconds)
        self._shards = ShardPeers(host, applicants)
        coordinator = Coordinator(host.server, peers, self._shards, largest)
        service = RemoteService(host, peers, line, expected, self._listener, coordinator, wait_seconds)
        service.admit(workers)
        return service

    def _start(self) -> subprocess.Popen[bytes]:
        host, port = parse_address(self._listener.address)
        here, listen = format_address((LOCAL.get(host, host), port)), format_address((host, 0))
        words = ["--connect", here, "--listen", listen, "--once"]  # once: a resumed run starts new ones
        if self._tls is not None and self._tls.fingerprint is not None:
            words += ["--fingerprint", self._tls.fingerprint]
        elif self._tls is None:
            words += ["--plain"]
        return subprocess.Popen(
            helper_command("paceline", "shard", *words),
            env={**helper_environment(), TOKEN_VARIABLE: os.fsdecode(self._token)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C reaches the first server alone, which ends the others
        )

    @property
    def known(self) -> dict[str, Any]:
        """What the run's folder says about them."""
        return {"shards": [shard.row for shard in self._shards.all]} if self._shards is not None else {}

    def end(self) -> None:
        """End the other servers after the run has its result; they tell their workers first."""
        from paceline.runtimes.sharded.peers import terminate

        if self._shards is not None:
            self._shards.end()
            terminate(self._children)


def serve_part(
    connect: str, listen: str | None, token: bytes, tls: Tls | None, patience: float, once: bool, console: Console
) -> bool:
    """Serve a part of the run at `connect` until it is over; False if its first server is gone before that.

    Unless `once`, wait `patience` seconds for the first server to come back: a resumed run needs this server again.
    """
    listen = listen or ("127.0.0.1:0" if is_loopback(parse_address(connect)[0]) else "0.0.0.0:0")
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        own = server_tls(*make_certificate(Path(folder))) if tls is not None else None
    import torch

    from paceline.runtimes.sharded.channel import ShardChannel
    from paceline.runtimes.sharded.shard import ShardService
    from paceline.system.memory import keep_freed_memory, raise_file_limit
    from paceline.system.subnormals import flush_subnormals
    from paceline.transports.listener import Listener
    from paceline.transports.tcp_client import TcpClient

    keep_freed_memory()
    flush_subnormals()
    raise_file_limit()
    with contextlib.closing(Listener(listen, token, own)) as listener:
        fields = {"shard": True, "version": package_version("paceline"), "pid": os.getpid()}
        fields |= {"address": listener.address, "fingerprint": own.fingerprint if own is not None else None}
        while True:
            client = TcpClient(connect, token, tls)
            client.apply(fields, patience, beats=False)
            if not once:
                console.note(f"serving a part of the run at {connect}; workers reach it at {listener.address}")
            with torch.inference_mode():
                ended = ShardService(ShardChannel(client.detach()), listener, console.note).run()
            if ended or once:
                return ended
            console.note(f"waiting {patience:g} s for {connect} to be served again")
