"""Attack `paceline server` with 100,000 hostile connections, half of them against a server with TLS.

    python benchmarks/hostile.py [--count N] [--rate N] [--transport plain|tls]

One process serves, one honest worker trains LeNet5, one attacks from 200 addresses of loopback: port scans, resets
before, within and after the TLS handshake, after the challenge and after the proof, half-closed, silent and dripping
connections, noise, fuzzed and truncated frames, replays, wrong tokens, and invalid frames after a right token. In
interleaved pairs the attacker attacks and pauses; it has a core of its own. Printed: the ratio of the honest worker's
pushes per second, and per second of CPU time of server and worker, which other programs disturb less; how newcomers
fare during the attack, the server's memory, descriptors, messages and event rows. Safe means: no exception in its
output, memory flat (after a first attack that takes every place), only the honest worker in its log, and a replay of
the log that gives the same weights, so that nothing else was applied. All traffic stays on loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pairs
from processes import ended

from paceline.runs.arrival_log import RECORD_BYTES, read_arrivals
from paceline.runs.folder import RunFolder
from paceline.transports.auth import ANSWER_NBYTES, CHALLENGE_NBYTES, PROOF_NBYTES, ClientHandshake
from paceline.transports.frames import MAX_APPLY, FrameKind, fields_frame, header
from paceline.transports.tls import fingerprint, worker_tls

HERE = str(Path(__file__).resolve())
TOKEN = b"the token of a benchmark, which the worker knows"
TRANSPORTS = ("plain", "tls")
BAR = 0.9
MOST_GROWTH_MIB = 8.0
NUM_THREADS, NUM_SOURCES = 8, 200
MOST_KEPT = 100
"""Connections that each thread of the attacker leaves open: together more than the server keeps."""
ATTACKER_CORES = {max(os.sched_getaffinity(0))}
HONEST_CORES = os.sched_getaffinity(0) - ATTACKER_CORES or ATTACKER_CORES
TIMEOUT_SECONDS = 2.0
STOPPED = 130  # the exit code of a server that was stopped by Ctrl-C
WARM_COUNT = 1500
EXCEPTION = re.compile(r"Traceback|Error\b|Exception|Errno")
RUN = ("--dataset", "fashion-mnist-sample", "--strategy", "sync", "--workers", "1", "--steps", "10000000")
OTHERS = ("--threads", "1", "--score", "none", "--name", "it", "--runs", ".", "--token-file", "token")


def receive(visitor: socket.socket, nbytes: int) -> bytes:
    """Receive exactly so many bytes. Raise OSError if the connection ends before."""
    found = b""
    while len(found) < nbytes:
        piece = visitor.recv(nbytes - len(found))
        if not piece:
            raise ConnectionResetError
        found += piece
    return found


def prove(visitor: socket.socket, token: bytes) -> bytes:
    """Return the answer to the challenge of a server that shows this certificate, if any."""
    binding = b""
    if isinstance(visitor, ssl.SSLSocket):
        binding = fingerprint(visitor.getpeercert(binary_form=True) or b"").encode()
    return ClientHandshake(token, binding).answer(receive(visitor, CHALLENGE_NBYTES))


def reset(visitor: socket.socket) -> None:
    """Close with a TCP reset."""
    visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    visitor.close()


class Attacker:
    """Opens hostile connections chosen by a seed."""

    def __init__(self, place: tuple[str, int], tls: bool, seed: int) -> None:
        self._place, self._random = place, random.Random(seed)
        self._context = worker_tls().context if tls else None
        self._kept: deque[socket.socket] = deque()
        outside = (self._scan, self._reset, self._noise, self._keep, self._drip, self._half_close)
        inside = (
            self._reset, self._noise, self._challenged, self._guessed, self._truncated, self._fuzzed, self._proved,
            self._insider, self._half_close,
        )  # fmt: skip
        self._outside: tuple[Callable[[Any], None], ...] = (*outside, *([self._cut_hello] * 3 if tls else []))
        self._inside: tuple[Callable[[Any], None], ...] = inside

    def attack(self) -> None:
        """Open one connection and mistreat it."""
        inside = self._random.random() < 0.5
        kind = self._random.choice(self._inside if inside else self._outside)
        source = f"127.0.0.{2 + self._random.randrange(NUM_SOURCES)}"
        with contextlib.suppress(OSError, ValueError):
            visitor = socket.create_connection(self._place, TIMEOUT_SECONDS, (source, 0))
            try:
                if self._context is not None and inside:
                    visitor = self._context.wrap_socket(visitor)
                kind(visitor)
            finally:
                if visitor not in self._kept:
                    self._random.choice((reset, socket.socket.close))(visitor)

    def close(self) -> None:
        """Close the connections that were kept."""
        while self._kept:
            self._kept.popleft().close()

    # before anything is encrypted

    def _scan(self, visitor: socket.socket) -> None:
        return

    def _reset(self, visitor: socket.socket) -> None:
        reset(visitor)

    def _noise(self, visitor: socket.socket) -> None:
        visitor.sendall(self._random.randbytes(self._random.randrange(1, 4096)))

    def _cut_hello(self, visitor: socket.socket) -> None:
        """Send all or a part of a TLS hello, and then no more."""
        sent, taken = ssl.MemoryBIO(), ssl.MemoryBIO()
        assert self._context is not None
        with contextlib.suppress(ssl.SSLWantReadError):
            self._context.wrap_bio(taken, sent).do_handshake()
        hello = sent.read()
        visitor.sendall(hello[: self._random.choice((1, 5, 100, len(hello)))])
        if self._random.random() < 0.5:
            reset(visitor)

    def _keep(self, visitor: socket.socket) -> None:
        """Say nothing."""
        self._kept.append(visitor)
        if len(self._kept) > MOST_KEPT:
            self._kept.popleft().close()

    def _drip(self, visitor: socket.socket) -> None:
        """Keep one more connection, and send a byte on one of them."""
        self._keep(visitor)
        self._random.choice(self._kept).send(b"P")

    def _half_close(self, visitor: socket.socket) -> None:
        socket.socket.shutdown(visitor, socket.SHUT_WR)
        self._keep(visitor)

    # in the place of a worker

    def _challenged(self, visitor: socket.socket) -> None:
        receive(visitor, CHALLENGE_NBYTES)
        reset(visitor)

    def _guessed(self, visitor: socket.socket) -> None:
        """Send no token, a wrong one, or a recorded answer."""
        answer = prove(visitor, self._random.choice((b"", b"guess", TOKEN + b"x")))
        request = fields_frame(FrameKind.APPLY, {"version": "0"}, MAX_APPLY)
        visitor.sendall(self._random.choice((answer, answer[::-1], answer + request, bytes(ANSWER_NBYTES) + request)))

    def _truncated(self, visitor: socket.socket) -> None:
        visitor.sendall(prove(visitor, TOKEN)[: self._random.randrange(1, ANSWER_NBYTES)])

    def _fuzzed(self, visitor: socket.socket) -> None:
        """Send a frame with a flipped bit instead of an answer."""
        frame = bytearray(header(self._random.choice(list(FrameKind)), self._random.getrandbits(40)) * 7)
        frame[self._random.randrange(len(frame))] ^= 1 << self._random.randrange(8)
        visitor.sendall(frame)

    def _proved(self, visitor: socket.socket) -> None:
        """Prove a right token, and reset at once or when the server has proved it too."""
        visitor.sendall(prove(visitor, TOKEN))
        if self._random.random() < 0.5:
            receive(visitor, PROOF_NBYTES)
        reset(visitor)

    def _insider(self, visitor: socket.socket) -> None:
        """Prove a right token, and send an invalid frame."""
        frames = (
            header(FrameKind.PUSH, 1 << 40), header(FrameKind.APPLY, 1 << 17), header(FrameKind.APPLY, 9) + b"[" * 9,
            header(FrameKind.APPLY, 1000) + b"{", self._random.randbytes(64),
        )  # fmt: skip
        visitor.sendall(prove(visitor, TOKEN) + self._random.choice(frames))


class Attack:
    """An attack by several threads, at a rate, up to a number of connections or a time."""

    def __init__(self, number: int, place: tuple[str, int], tls: bool, limits: tuple[int, float, float]) -> None:
        self._began, self._limits = time.monotonic(), limits
        attackers = [Attacker(place, tls, NUM_THREADS * number + n) for n in range(NUM_THREADS)]
        self._threads = [threading.Thread(target=self._work, args=(attacker,)) for attacker in attackers]
        self._sent: list[int] = []

    def run(self) -> int:
        """Attack, and return the number of connections."""
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        return sum(self._sent)

    def _work(self, attacker: Attacker) -> None:
        most, rate, seconds = self._limits
        sent = 0
        while sent < most / NUM_THREADS and (now := time.monotonic() - self._began) < seconds:
            if sent < now * rate / NUM_THREADS:
                attacker.attack()
                sent += 1
            else:
                time.sleep(0.005)
        attacker.close()
        self._sent.append(sent)


def attack_role() -> None:
    """Run the attacker: read address, transport, count, rate and seconds per line, print the number of connections."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.sched_setaffinity(0, ATTACKER_CORES)
    for number, line in enumerate(sys.stdin):
        host, port, transport, count, rate, seconds = line.split()
        limits = int(count), float(rate), float(seconds)
        print(Attack(number, (host, int(port)), transport == "tls", limits).run(), flush=True)


class Target:
    """A real server with one real worker, and what can be seen of it from outside."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.folder, self.run, self._words = folder, folder / "it", ("--tls",) if transport == "tls" else ()
        (folder / "token").write_bytes(TOKEN)
        (folder / "token").chmod(0o600)
        self.server = self._start("server", *RUN, *OTHERS, *self._words)
        self._wait((self.run / "server.json").exists)
        known = json.loads((self.run / "server.json").read_text())
        self.address, self._pid = str(known["address"]), int(known["pid"])
        where = ("--connect", self.address, "--token-file", "token", "--threads", "1")
        self.worker = self._start("worker", *where, *self._words)
        self._wait(lambda: self.num_records() > 20)

    def _start(self, verb: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{verb}.txt").open("wb") as output:
            command = [sys.executable, "-m", "paceline", verb, *words]
            process = subprocess.Popen(command, cwd=self.folder, stdout=output, stderr=output)
        os.sched_setaffinity(process.pid, HONEST_CORES)  # before it starts threads
        return process

    def _wait(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not reached():
            if self.server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {self.output()[-500:]}")
            time.sleep(0.02)

    def num_records(self) -> int:
        log = self.run / "arrivals.log"
        return log.stat().st_size // RECORD_BYTES if log.exists() else 0

    def memory_mib(self) -> float:
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_seconds(self) -> float:
        """CPU time of server and worker so far."""
        fields = [Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2] for one in (self.server, self.worker)]
        return sum(sum(map(int, one.split()[11:13])) for one in fields) / os.sysconf("SC_CLK_TCK")

    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self._pid}/fd").iterdir()))

    def output(self) -> str:
        return (self.folder / "server.txt").read_text()

    def stop(self) -> tuple[int, int]:
        """Stop the run; returns the exit codes of server and worker."""
        self.server.send_signal(signal.SIGINT)
        code = self.server.wait(120)
        if code != STOPPED:
            self.worker.kill()  # it would wait for the server
        return code, self.worker.wait(120)

    def has_only_honest_records(self) -> bool:
        """Whether every push is of the one worker, and none was repeated or left out."""
        records, _ = read_arrivals(self.run / "arrivals.log", RunFolder(self.run).config())
        pushes = [(one.worker, one.incarnation, one.seq) for one in records if one.kind == "push"]
        return bool(pushes) and pushes == [(0, 0, pushes[0][2] + number) for number in range(len(pushes))]

    def replays(self) -> bool:
        command = [sys.executable, "-m", "paceline", "replay", str(self.run)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0


class Newcomer(threading.Thread):
    """Proves the token on a new connection twice a second, as a worker that joins during the attack does."""

    def __init__(self, address: str, tls: bool) -> None:
        super().__init__(daemon=True)
        host, port = address.split(":")
        self._place, self._context = (host, int(port)), worker_tls().context if tls else None
        self.seconds: list[float] = []
        self.num_failed = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.5):
            began = time.monotonic()
            try:
                with self._connect() as visitor:
                    visitor.sendall(prove(visitor, TOKEN))
                    receive(visitor, PROOF_NBYTES)
                self.seconds.append(time.monotonic() - began)
            except OSError:
                self.num_failed += 1

    def _connect(self) -> socket.socket:
        plain = socket.create_connection(self._place, 10.0)
        return self._context.wrap_socket(plain) if self._context is not None else plain

    def end(self) -> str:
        self._over.set()
        self.join(15)
        if not self.seconds:
            return f"none of {self.num_failed} newcomers got in"
        got = f"{len(self.seconds)} of {len(self.seconds) + self.num_failed} newcomers got in"
        return f"{got}, after {1000 * pairs.estimate(self.seconds).median:.0f} ms (median)"


def measure(
    transport: str, count: int, rate: float, number: int, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Attack a server in `number` interleaved pairs and return what was found."""
    facts: dict[str, Any] = {"transport": transport, "sent": 0, "cpu_rates": {"attacked": [], "quiet": []}}
    with tempfile.TemporaryDirectory(prefix="hostile-") as path:
        target = Target(Path(path), transport)
        attacker = subprocess.Popen([sys.executable, HERE, "attack"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert attacker.stdin is not None and attacker.stdout is not None
        with attacker.stdin, attacker.stdout, ended([target.server, target.worker, attacker], within=3600.0):
            memory: list[float] = []

            def attack(most: int) -> int:
                """Attack, and return the number of connections."""
                place = target.address.replace(":", " ")
                attacker.stdin.write(f"{place} {transport} {most} {rate} {10 * most / rate + 5}\n".encode())
                attacker.stdin.flush()
                while not select.select([attacker.stdout], [], [], 0.5)[0]:
                    memory.append(target.memory_mib())
                return int(attacker.stdout.readline())

            def rate_during(side: str, do: Callable[[], None]) -> float:
                """Return the honest pushes per second, and note those per second of CPU time."""
                records, cpu, began = target.num_records(), target.cpu_seconds(), time.monotonic()
                do()
                facts["seconds"] = time.monotonic() - began
                pushes = target.num_records() - records
                facts["cpu_rates"][side].append(pushes / (target.cpu_seconds() - cpu))
                return pushes / float(facts["seconds"])

            def attacked() -> None:
                newcomer = Newcomer(target.address, transport == "tls")
                newcomer.start()
                facts["sent"] += attack(count // number)
                facts["newcomers"] = newcomer.end()

            attack(min(count, WARM_COUNT))  # takes every place once, about 40 KiB each with TLS
            facts["memory_before"], facts["descriptors_before"] = target.memory_mib(), target.num_descriptors()
            memory.clear()
            sides = {
                "attacked": lambda: rate_during("attacked", attacked),
                "quiet": lambda: rate_during("quiet", lambda: time.sleep(facts["seconds"])),
            }
            facts["rates"] = pairs.interleave(sides, number, say=say)
            facts["memory_after"], facts["memory_most"] = target.memory_mib(), max([*memory, target.memory_mib()])
            facts["descriptors_after"] = target.num_descriptors()
            facts["exit_codes"] = target.stop()
        lines = target.output().splitlines()
        events = (target.run / "events.jsonl").read_text().splitlines()
        facts["messages"] = sum("turned away" in line for line in lines)
        facts["event_rows"] = sum('"turned_away"' in line for line in events)
        totals = [int(found) for found in re.findall(r"\((\d+) so far\)", "\n".join(lines))]
        facts["refused"] = max(totals, default=facts["messages"])
        facts["exceptions"] = [line for line in lines if EXCEPTION.search(line) and "turned away" not in line]
        facts["only_honest"], facts["replays"] = target.has_only_honest_records(), target.replays()
    facts["safe"] = (
        not facts["exceptions"]
        and facts["exit_codes"] == (STOPPED, STOPPED)
        and facts["only_honest"]
        and facts["replays"]
        and facts["memory_most"] - facts["memory_before"] < MOST_GROWTH_MIB
    )
    return facts


def describe(facts: dict[str, Any]) -> str:
    memory = f"memory {facts['memory_before']:.1f} -> {facts['memory_after']:.1f} MiB (most {facts['memory_most']:.1f})"
    files = f"descriptors {facts['descriptors_before']} -> {facts['descriptors_after']}"
    told = f"{facts['refused']:,} refused, told in {facts['messages']} lines and {facts['event_rows']} event rows"
    kept = f"only honest pushes in the log: {facts['only_honest']}, replay identical: {facts['replays']}"
    return "\n  ".join(
        [
            f"{facts['transport']}: {facts['sent']:,} hostile connections, {told}",
            f"{memory}, {files}; {facts['newcomers']}",
            f"{kept}; exit codes {facts['exit_codes']}, exceptions in the output: {len(facts['exceptions'])}",
            "safe" if facts["safe"] else f"NOT SAFE {facts['exceptions'][:3]}",
        ]
    )


def main() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument("--count", type=int, help="connections to servers in all [100,000; with --quick 4,000]")
    parser.add_argument("--rate", type=float, default=1000.0, help="connections a second")
    parser.add_argument("--transport", choices=TRANSPORTS, help="only this one [both, half of the connections each]")
    parsed = parser.parse_args()
    transports = (parsed.transport,) if parsed.transport else TRANSPORTS
    number, count = pairs.num_pairs(parsed), (parsed.count or (4_000 if parsed.quick else 100_000)) // len(transports)
    rows, found = [], []
    for transport in transports:
        with pairs.Disturbance() as by:
            found.append(measure(transport, count, parsed.rate, number, pairs.teller(parsed, f"{transport}, pushes/s")))
        for key, name in (("rates", ""), ("cpu_rates", ", CPU")):
            rates = found[-1][key]
            rows.append(pairs.make_row(transport + name, rates["attacked"], rates["quiet"], by, at_least=BAR))
        print(describe(found[-1]), flush=True)
    print(pairs.table(rows, "pushes/s", sides=("attack", "quiet")))
    safe = all(facts["safe"] for facts in found)
    return pairs.close(parsed, "hostile", rows, found=found) or int(not safe)


if __name__ == "__main__":
    if sys.argv[1:] == ["attack"]:
        attack_role()
    else:
        sys.exit(main())
