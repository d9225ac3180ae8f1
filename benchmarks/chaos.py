"""Real processes under random faults: workers and server killed, stopped and restarted, connections broken, and lies.

    python benchmarks/chaos.py [--seconds 1800] [--workers 3] [--accuracy 80] [--seed 0] [-- flags of the servers]

Runs follow each other with different flags until `--seconds` have passed; each must reach `--accuracy`. Then each is
replayed from its log: if any acknowledged push were lost or applied twice, the weights would differ. All traffic is on
loopback, through a proxy that can break every connection. The folder of a run that fails is kept. With `--max-workers`,
workers also join and are drained; with `--restart`, the server's inner process is killed. With `--stall`, workers hang
in a step while their heartbeats go on, one computes a NaN, and some lie about a push: they must be dropped or expelled.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import secrets
import shutil
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

from faulty_task import FAULTS_VARIABLE, order
from liar import LIES
from processes import children, ended

PADDING = 600.0
"""Maximum seconds of training after the last fault."""
QUIET_SECONDS = (0.5, 3.0)
ENDING_SECONDS = 3.0
CEILING_SECONDS = 60.0
"""Maximum adaptive deadline: the server may wait no longer for any worker."""
COMMON = ["--split", "iid", "--epochs", "2000", "--eval-every", "2", "--score", "test", "--checkpoint-every", "5",
          "--threads", "1", "--lr", "0.001"]  # fmt: skip
HERE = Path(__file__).resolve().parent
BUILT_IN = "--dataset fashion-mnist-sample"
FAULTY = f"--task {HERE / 'faulty_task.py'}:build --stall 4"
RUNS = [
    (f"{BUILT_IN} --tls --strategy async --rule foresight-cached --average on --codec int8 --durable", 0),
    (f"{FAULTY} --strategy sync --tls", 0),
    (f"{BUILT_IN} --strategy async --max-workers 5 --restart 1000", 0),
    (f"{FAULTY} --strategy async --max-workers 6 --robust", 0),
    (f"{BUILT_IN} --strategy sync", 0),
    (f"{BUILT_IN} --tls --strategy bounded:4 --codec topk:0.05 --pull-codec int8", 1),
    (f"{FAULTY} --strategy bounded:4 --robust --tls", 0),
    (f"{BUILT_IN} --tls --strategy async --max-workers 8 --codec int8 --average on --recovery checkpoint", 1),
    (f"{BUILT_IN} --strategy async-local:4 --codec int8", 0),
]
"""Server flags and `--overlap` of the worker processes, one entry per run in turn."""


class Link:
    """A proxy on loopback; while it is cut, it breaks and refuses every connection."""

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
        """Forward both directions until one end closes, then close both."""
        self._pairs.add((near, far))
        back = threading.Thread(target=_pour, args=(far, near), daemon=True)
        back.start()
        _pour(near, far)
        back.join()
        self._pairs.discard((near, far))
        near.close()
        far.close()

    def cut(self) -> None:
        """Break all connections, even in the middle of a message."""
        self._is_cut = True
        for pair in list(self._pairs):
            _break(*pair)

    def heal(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        """Refuse new connections and close the proxy."""
        _break(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()


def _pour(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):  # cut, or one end closed
        while piece := one.recv(1 << 16):
            other.sendall(piece)
    _break(one, other)


def _break(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):  # already broken
            end.shutdown(socket.SHUT_RDWR)


class Cluster:
    """A server and its workers, each in its own process."""

    def __init__(self, folder: Path, workers: int, words: list[str], overlap: int = 0) -> None:
        self.folder, self._overlap = folder, overlap
        self.most = int(words[words.index("--max-workers") + 1]) if "--max-workers" in words else None
        """Maximum number of workers of an elastic run."""
        self._is_kept, self.misbehaves = "--restart" in words, "--stall" in words
        self.faults = folder / "faults"
        """Where files tell the workers' processes to hang or to give a NaN."""
        self.faults.mkdir()
        self.killed_after_the_end = False
        """Whether the server was killed after training: its restart may exit with code 2, with nothing to resume."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = int(free.getsockname()[1])
        self.link = Link(self._port)
        self.processes: list[subprocess.Popen[bytes]] = []
        numbers = str(workers * (overlap + 1))
        self._token = secrets.token_hex(16)
        self.server = self._start(["server", *words, "--workers", numbers, "--runs", str(folder), "--name", "run",
                                   "--listen", f"127.0.0.1:{self._port}"])  # fmt: skip
        self.workers = [self.start_worker() for _ in range(workers)]

    def _start(self, words: list[str], program: tuple[str, ...] = ("-m", "paceline")) -> subprocess.Popen[bytes]:
        log = (self.folder / "output.log").open("ab")
        environment = {**os.environ, "PACELINE_TOKEN": self._token, FAULTS_VARIABLE: str(self.faults)}
        process = subprocess.Popen([sys.executable, *program, *words], stdout=log, stderr=log, env=environment)
        log.close()
        self.processes.append(process)
        return process

    def start_worker(self) -> subprocess.Popen[bytes]:
        return self._start(["worker", *self._worker_words])

    def start_liar(self, lie: str, pushes: int) -> subprocess.Popen[bytes]:
        """Start a worker that lies after so many honest pushes."""
        return self._start([lie, str(pushes), *self._worker_words], (str(HERE / "liar.py"),))

    @property
    def _worker_words(self) -> list[str]:
        words = ["--connect", f"127.0.0.1:{self.link.port}", "--threads", "1", "--patience", "60"]
        return [*words, "--overlap", str(self._overlap)]

    def restart_server(self) -> None:
        """Kill the server; its supervisor restarts it, or this process does."""
        if self._is_kept:
            for pid in children(self.server.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            self.server.kill()
            self.server.wait()
        self.killed_after_the_end = (self.folder / "run/result.json").exists()
        if not self._is_kept:
            self.server = self._start(["server", "--resume", str(self.folder / "run")])

    def terminate(self) -> list[int | None]:
        """Wait for the server and return the workers' exit codes; None for one still trying to reconnect."""
        deadline = time.monotonic() + ENDING_SECONDS
        while any(worker.poll() is None for worker in self.workers) and time.monotonic() < deadline:
            time.sleep(0.1)
        codes = [worker.poll() for worker in self.workers]
        for worker in self.workers:
            worker.kill()
        return codes

    def drain(self, worker: int) -> None:
        """Drain a worker; the command may report that no such worker exists."""
        self._start(["drain", str(self.folder / "run"), str(worker)])

    def server_use(self) -> tuple[int, float] | None:
        """Return the open descriptors and megabytes of the serving process, or None if none runs."""
        for pid in children(self.server.pid) if self._is_kept else [self.server.pid]:
            with contextlib.suppress(OSError, StopIteration):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                return len(list(Path(f"/proc/{pid}/fd").iterdir())), pages * 4096 / 1e6
        return None

    def has_begun(self) -> bool:
        log = self.folder / "run/arrivals.log"
        return log.exists() and log.stat().st_size > 2000


def left_behind(folder: Path) -> list[int]:
    """Return the processes whose command line names the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


class Misfortune:
    """Injects random faults, one after another, from a seed."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._random = cluster, random.Random(seed)
        self.happened: Counter[str] = Counter()
        self._kinds = {"worker killed": 4, "worker stopped": 3, "link cut": 4, "server killed": 1}
        if cluster.most is not None:
            self._kinds |= {"worker drained": 2, "worker joined": 2}
        if cluster.misbehaves:
            self._kinds |= {"worker hung": 3, "worker lied": 3, "worker gave a NaN": 3}

    def strike(self) -> None:
        """Inject one fault and wait until it is over."""
        kinds = self._kinds
        kind = self._random.choices(list(kinds), list(kinds.values()))[0]
        if kind == "worker gave a NaN":
            del kinds[kind]  # its place stays empty until a resume
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
        elif kind == "worker drained":
            cluster.drain(self._random.randrange(cluster.most or 1))
        elif kind == "worker joined":
            cluster.workers.append(cluster.start_worker())  # the server refuses it if the run is full
        elif kind == "worker hung":
            order(cluster.faults, "hang", worker.pid)
            time.sleep(5.0 + 3 * lasts)
            (cluster.faults / f"hang-{worker.pid}").unlink()
        elif kind == "worker lied":
            worker.kill()
            worker.wait()
            liar = cluster.start_liar(self._random.choice(list(LIES)), self._random.randrange(30))
            with contextlib.suppress(subprocess.TimeoutExpired):  # it found no place
                liar.wait(20.0)
            liar.kill()
            liar.wait()
            cluster.workers[place] = cluster.start_worker()
        elif kind == "worker gave a NaN":
            order(cluster.faults, "nan", worker.pid)
            time.sleep(3 * lasts)
        else:
            cluster.restart_server()

    def pause(self) -> None:
        time.sleep(self._random.uniform(*QUIET_SECONDS))


def largest_gap(run: Path) -> float:
    """Return the longest time between two inputs of the server, by the training clock."""
    from paceline.runs.arrival_log import read_arrivals
    from paceline.runs.folder import RunFolder

    records, _ = read_arrivals(run / "arrivals.log", RunFolder.open(run).config())
    times = [record.now for record in records]
    return max((later - sooner for sooner, later in itertools.pairwise(times)), default=0.0)


def live_through(
    folder: Path, seconds: float, workers: int, seed: int, words: list[str], overlap: int = 0
) -> dict[str, Any]:
    """Train under faults, then to the end without; return the counts and whether a replay gives the same weights."""
    cluster = Cluster(folder, workers, words, overlap)
    misfortune = Misfortune(cluster, seed)
    uses: list[tuple[int, float]] = []
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
            uses += [use] if (use := cluster.server_use()) is not None else []
        if all(worker.poll() is not None for worker in cluster.workers):  # all were drained
            cluster.workers.append(cluster.start_worker())
        code = cluster.server.wait(PADDING)
        codes = cluster.terminate()
        cluster.link.close()
    left = left_behind(folder)
    run = folder / "run"
    replayed = subprocess.run(
        [sys.executable, "-m", "paceline", "replay", str(run), "--json"], capture_output=True, text=True, check=False
    )
    result = json.loads((run / "result.json").read_text())
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    outcome = json.loads(replayed.stdout) if replayed.returncode in (0, 1) else {"identical": replayed.stderr}
    return {
        "exit_code": code,
        "killed_after_the_end": cluster.killed_after_the_end,
        "workers_exit_codes": codes,
        "happened": dict(misfortune.happened),
        "status": result["status"],
        "test_accuracy": result["test_accuracy"],
        "updates": result["updates"],
        "train_seconds": result["train_seconds"],
        "identical": outcome["identical"],
        "mismatch": outcome.get("first_departure"),
        "dropped_or_expelled": dict(Counter(row["kind"] for row in events if row["kind"] in ("stalled", "expelled"))),
        "lost_pushes": result["lost_pushes"],
        "resumes": result["resumes"],
        "largest_gap": round(largest_gap(run), 1),
        "most_descriptors": max((descriptors for descriptors, _ in uses), default=0),
        "most_megabytes": round(max((megabytes for _, megabytes in uses), default=0.0)),
        "left_behind": left,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--accuracy", type=float, default=80.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("further", nargs="*", help="flags of all servers, after --")
    parsed = parser.parse_args()
    began, good = time.monotonic(), True
    for number in itertools.count(parsed.seed):
        left = parsed.seconds - (time.monotonic() - began)
        if left <= 0:
            return 0 if good else 1
        flags, overlap = RUNS[number % len(RUNS)]
        words = [*COMMON, "--target-accuracy", str(parsed.accuracy), *flags.split(), *parsed.further]
        with tempfile.TemporaryDirectory() as folder:
            found = live_through(Path(folder), left, parsed.workers, number, words, overlap)
            if not is_good(found, parsed.accuracy):
                good = False
                print((Path(folder) / "output.log").read_text()[-8000:], file=sys.stderr)
                kept = shutil.copytree(folder, tempfile.mkdtemp(prefix=f"chaos-{number}-"), dirs_exist_ok=True)
                print(f"kept: {kept}", file=sys.stderr)
        print(json.dumps({"seed": number, "flags": flags, "overlap": overlap, **found}, allow_nan=False), flush=True)
    return 1


def is_good(found: dict[str, Any], accuracy: float) -> bool:
    """Return whether training finished, the replay is identical, no wait was too long and no process is left."""
    codes = (0, 2) if found["killed_after_the_end"] else (0,)
    ended_well = found["exit_code"] in codes and found["status"] == "finished" and found["identical"] is True
    reached = found["test_accuracy"] is not None and found["test_accuracy"] >= accuracy
    return ended_well and reached and found["largest_gap"] < CEILING_SECONDS and not found["left_behind"]


if __name__ == "__main__":
    sys.exit(main())
