"""Train the same reference runs with two checkouts and compare `weights_sha256`, which a refactoring must not change.

    python tools/same_weights.py --before OTHER/src
    python tools/same_weights.py --before OTHER/src --rename foresight=farsight   # a rule's name there

Strategies whose result does not depend on timing run in real processes, also over TCP; the others run in the simulator.
A real async run of this checkout is replayed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = "--dataset fashion-mnist-sample --model lenet5 --lr 0.02 --batch-size 32 --seed 3 --score none"
RUNS = {
    "classic, adam": "train --strategy classic --optimizer adam --lr 0.001 --steps 30",
    "sync": "train --strategy sync --workers 2 --steps 30 --momentum 0.9",
    "sync, resnet18, int8": "train --strategy sync --workers 2 --steps 3 --model resnet18 --codec int8",
    "allreduce": "train --strategy allreduce --workers 2 --steps 30 --lr 0.01 --momentum 0",
    "local:5": "train --strategy local:5 --workers 2 --steps 8 --momentum 0.9",
    "diloco:5, star": "train --strategy diloco:5 --path star --workers 2 --steps 8",
    "sync over TCP": "server --strategy sync --workers 2 --steps 30 --momentum 0.9",
    "sync over TCP, 2 servers": "server --strategy sync --workers 2 --steps 30 --momentum 0.9 --servers 2",
    "async, plain": "simulate --strategy async --workers 4 --rule plain --steps 80",
    "async, default rule": "simulate --strategy async --workers 4 --split labels --steps 80",
    "async, foresight": "simulate --strategy async --workers 4 --rule foresight --average 20 --steps 80",
    "async, foresight-cached": "simulate --strategy async --workers 4 --rule foresight-cached --steps 80",
    "async, compensated": "simulate --strategy async --workers 4 --rule compensated --steps 80 --momentum 0.9",
    "backup:1": "simulate --strategy backup:1 --workers 4 --steps 30",
    "bounded:2": "simulate --strategy bounded:2 --workers 4 --speeds 1,1,1,4 --steps 80",
    "async-local:4": "simulate --strategy async-local:4 --workers 4 --steps 20",
    "async, int8 both ways": "simulate --strategy async --workers 3 --codec int8 --pull-codec int8 --steps 60",
    "sync, lowrank:4": "simulate --strategy sync --workers 3 --codec lowrank:4 --steps 20",
}
SECONDS = 300.0


class Checkout:
    """Runs commands of one source tree."""

    def __init__(self, source: Path, runs: Path, renames: dict[str, str]) -> None:
        self._environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "PACELINE_TOKEN": secrets.token_hex(16)}
        self._runs, self._renames = runs, renames

    def train(self, number: int, command: str) -> str:
        """Train a reference run and return the hash of its weights."""
        for name, there in self._renames.items():
            command = re.sub(rf"--rule {name}(?= |$)", f"--rule {there}", command)
        verb, *flags = command.split()
        words = [verb, *COMMON.split(), *flags, "--runs", str(self._runs), "--name", f"run{number}", "--json"]
        if verb != "server":
            return self._sha(self._start(*words))
        server = self._start(*words, "--listen", f"127.0.0.1:{29700 + number}")
        workers = [
            self._start("worker", "--connect", f"127.0.0.1:{29700 + number}", "--threads", "1") for _ in range(2)
        ]
        sha = self._sha(server)
        for worker in workers:
            worker.communicate(timeout=SECONDS)
        return sha

    def replay(self) -> str:
        """Train a real async run and return whether its replay gives the same weights."""
        words = ["train", *COMMON.split(), "--strategy", "async", "--workers", "2", "--steps", "60"]
        sha = self._sha(self._start(*words, "--runs", str(self._runs), "--name", "replayed", "--json"))
        output, errors = self._start("replay", str(self._runs / "replayed")).communicate(timeout=SECONDS)
        return "identical" if sha in output + errors or "identical" in output + errors else f"differs: {output}{errors}"

    def _start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "paceline", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self._environment, stdout=pipe, stderr=pipe, text=True)

    def _sha(self, process: subprocess.Popen[str]) -> str:
        output, errors = process.communicate(timeout=SECONDS)
        if process.returncode:
            raise SystemExit(f"{' '.join(map(str, process.args))} failed:\n{errors}")
        return str(json.loads(output[output.index("{") :])["weights_sha256"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the src folder of the other checkout")
    parser.add_argument("--rename", action="append", default=[], metavar="HERE=THERE", help="a rule's name there")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    options = parser.parse_args()
    renames = dict(pair.split("=") for pair in options.rename)
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        before = Checkout(options.before, place / "before", renames)
        after = Checkout(Path(__file__).resolve().parents[1] / "src", place / "after", {})
        print("| run | command | before | after | same |\n|---|---|---|---|---|")
        for number, (name, command) in enumerate(RUNS.items()):
            if options.only not in name:
                continue
            one, other = before.train(number, command), after.train(number, command)
            different += one != other
            print(
                f"| {name} | `{command}` | {one[:12]} | {other[:12]} | {'yes' if one == other else 'NO'} |", flush=True
            )
        if options.only in "replay":
            print(f"| replay of a real async run | `replay RUN` | | {after.replay()} | |")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
