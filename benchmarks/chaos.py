"""Real processes under random misfortune: workers and server killed, stopped and restarted, the link cut and healed.

    python benchmarks/chaos.py [--seconds 1800] [--workers 3] [--strategy async] [--seed 0] [-- flags of the server]

Misfortune lasts for so many seconds; then training must end, with the accuracy asked for. Afterwards the run is
replayed from its log: every push that was acknowledged counts once, or the weights would differ. All on loopback,
through a proxy that can cut every connection.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from processes import ended

PADDING = 600.0
"""Seconds that training may last when nothing happens to it any more."""
QUIET_SECONDS = (0.5, 3.0)


class Link:
    """A proxy on loopback; while it is cut, every connection is, and nobody gets through."""

    def __init__(self, target: int) -> None:
        self._target, self._is_cut = target, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._is_cut:
                    raise ConnectionError
                far = socket.create_connection(("127.0.0.1", self._target), 5.0)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            thread = threading.Thread(target=self._carry, args=(near, far), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        """Both ways until one end is gone, then neither way."""
        self._pairs.add((near, far))
        back = threading.Thread(target=_pour, args=(far, near), daemon=True)
        back.start()
        _pour(near, far)
        back.join()
        self._pairs.discard((near, far))
        near.close()
        far.close()

    def cut(self) -> None:
        """Break all connections, in the middle of whatever they carry."""
        self._is_cut = True
        for pair in list(self._pairs):
            _break(*pair)

    def heal(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        """Let nobody through any more, and be gone."""
        _break(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()


def _pour(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):  # cut, or an end died
        while piece := one.recv(1 << 16):
            other.sendall(piece)
    _break(one, other)


def _break(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):  # it is broken already
            end.shutdown(socket.SHUT_RDWR)


class Cluster:
    """A server and its workers as processes of their own."""

    def __init__(self, folder: Path, workers: int, words: list[str]) -> None:
        self.folder, self._words = folder, words
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = int(free.getsockname()[1])
        self.link = Link(self._port)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.server = self._start(["server", *words, "--workers", str(workers), "--runs", str(folder), "--name", "run",
                                   "--listen", f"127.0.0.1:{self._port}"])  # fmt: skip
        self.workers = [self.start_worker() for _ in range(workers)]

    def _start(self, words: list[str]) -> subprocess.Popen[bytes]:
        log = (self.folder / "output.log").open("ab")
        process = subprocess.Popen([sys.executable, "-m", "paceline", *words], stdout=log, stderr=log)
        log.close()
        self.processes.append(process)
        return process

    def start_worker(self) -> subprocess.Popen[bytes]:
        return self._start(["worker", "--connect", f"127.0.0.1:{self.link.port}", "--threads", "1"])

    def restart_server(self) -> None:
        self.server.kill()
        self.server.wait()
        self.server = self._start(["server", "--resume", str(self.folder / "run")])

    def has_begun(self) -> bool:
        log = self.folder / "run/arrivals.log"
        return log.exists() and log.stat().st_size > 2000


class Misfortune:
    """One random event after another, by a seed."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._random = cluster, random.Random(seed)
        self.happened: Counter[str] = Counter()

    def strike(self) -> None:
        """One event, and how long it lasts."""
        kinds = {"worker killed": 4, "worker stopped": 3, "link cut": 4, "server killed": 1}
        kind = self._random.choices(list(kinds), list(kinds.values()))[0]
        self.happened[kind] += 1
        lasts = self._random.uniform(*QUIET_SECONDS)
        cluster, place = self._cluster, self._random.randrange(len(self._cluster.workers))
        worker = cluster.workers[place]
        if kind == "worker killed":
            worker.kill()
            worker.wait()
            time.sleep(lasts)
            cluster.workers[place] = cluster.start_worker()
        elif kind == "worker stopped":
            worker.send_signal(signal.SIGSTOP)
            time.sleep(3 * lasts)
            worker.send_signal(signal.SIGCONT)
        elif kind == "link cut":
            cluster.link.cut()
            time.sleep(lasts)
            cluster.link.heal()
        else:
            cluster.restart_server()

    def pause(self) -> None:
        time.sleep(self._random.uniform(*QUIET_SECONDS))


def largest_gap(run: Path) -> float:
    """The longest time between two inputs of the server, by the training clock."""
    from paceline.runs.arrivals import read_arrivals
    from paceline.runs.folder import RunFolder

    records, _ = read_arrivals(run / "arrivals.log", RunFolder.open(run).config())
    times = [record.now for record in records]
    return max((later - sooner for sooner, later in itertools.pairwise(times)), default=0.0)


def live_through(folder: Path, seconds: float, workers: int, seed: int, words: list[str]) -> dict[str, Any]:
    """Train under misfortune, then in peace to the end; what happened, and whether the log gives the same weights."""
    cluster = Cluster(folder, workers, words)
    misfortune = Misfortune(cluster, seed)
    with ended(cluster.processes, within=seconds + 2 * PADDING):
        deadline = time.monotonic() + PADDING
        while not cluster.has_begun():
            if time.monotonic() > deadline or cluster.server.poll() is not None:
                raise RuntimeError(f"training did not begin: {(folder / 'output.log').read_text()[-800:]}")
            time.sleep(0.1)
        until = time.monotonic() + seconds
        while time.monotonic() < until and cluster.server.poll() is None:
            misfortune.strike()
            misfortune.pause()
        code = cluster.server.wait(PADDING)
        late = [worker.wait(60.0) for worker in cluster.workers]
        cluster.link.close()
    run = folder / "run"
    replayed = subprocess.run(
        [sys.executable, "-m", "paceline", "replay", str(run), "--json"], capture_output=True, text=True, check=False
    )
    result = json.loads((run / "result.json").read_text())
    return {
        "exit_code": code,
        "workers_exit_codes": late,
        "happened": dict(misfortune.happened),
        "status": result["status"],
        "test_accuracy": result["test_accuracy"],
        "updates": result["updates"],
        "train_seconds": result["train_seconds"],
        "identical": json.loads(replayed.stdout)["identical"] if replayed.returncode in (0, 1) else replayed.stderr,
        "largest_gap": round(largest_gap(run), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--strategy", default="async")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("further", nargs="*", help="flags of the server, after --")
    parsed = parser.parse_args()
    words = ["--strategy", parsed.strategy, "--epochs", "1000", "--target-accuracy", "85", "--eval-every", "1"]
    words += ["--checkpoint-every", "5", "--threads", "1", *parsed.further]
    with tempfile.TemporaryDirectory() as folder:
        found = live_through(Path(folder), parsed.seconds, parsed.workers, parsed.seed, words)
    print(json.dumps(found, indent=2))
    good = found["exit_code"] == 0 and found["status"] == "finished" and found["identical"] is True
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
