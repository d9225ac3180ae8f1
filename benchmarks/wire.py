"""Speed of push and pull of 11 M floats over TCP, compared with Gloo's send and recv between the same processes.

    python benchmarks/wire.py [--floats N] [--tls]
    python benchmarks/wire.py --hosts [--rate 1gbit]      # over a link between two test hosts; also runs iperf3
    python benchmarks/wire.py --tls [--hosts]             # TLS beside plain TCP, in turn

A server process and a worker process have a TCP transport and a process group, and exchange over one of them on
request. A push and its reply alternate, as in training, without computation. `--hosts` needs root and iperf3.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pairs
from hosts import RATE, Host, two_hosts, why_not
from processes import ended

HERE = str(Path(__file__).resolve())
TOKEN = b"of a benchmark"
GLOO_PORT = "29517"
PATIENCE_SECONDS = 120.0
GLOO_BAR, IPERF_BAR, TLS_BAR = 0.9, 0.93, 0.97


class Served:
    """The server's process: receives a push and replies, by TCP or by Gloo."""

    def __init__(self, address: str, floats: int, folder: str | None) -> None:
        import torch

        from paceline.core.buffers import BufferSizes
        from paceline.transports.listener import Listener
        from paceline.transports.tls import make_certificate, server_tls

        self.largest = BufferSizes(floats)
        self.update, self.weights = torch.zeros(floats), torch.zeros(floats)
        self.listeners = {"tcp": Listener(f"{address}:0", TOKEN)}
        if folder is not None:
            self.listeners["tls"] = Listener(f"{address}:0", TOKEN, server_tls(*make_certificate(Path(folder))))
        print(*(listener.address for listener in self.listeners.values()), flush=True)
        self.doors: dict[str, Any] = {}

    def meet(self) -> None:
        """Accept the worker, over TCP and then over TLS."""
        for name, listener in self.listeners.items():
            while name not in self.doors:
                select.select([listener], [], [])
                for applicant in listener.serve():
                    self.doors[name] = applicant.welcome({"worker": 0, "incarnation": 0}, self.largest)
            self.exchange(name, 1)

    def exchange(self, name: str, repeats: int) -> None:
        from paceline.core.messages import Push, Reply
        from paceline.transports.protocol import Hello

        door, answered, wanted = self.doors[name], 0, False
        poll = select.epoll()
        poll.register(door.fileno(), select.EPOLLIN)
        while answered < repeats or door.wants_write:
            if wanted != door.wants_write:
                wanted = door.wants_write
                poll.modify(door.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))
            ((_, happened),) = poll.poll()
            if happened & select.EPOLLOUT:
                door.flush()
            if happened & select.EPOLLIN:
                message = door.receive()
                assert message is not None
                if isinstance(message, Push | Hello):
                    door.answer(Reply(0, 0, message.seq + 1 if isinstance(message, Push) else 0, 0, 0))
                    answered += 1
        poll.close()

    def gloo(self, repeats: int) -> None:
        import torch.distributed as dist

        for _ in range(repeats):
            dist.recv(self.update, 1)
            dist.send(self.weights, 1)


class Working:
    """The worker's process."""

    def __init__(self, addresses: str, floats: int, folder: str | None) -> None:
        from paceline.core.buffers import BufferSizes, WorkerBuffers
        from paceline.transports.tcp_client import TcpClient
        from paceline.transports.tls import worker_tls

        self.memory = WorkerBuffers.private(BufferSizes(floats))
        self.memory.update.fill_(1.0)
        kinds = {"tcp": None, "tls": worker_tls()} if folder is not None else {"tcp": None}
        self.doors = {
            name: TcpClient(address, TOKEN, tls)
            for (name, tls), address in zip(kinds.items(), addresses.split(), strict=True)
        }
        self.seq = dict.fromkeys(kinds, 0)

    def meet(self) -> None:
        from paceline.core.messages import Join

        for door in self.doors.values():
            door.apply({})
            assert door.hello(Join(0, 0), self.memory, {}) is not None

    def exchange(self, name: str, repeats: int) -> None:
        from paceline.core.messages import Push
        from paceline.transports.protocol import Timing

        for _ in range(repeats):
            seq = self.seq[name]
            push = Push(0, 0, seq, seq, 1, 0.0, self.memory.update, self.memory.state)
            assert self.doors[name].exchange(push, Timing(0.0, 0.0, 0.0)) is not None
            self.seq[name] += 1

    def gloo(self, repeats: int) -> None:
        import torch.distributed as dist

        for _ in range(repeats):
            dist.send(self.memory.update, 0)
            dist.recv(self.memory.weights, 0)


def play(role: str, address: str, floats: int, folder: str | None) -> None:
    """Run in its own process: connect, then exchange as the lines of standard input request."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    end: Any = (Served if role == "server" else Working)(address, floats, folder)
    end.meet()
    dist.init_process_group("gloo", rank=int(role == "worker"), world_size=2)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, repeats = line.split()
        dist.barrier()
        began = time.perf_counter()
        if kind == "gloo":
            end.gloo(int(repeats))
        else:
            end.exchange(kind, int(repeats))
        print((time.perf_counter() - began) / int(repeats), flush=True)
    dist.destroy_process_group()


class Both:
    """Controls the two processes and measures their payload in Gbit/s."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], nbytes: int, repeats: int) -> None:
        self._processes, self._nbytes, self._repeats = processes, nbytes, repeats

    def rate(self, kind: str) -> float:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{kind} {self._repeats}\n".encode())
            process.stdin.flush()
        seconds = max(float(_line(process)) for process in self._processes)
        return 2 * 8 * self._nbytes / seconds / 1e9


def _line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    if not line:
        raise RuntimeError("a process of the benchmark ended early: its own output says why")
    return line


@contextlib.contextmanager
def both(hosts: tuple[Host, Host] | None, floats: int, repeats: int, tls: bool) -> Iterator[Both]:
    """Start both processes, on two hosts or on this one."""
    with tempfile.TemporaryDirectory() as folder:
        address = hosts[0].address if hosts is not None else "127.0.0.1"
        found = {"MASTER_ADDR": address, "MASTER_PORT": GLOO_PORT}
        processes: list[subprocess.Popen[bytes]] = []

        def start(role: str, number: int, where: str) -> None:
            words = [sys.executable, HERE, "play", role, where, str(floats), folder if tls else ""]
            host = hosts[number] if hosts is not None else None
            environment = {**(host.environment if host is not None else os.environ), **found}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            processes.append(
                subprocess.Popen(host.command(words) if host is not None else words, env=environment, **pipes)
            )

        with ended(processes, within=1800.0):
            start("server", 0, address)
            start("worker", 1, _line(processes[0]))
            for process in processes:
                while _line(process) != "ready":
                    pass
            yield Both(processes, 4 * floats, repeats)
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(PATIENCE_SECONDS)


def iperf(hosts: tuple[Host, Host], seconds: float) -> float:
    """Return the speed of iperf3 on the same link in Gbit/s, without its start."""
    server = subprocess.Popen(hosts[0].command(["iperf3", "-s"]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    words = ["iperf3", "-c", hosts[0].address, "-t", f"{seconds:g}", "-O", "1", "-J"]
    with ended([server], within=PATIENCE_SECONDS):
        for _ in range(20):
            done = subprocess.run(hosts[1].command(words), capture_output=True, text=True, check=False)
            received = json.loads(done.stdout).get("end", {}).get("sum_received")
            if received is not None:
                return float(received["bits_per_second"]) / 1e9
            time.sleep(0.2)  # wait for its server
    raise RuntimeError(f"iperf3: {done.stdout[-300:]}")


def main() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument("--floats", type=int, default=11_000_000)
    parser.add_argument("--tls", action="store_true", help="compare TLS with plain TCP instead of with Gloo and iperf3")
    parser.add_argument("--hosts", action="store_true", help="over a link between two test hosts")
    parser.add_argument("--rate", default=RATE, help="of that link, as tc takes it")
    parsed = parser.parse_args()
    reason = why_not() if parsed.hosts else None
    if parsed.hosts and not parsed.tls and reason is None and shutil.which("iperf3") is None:
        reason = "iperf3 is not installed"
    if reason is not None:
        print(f"cannot measure here: {reason}")
        return 2
    repeats = (2 if parsed.quick else 4) if parsed.hosts else (5 if parsed.quick else 15)
    number, name, other = pairs.num_pairs(parsed), *(("tls", "tcp") if parsed.tls else ("tcp", "gloo"))
    with two_hosts(parsed.rate) if parsed.hosts else contextlib.nullcontext(None) as hosts, pairs.Disturbance() as by:
        with both(hosts, parsed.floats, repeats, parsed.tls) as ends:
            sides: dict[str, Callable[[], float]] = {name: lambda: ends.rate(name), other: lambda: ends.rate(other)}
            if hosts is not None and not parsed.tls:
                sides["iperf3"] = lambda: iperf(hosts, 1.0 if parsed.quick else 3.0)
            found = pairs.interleave(sides, number, warm=True, say=pairs.teller(parsed, name))
    bars = {"iperf3": IPERF_BAR, "tcp": TLS_BAR} if parsed.hosts else {"gloo": GLOO_BAR}
    peers = [peer for peer in found if peer != name]
    rows = [pairs.make_row(f"{name}/{peer}", found[name], found[peer], by, at_least=bars.get(peer)) for peer in peers]
    print(pairs.table(rows, f"Gbit/s, {parsed.rate}" if parsed.hosts else "Gbit/s, local"))
    return pairs.close(parsed, "wire", rows, floats=parsed.floats, hosts=parsed.hosts, tls=parsed.tls)


if __name__ == "__main__":
    if sys.argv[1:2] == ["play"]:
        play(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] or None)
    else:
        sys.exit(main())
