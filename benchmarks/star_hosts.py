"""Speed of `async` over TCP on two hosts with a 1 Gbit/s link, the server on one of them, versus two bare loops.

    python benchmarks/star_hosts.py [--only lenet5|cnn|...] [--pairs N]

The hosts are network namespaces with one pinned core each (needs root; see hosts.py). The server shares its core with a
worker, as on two machines with one core. Each host has one worker process; with overlap it is two of the run's workers,
which take turns.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pairs
from hosts import Host, cannot_measure, two_hosts
from processes import ended
from two_hosts import PATIENCE_SECONDS, What, rate, taken, theirs, training_flags

PORT = 29512


@dataclass(frozen=True)
class Case:
    """A model, the codecs of its pushes and replies, and the minimum share of the bare loops' speed."""

    model: str
    overlap: int
    codec: str | None
    pull_codec: str | None
    bar: float | None


CASES = {
    "lenet5": Case("lenet5", 1, None, None, 0.92),
    "lenet5, no overlap": Case("lenet5", 0, None, None, None),
    "lenet5, int8": Case("lenet5", 1, "int8", "int8", None),
    "cnn": Case("cnn", 1, "lowrank:4", "int8", 0.85),
    "cnn, dense": Case("cnn", 1, None, None, None),
    "cnn, no overlap": Case("cnn", 0, "lowrank:4", "int8", None),
}


def ours(case: Case, what: What, hosts: tuple[Host, Host]) -> float:
    """Run a server and a worker on the first host and a worker on the second, timed by the server's log."""

    count = 2 * (case.overlap + 1)
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text("of two hosts for a minute")
        place = f"{hosts[0].address}:{PORT}"
        command = [sys.executable, "-m", "paceline"]
        words = [
            *command,
            "server",
            "--strategy",
            "async",
            "--workers",
            str(count),
            *what.flags,
            "--token-file",
            str(token),
        ]
        words += [
            "--listen",
            place,
            "--steps",
            str(2 * what.steps),
            "--score",
            "none",
            "--runs",
            folder,
            "--name",
            "run",
        ]
        words += ["--codec", case.codec] if case.codec is not None else []
        words += ["--pull-codec", case.pull_codec] if case.pull_codec is not None else []
        joining = [*command, "worker", "--connect", place, "--token-file", str(token), "--threads", "1"]
        joining += ["--overlap", str(case.overlap)]
        joining += ["--data-dir", what.data_dir] if what.data_dir is not None else []
        processes = [_start(hosts[0], words)]
        processes += [_start(host, joining) for host in hosts]
        with ended(processes, within=PATIENCE_SECONDS):
            for process in processes:
                _, complaints = process.communicate(timeout=PATIENCE_SECONDS)
                if process.returncode:
                    raise RuntimeError(f"exit code {process.returncode}: {complaints.decode()[-800:]}")
        return rate(taken(Path(folder) / "run", count), what.dropped)


def _start(host: Host, words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(host.command(words), env=host.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def main() -> int:
    parser = training_flags(__doc__, batch=32)
    parser.add_argument("--only", metavar="NAME", choices=list(CASES), help=", ".join(CASES))
    parsed = parser.parse_args()
    if cannot_measure():
        return 2
    rows = []
    with two_hosts(parsed.rate) as hosts:
        for name, case in CASES.items():
            if parsed.only not in (None, name):
                continue
            steps = {"lenet5": 1500, "cnn": 200}[case.model] // (10 if parsed.quick else 1)
            what = What(case.model, parsed.dataset, parsed.data_dir, parsed.batch, steps, dropped=5)
            bare = functools.partial(theirs, "bare", what, hosts)
            side = functools.partial(ours, case, what, hosts)
            say = pairs.teller(parsed, name)
            rows.append(pairs.compare(name, side, bare, pairs.num_pairs(parsed), at_least=case.bar, say=say))
            print(pairs.table(rows[-1:], "samples/s"), flush=True)
    if len(rows) > 1:
        print(pairs.table(rows, parsed.rate))
    return pairs.close(parsed, "star_hosts", rows, rate=parsed.rate, batch=parsed.batch)


if __name__ == "__main__":
    sys.exit(main())
