"""Public programs in their own loops on two test hosts: started with --hosts and by torchrun, and under faults.

    python benchmarks/loop_hosts.py --programs DIR [--data-dir DIR] [--only mnist,dlrm] [--part ways,faults]

The hosts are network namespaces with a link of 1 Gbit/s (needs root; see hosts.py). They have one disk, and no sshd: an
`ssh` of this script runs the command in the namespace of that name. Every run on hosts uses TLS. A killed worker is
started again; if the run is over before it has joined, the samples of its share are missing, which is shown but is no
miss.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adoption import chosen
from hosts import Host, cannot_measure, two_hosts
from pairs import flags
from processes import children, ended
from program_runs import POLL_SECONDS, Bench, Copy, Started

from paceline.system.strict_json import to_json

SEED, PORT, LAUNCHER_PORT = 1, 29513, 29514
PATIENCE_SECONDS = 900.0
WAYS, STRATEGIES, PARTS = ("--hosts", "torchrun"), ("sync", "async"), ("ways", "faults")
WORKER_KILLED, LINK_CUT, SERVER_KILLED = FAULTS = ("worker killed", "link cut 5 s", "server killed")
CUT_SECONDS = 5.0
STEPS_BEFORE_FAULT = 12
LENGTHS = {
    "mnist": ("--test-batch-size 500 --epochs {}", 8, 2),
    "makemore": ("--max-steps {}", 401, 101),
    "dlrm": ("--print-freq=1000 --data-size={}", 200_000, 100_000),
}
"""What is added to the arguments of each program, its length, and that with --quick."""
HAVE_LOADERS = ("mnist", "dlrm")
"""Programs that go on where they were after a fault: a prepared loader counts their steps."""
WORKER_FAILED = "] ended ("
"""What a command with --hosts says of a worker that ended with an error."""
MNIST_PARTS = {"train": 3200, "t10k": 1000}
SSH = """#!/bin/sh
# ssh OPTIONS HOST COMMAND: HOST is a network namespace of this machine
while [ $# -gt 2 ]; do shift; done
SSH_CONNECTION="{client} 40000 $1 22" exec ip netns exec "$1" taskset -c "$(cat "$(dirname "$0")/$1.core")" sh -c "$2"
"""


@dataclass(frozen=True)
class Row:
    """One run on two hosts, and how it compares with the same program on one machine."""

    program: str
    how: str
    strategy: str
    finished: bool
    samples: int | None
    all_samples: int
    lost_pushes: int | None
    equal_weights: bool | None
    """Whether the weights have the bits of one machine."""
    replays: bool
    seconds: float

    @property
    def bits_count(self) -> bool:
        """Whether a run must have the bits of one machine."""
        return self.how in WAYS and self.strategy == "sync"

    @property
    def is_good(self) -> bool:
        has_all = self.samples == self.all_samples or self.how == WORKER_KILLED
        kept = self.finished and self.lost_pushes == 0 and has_all and self.replays
        return kept and (bool(self.equal_weights) or not self.bits_count)

    def line(self) -> str:
        bits = {True: "equal", False: "DIFFER" if self.bits_count else "differ", None: "-"}[self.equal_weights]
        ends = f"{'yes' if self.finished else 'NO':<8} {self.samples or 0:>6}/{self.all_samples:<6}"
        replays = "identical" if self.replays else "DIFFERS"
        return (
            f"{self.program:<9} {self.how:<13} {self.strategy:<6} {bits:<7} {ends} {self.lost_pushes!s:>4} "
            f"{replays:<9} {self.seconds:>5.0f}  {'met' if self.is_good else 'MISSED'}"
        )


HEAD = f"{'program':<9} {'how':<13} {'strat.':<6} {'weights':<7} finished samples/all  lost replay    s      verdict"


class HostBench:
    """Runs one program on two hosts."""

    def __init__(self, bench: Bench, hosts: tuple[Host, Host], extra: str, verbose: bool) -> None:
        self._bench, self._hosts, self._extra, self._verbose = bench, hosts, extra, verbose
        reference = bench.start("sync", SEED, extra=extra).finish()
        self._sha256, self._samples = reference.sha256(), _result(reference)["samples"]

    def started_by(self, way: str, strategy: str) -> Row:
        """Train with `way`, one worker on each host; the first host has the server."""
        copy, bench, hosts = self._bench.copy(strategy, SEED, self._extra), self._bench, self._hosts
        words = ["-m", "paceline", "run", *copy.under(strategy, SEED)]
        if way == "--hosts":
            lines = [f"{host.name} workers=1 threads=1 python={sys.executable} dir={copy.folder}\n" for host in hosts]
            (copy.folder / "hosts").write_text("".join(lines))
            processes = [bench.open([*words, "--hosts", "hosts", *copy.command], copy.folder, hosts[0])]
        else:
            at = ["--master-addr", hosts[0].address, "--master-port", str(LAUNCHER_PORT)]
            launcher = ["-m", "torch.distributed.run", "--nnodes", "2", *at]
            ranks = [("--node-rank", "0", "--nproc-per-node", "2"), ("--node-rank", "1", "--nproc-per-node", "1")]
            processes = [
                bench.open([*launcher, *rank, *words, *copy.command], copy.folder, host)
                for rank, host in zip(ranks, hosts, strict=True)
            ]
        return self._row(way, strategy, copy, processes)

    def under(self, fault: str, strategy: str) -> Row:
        """Serve with `--restart` and `--durable` on the first host, and make a fault when both workers train."""
        copy, bench, hosts = self._bench.copy(strategy, SEED, self._extra), self._bench, self._hosts
        token, place = copy.folder / "token", f"{hosts[0].address}:{PORT}"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(16))
        own = ("--workers", "2", "--restart", "2", "--durable", "--checkpoint-every", "2", "--listen", place)
        words = copy.under(strategy, SEED, (*own, "--token-file", "token"))
        server = bench.open(["-m", "paceline", "server", *words, "--script", *copy.command], copy.folder, hosts[0])
        joining = ["-m", "paceline", "worker", "--connect", place, "--token-file", "token", "--threads", "1"]
        processes = [server]
        with ended(processes, within=PATIENCE_SECONDS):
            _wait(lambda: (copy.run / "server.json").exists() or server.poll() is not None)
            processes += [bench.open(joining, copy.folder, host) for host in hosts]
            judged = processes[:]
            Started(server, copy.folder, copy.run).wait_for_steps(STEPS_BEFORE_FAULT, 2)
            if fault == WORKER_KILLED:
                victim = judged.pop()
                victim.kill()
                victim.wait()
                processes.append(bench.open(joining, copy.folder, hosts[1]))
            elif fault == SERVER_KILLED:
                (child,) = children(server.pid)
                os.kill(child, signal.SIGKILL)
            else:
                with _cut(hosts[1]):
                    time.sleep(CUT_SECONDS)
            return self._row(fault, strategy, copy, judged)

    def _row(self, how: str, strategy: str, copy: Copy, processes: list[subprocess.Popen[bytes]]) -> Row:
        began = time.monotonic()
        with ended(processes, within=PATIENCE_SECONDS):
            codes = [process.wait(PATIENCE_SECONDS) for process in processes]
        seconds = time.monotonic() - began
        started = Started(processes[0], copy.folder, copy.run)
        result = _result(started) if (copy.run / "result.json").exists() else {}
        finished = not any(codes) and result.get("status") == "finished"
        finished = finished and WORKER_FAILED not in (copy.folder / "messages.txt").read_text(errors="replace")
        replays = bool(result) and self._bench.verb("replay", started) == 0
        found = result.get("samples"), self._samples, result.get("lost_pushes")
        equal = result.get("weights_sha256") == self._sha256 if strategy == "sync" and result else None
        row = Row(self._bench.name, how, strategy, finished, *found, equal, replays, seconds)
        print(row.line(), flush=True)
        if self._verbose or not row.is_good:
            print(f"exit codes {codes}, {copy.run}\n{started.messages()}", flush=True)
        return row


def _result(started: Started) -> dict[str, Any]:
    return dict(json.loads((started.run / "result.json").read_text()))


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _cut(host: Host) -> Iterator[None]:
    """Take the host's only link down, and up again on exit."""
    link = ["ip", "-n", host.name, "link", "set", host.interface]
    subprocess.run([*link, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run([*link, "up"], check=True)


def install_ssh(folder: Path, hosts: tuple[Host, Host]) -> None:
    """Write an `ssh` into a folder that runs commands in the namespaces of the hosts, each on its core."""
    folder.mkdir()
    (folder / "ssh").write_text(SSH.replace("{client}", hosts[0].address))
    (folder / "ssh").chmod(0o755)
    for host in hosts:
        (folder / f"{host.name}.core").write_text(str(host.core))


def write_small_mnist(source: Path, target: Path) -> None:
    """Write the first images of MNIST where the copies of the programs look for it."""
    target.mkdir(parents=True)
    for kind, number in MNIST_PARTS.items():
        for name, head, nbytes in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            (packed,) = source.glob(f"**/MNIST/**/{kind}-{name}-ubyte.gz")
            content = gzip.decompress(packed.read_bytes())
            count = number.to_bytes(4, "big")
            part = content[:4] + count + content[8:head] + content[head : head + number * nbytes]
            (target / f"{kind}-{name}-ubyte").write_bytes(part)


def measure(parsed: argparse.Namespace, root: Path, hosts: tuple[Host, Host]) -> list[Row]:
    """Print a row for each run."""
    names, parts, rows = chosen(parsed), parsed.part.split(","), []
    if "mnist" in names:
        write_small_mnist(parsed.data_dir or parsed.programs / "../data", root / "data/MNIST/raw")
    print(HEAD)
    for name in names:
        bench = Bench(name, parsed.programs, root, parsed.quick)
        words, length, quick_length = LENGTHS[name]
        on_hosts = HostBench(bench, hosts, words.format(quick_length if parsed.quick else length), parsed.verbose)
        for strategy in STRATEGIES:
            if "ways" in parts:
                rows += [on_hosts.started_by(way, strategy) for way in WAYS]
            if "faults" in parts and name in HAVE_LOADERS:
                rows += [on_hosts.under(fault, strategy) for fault in FAULTS]
    return rows


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--programs", type=Path, required=True, metavar="DIR", help="folder of the public programs")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="folder that holds MNIST [data beside --programs]")
    parser.add_argument("--only", metavar="NAME,NAME", default=",".join(LENGTHS), help="programs [%(default)s]")
    parser.add_argument("--part", metavar="PART,PART", default=",".join(PARTS), help="parts [%(default)s]")
    parsed = parser.parse_args()
    if unknown := [name for name in parsed.only.split(",") if name not in LENGTHS]:
        sys.exit(f"--only {','.join(unknown)}: choose from {', '.join(LENGTHS)}")
    if unknown := [part for part in parsed.part.split(",") if part not in PARTS]:
        sys.exit(f"--part {','.join(unknown)}: choose from {', '.join(PARTS)}")
    if cannot_measure():
        return 2
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        root = Path(folder).resolve()
        install_ssh(root / "bin", hosts)
        os.environ["PATH"] = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"
        rows = measure(parsed, root, hosts)
    good = sum(row.is_good for row in rows)
    print(f"{good} of {len(rows)} runs on two hosts as they must be; ssh was a stand-in (ip netns exec), TLS on")
    if parsed.json:
        print(to_json({"benchmark": "loop_hosts", "rows": [asdict(row) for row in rows]}))
    return int(parsed.strict and good < len(rows))


if __name__ == "__main__":
    sys.exit(main())
