"""Attack a training server with a thousand hostile frames per second, compared with the same frames to a sink.

    python benchmarks/hostile.py [--frames N] [--rate N] [--floats N]

One process serves, one honest worker pushes and computes about as much as LeNet5 in between, one attacks: fuzzed
headers and sizes, truncated frames, replays of a recorded session, no token, a wrong token, fuzz after a right token,
slow single bytes, silent connections. The attacker alternates between the server and a sink that answers alike. The
benchmark prints the ratio of the honest worker's rates, the pushes applied beyond the honest ones (must be 0), and the
server's memory before and after. All traffic stays on loopback; it sends at most `--frames`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pairs
from processes import ended

HERE = str(Path(__file__).resolve())
TOKEN = b"of a benchmark"
BAR = 0.9
MOST_GROWTH_MIB = 8.0
MOST_IDLE = 1000
MOST_DRIPPING = 50
ARITHMETIC = 600
"""Passes over the weights per push of the honest worker: about the time of a LeNet5 step."""


def memory_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Service:
    """The server's process: applies every push and reports its counts on request."""

    def __init__(self, floats: int) -> None:
        import torch

        from paceline.transports.listener import Listener

        torch.set_num_threads(1)
        self.listener, self.poll = Listener("127.0.0.1:0", TOKEN), select.epoll()
        self.doors: dict[int, Any] = {}
        self.weights = torch.zeros(floats)
        self.pushes = self.applicants = 0
        for line in (self.listener.fileno(), sys.stdin.fileno()):
            self.poll.register(line, select.EPOLLIN)
        print(self.listener.address, flush=True)

    def run(self) -> None:
        """Serve until standard input is closed."""
        while True:
            for line, _ in self.poll.poll(1.0):
                if line in self.doors:
                    self.hear(self.doors[line])
                elif line == self.listener.fileno():
                    self.admit()
                elif not sys.stdin.readline():
                    return
                else:
                    self.tell()
            self.listener.expire(time.monotonic())

    def admit(self) -> None:
        from paceline.core.buffers import BufferSizes

        for applicant in self.listener.serve():
            self.applicants += 1
            door = applicant.welcome({"worker": 0, "incarnation": 0}, BufferSizes(len(self.weights)))
            self.doors[door.fileno()] = door
            self.poll.register(door.fileno(), select.EPOLLIN)
        self.listener.complaints()

    def hear(self, door: Any) -> None:
        from paceline.core.messages import Push, Reply
        from paceline.errors import ProtocolError
        from paceline.transports.protocol import Hello

        door.flush()
        try:
            message = door.receive()
        except ProtocolError:
            message = None
        if message is None:
            del self.doors[door.fileno()]
            door.connection.close()
            return
        if isinstance(message, Push):
            self.weights.sub_(message.update, alpha=0.01)
            self.pushes += 1
        if isinstance(message, Push | Hello):
            door.slot.weights.copy_(self.weights)
            door.answer(Reply(0, 0, message.seq + 1 if isinstance(message, Push) else 0, self.pushes, 0))
        self.poll.modify(door.fileno(), select.EPOLLIN | (select.EPOLLOUT if door.wants_write else 0))

    def tell(self) -> None:
        row = {"pushes": self.pushes, "applicants": self.applicants, "refused": self.listener.num_refused}
        row |= {"strangers": len(self.listener.strangers), "descriptors": len(list(Path("/proc/self/fd").iterdir()))}
        print(json.dumps({**row, "memory": memory_mib()}, allow_nan=False), flush=True)


def work(address: str, floats: int) -> None:
    """Run the honest worker; print its number of exchanges for every line of standard input."""
    import torch

    from paceline.core.buffers import BufferSizes, WorkerBuffers
    from paceline.core.messages import Join, Push
    from paceline.transports.protocol import Timing
    from paceline.transports.tcp_client import TcpClient

    torch.set_num_threads(1)
    door, memory = TcpClient(address, TOKEN), WorkerBuffers.private(BufferSizes(floats))
    done = 0

    def tell() -> None:
        for _ in sys.stdin:
            print(done, flush=True)
        os._exit(0)

    threading.Thread(target=tell, daemon=True).start()
    door.apply({})
    reply = door.hello(Join(0, 0), memory, {})
    print("ready", flush=True)
    while reply is not None:
        for _ in range(ARITHMETIC):
            torch.mul(memory.weights, 0.5, out=memory.update)
        push = Push(0, 0, reply.serial, reply.serial, 1, 0.0, memory.update, memory.state)
        reply = door.exchange(push, Timing(0.0, 0.0, 0.0))
        done += 1


def sink() -> None:
    """Run the sink: send every connection a challenge and close the oldest ones."""
    from paceline.transports.auth import ServerHandshake

    challenge = ServerHandshake(b"").challenge
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        print(f"127.0.0.1:{listening.getsockname()[1]}", flush=True)
        kept: deque[socket.socket] = deque()
        while True:
            visitor, _ = listening.accept()
            with contextlib.suppress(OSError):
                visitor.sendall(challenge)
            kept.append(visitor)
            if len(kept) > 256:
                kept.popleft().close()


class Attacker:
    """Sends hostile frames chosen by a seed, each on a new connection."""

    def __init__(self, recorded: bytes) -> None:
        self._recorded, self._random = recorded, random.Random(7)
        self._idle: deque[socket.socket] = deque()
        self._dripping: deque[socket.socket] = deque()
        self._kinds: tuple[Callable[[Any], None], ...] = (
            self._noise, self._fuzzed, self._truncated, self._replayed, self._guessed, self._insider, self._say_nothing,
            self._drip,
        )  # fmt: skip

    def attack(self, address: tuple[str, int], rate: float, seconds: float) -> int:
        """Send `rate` frames per second for `seconds` and return their number; close kept connections at the end."""
        began, sent = time.monotonic(), 0
        while (now := time.monotonic() - began) < seconds:
            while sent < now * rate:
                self._send_one(address)
                sent += 1
            time.sleep(0.005)
        for visitor in (*self._idle, *self._dripping):
            visitor.close()
        self._idle.clear()
        self._dripping.clear()
        return sent

    def _send_one(self, address: tuple[str, int]) -> None:
        kind = self._random.choice(self._kinds)
        with contextlib.suppress(OSError):
            visitor = socket.create_connection(address, timeout=2.0)
            if kind in (self._say_nothing, self._drip):
                kind(visitor)
                return
            with visitor:
                kind(visitor)

    def _noise(self, visitor: socket.socket) -> None:
        visitor.sendall(self._random.randbytes(self._random.randrange(1, 4096)))

    def _fuzzed(self, visitor: socket.socket) -> None:
        """Send a random header with a flipped bit."""
        header = bytearray(
            struct.pack("<4sBBxxQ", b"PACE", 1, self._random.randrange(12), self._random.getrandbits(64))
        )
        header[self._random.randrange(16)] ^= 1 << self._random.randrange(8)
        visitor.sendall(bytes(header) * 6)

    def _truncated(self, visitor: socket.socket) -> None:
        visitor.sendall(self._recorded[: self._random.randrange(1, 200)])

    def _replayed(self, visitor: socket.socket) -> None:
        visitor.sendall(self._recorded)

    def _guessed(self, visitor: socket.socket) -> None:
        """Send no token or a wrong one."""
        from paceline.transports.auth import CHALLENGE_NBYTES, ClientHandshake

        token = self._random.choice((b"", b"guess", TOKEN + b"x"))
        visitor.sendall(ClientHandshake(token).answer(visitor.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL)))

    def _insider(self, visitor: socket.socket) -> None:
        """Send the right token, then an invalid frame."""
        from paceline.transports.auth import CHALLENGE_NBYTES, ClientHandshake
        from paceline.transports.frames import FrameKind, header

        frames = (
            header(FrameKind.PUSH, 1 << 40), header(FrameKind.APPLY, 1 << 17), header(FrameKind.APPLY, 9) + b"[" * 9,
            header(FrameKind.APPLY, 1000) + b"{", self._random.randbytes(64),
        )  # fmt: skip
        answer = ClientHandshake(TOKEN).answer(visitor.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL))
        visitor.sendall(answer + self._random.choice(frames))

    def _say_nothing(self, visitor: socket.socket) -> None:
        self._keep(self._idle, visitor, MOST_IDLE)

    def _drip(self, visitor: socket.socket) -> None:
        """Open one more slow connection and send a byte on one of them."""
        self._keep(self._dripping, visitor, MOST_DRIPPING)
        self._random.choice(self._dripping).send(b"P")

    @staticmethod
    def _keep(kept: deque[socket.socket], visitor: socket.socket, most: int) -> None:
        kept.append(visitor)
        if len(kept) > most:
            kept.popleft().close()


def attack(recorded: str) -> None:
    """Run the attacker: read address, rate and seconds per line of standard input, print the number of frames."""
    attacker = Attacker(bytes.fromhex(recorded))
    for line in sys.stdin:
        host, port, rate, seconds = line.split()
        print(attacker.attack((host, int(port)), float(rate), float(seconds)), flush=True)


def record(address: str) -> bytes:
    """Record the bytes of a worker's handshake (proof, join request, hello), to replay them."""
    from paceline.transports.auth import CHALLENGE_NBYTES, PROOF_NBYTES, ClientHandshake
    from paceline.transports.frames import FrameKind, fields_frame

    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as worker:
        visitor = ClientHandshake(TOKEN)
        answer = visitor.answer(worker.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL))
        worker.sendall(answer)
        visitor.check(worker.recv(PROOF_NBYTES, socket.MSG_WAITALL))
    hello = {"quota": None, "threads": 1, "sizes": [8, 0, None, None, 0]}
    return answer + fields_frame(FrameKind.APPLY, {}, 1000) + fields_frame(FrameKind.HELLO, hello, 1000)


class Process:
    """One of the four processes, controlled by lines on standard input."""

    def __init__(self, *words: object) -> None:
        command = [sys.executable, HERE, *map(str, words)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def ask(self, line: str = "") -> str:
        self.tell(line)
        return self.hear()


@contextlib.contextmanager
def everybody(floats: int) -> Iterator[dict[str, Any]]:
    """Start server, honest worker, sink and attacker, and end them on exit."""
    found: dict[str, Any] = {"server": Process("serve", floats), "sink": Process("sink")}
    processes = [found["server"].process, found["sink"].process]
    with ended(processes, within=1200.0):
        addresses = {name: found[name].hear() for name in ("server", "sink")}
        found |= {"worker": Process("work", addresses["server"], floats), "addresses": addresses}
        processes.append(found["worker"].process)
        found["attacker"] = Process("attack", record(addresses["server"]).hex())
        processes.append(found["attacker"].process)
        assert found["worker"].hear() == "ready"
        yield found


def honest_rate(found: dict[str, Any], target: str, rate: float, seconds: float) -> tuple[float, int]:
    """Return the honest worker's exchanges per second while `target` is attacked, and the frames sent."""
    worker, attacker = found["worker"], found["attacker"]
    host, port = found["addresses"][target].split(":")
    attacker.tell(f"{host} {port} {rate} {seconds}")
    before, began = int(worker.ask()), time.monotonic()
    sent = int(attacker.hear())
    return (int(worker.ask()) - before) / (time.monotonic() - began), sent


def main() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument("--frames", type=int, help="sent to the server in all [100,000; with --quick 6,000]")
    parser.add_argument("--rate", type=float, default=1000.0, help="frames a second")
    parser.add_argument("--floats", type=int, default=62_000, help="of the honest worker's weights")
    parsed = parser.parse_args()
    number, frames = pairs.num_pairs(parsed), parsed.frames or (6_000 if parsed.quick else 100_000)
    seconds = min(frames / parsed.rate / number, 60.0)
    counts = {"server": 0, "sink": 0}
    with pairs.Disturbance() as by, everybody(parsed.floats) as found:

        def side(target: str) -> Callable[[], float]:
            def measure() -> float:
                rate, sent = honest_rate(found, target, parsed.rate, seconds)
                counts[target] += sent
                return rate

            return measure

        honest_rate(found, "server", parsed.rate, 2.0)  # fills memory pools and caches
        before = json.loads(found["server"].ask())
        rates = pairs.interleave(
            {"server": side("server"), "sink": side("sink")}, number, say=pairs.teller(parsed, "honest pushes/s")
        )
        after = json.loads(found["server"].ask())
        honest = int(found["worker"].ask())
    row = pairs.make_row("attacked/sink", rates["server"], rates["sink"], by, at_least=BAR)
    print(pairs.table([row], "pushes/s"))
    grown = after["memory"] - before["memory"]
    beyond = after["pushes"] - honest
    sent = f"{counts['server']:,} hostile frames to the server, {counts['sink']:,} to the sink"
    print(f"{sent}; {after['refused']:,} refused")
    print(f"memory {before['memory']:.1f} -> {after['memory']:.1f} MiB, descriptors {before['descriptors']} -> "
          f"{after['descriptors']}, strangers still there {after['strangers']}")  # fmt: skip
    print(f"applicants {after['applicants']} (one is honest), pushes beyond the honest worker's {max(0, beyond - 1)}")
    safe = after["applicants"] == 1 and beyond in (0, 1) and grown < MOST_GROWTH_MIB
    print("safe" if safe else "NOT SAFE: an attacker got in, or memory grew")
    facts = {"frames": counts, "before": before, "after": after, "honest": honest, "safe": safe}
    return pairs.close(parsed, "hostile", [row], **facts) or int(parsed.strict and not safe)


ROLES: dict[str, Callable[..., None]] = {
    "serve": lambda floats: Service(int(floats)).run(),
    "work": lambda address, floats: work(address, int(floats)),
    "sink": sink,
    "attack": attack,
}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ROLES:
        ROLES[sys.argv[1]](*sys.argv[2:])
    else:
        sys.exit(main())
