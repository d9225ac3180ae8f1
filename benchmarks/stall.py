"""A computation that hangs in one worker of a synchronous run: seconds until it is named, and until the run goes on.

    python benchmarks/stall.py [--only local|served|tls|sharded|script] [--stall 25] [--strict]

The worker hangs in its 20th step of 5 ms while its heartbeats go on. `local` are processes of one machine, `served`
workers over TCP, `tls` the same over TLS, `sharded` two servers, `script` an own loop. Each run is started with
`--stall`, and must name the worker before it drops it, go on with the other, and replay to the same weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import ended

TASK = Path(__file__).parents[1] / "tests/support/hanging_task.py"
RUN = ["--strategy", "sync", "--threads", "1", "--name", "it", "--score", "none"]
BUILD = ["--task", "task.py:build", "--batch-size", "8", "--delay", "5ms", "--steps", "800", "--workers", "2"]
MOST_SECONDS = 30.0
"""Within which an ordinary model's hung worker must be named."""


def wait_for(found: Callable[[], Any], what: str, seconds: float = 180.0) -> float:
    """Wait until something is found, and return the time."""
    deadline = time.monotonic() + seconds
    while not found():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)
    return time.monotonic()


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the run's events of one kind."""
    events = folder / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [row for row in found if row["kind"] == kind]


def measure(kind: str, stall: float, cwd: Path) -> dict[str, Any]:
    """Run one kind of run, and return its figures."""
    shutil.copy(TASK, cwd / "task.py")
    (cwd / "loop.py").write_text(runpy.run_path(str(TASK))["OWN_LOOP"])
    folder, processes = cwd / "runs/it", list[subprocess.Popen[bytes]]()

    def start(*words: str) -> subprocess.Popen[bytes]:
        with (cwd / f"log{len(processes)}").open("wb") as log:
            command = [sys.executable, "-m", "paceline", *words]
            processes.append(subprocess.Popen(command, cwd=cwd, stdout=log, stderr=log, start_new_session=True))
        return processes[-1]

    limit = ["--stall", f"{stall:g}"]
    with ended(processes, within=600.0):
        if kind == "local":
            server = start("train", *RUN, *BUILD, *limit)
        elif kind == "script":
            server = start("run", "-n", "2", *RUN[:2], "--name", "it", "--lr", "0.05", *limit, "loop.py")
        else:
            more = {"served": [], "tls": ["--tls"], "sharded": ["--servers", "2"]}[kind]
            server = start("server", *RUN, *BUILD, *limit, *more)
            wait_for((folder / "server.json").exists, "a server")
            for _ in range(2):
                start("worker", "--run", str(folder), "--threads", "1")
        hung = wait_for((cwd / "hung").exists, "a worker that hangs")
        named = wait_for(lambda: rows(folder, "stalled"), "a name", stall + 120.0)
        gone = wait_for(lambda: rows(folder, "worker_lost"), "a dropped worker")
        code = server.wait(300)
    result = json.loads((folder / "result.json").read_text())
    replay = subprocess.run(
        [sys.executable, "-m", "paceline", "replay", "runs/it"], cwd=cwd, capture_output=True, text=True, check=False
    )
    (row,) = rows(folder, "stalled")
    return {
        "kind": kind,
        "named": round(named - hung, 1),
        "goes_on": round(gone - hung, 1),
        "usual": row["usual"],
        "status": result["status"] if code == 0 else f"exit code {code}",
        "updates": result["updates"],
        "identical": "identical to the run" in replay.stdout,
    }


def main() -> int:
    """Measure each kind of run, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("local", "served", "tls", "sharded", "script")
    parser.add_argument("--only", choices=kinds, action="append")
    parser.add_argument("--stall", type=float, default=25.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parsed = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    found = []
    print(f"{'run':<8} {'named':>7} {'goes on':>8} {'usual step':>11} {'result':>9} {'updates':>8}  replay")
    for kind in parsed.only or kinds:
        with tempfile.TemporaryDirectory(prefix="stall-") as folder:
            one = measure(kind, parsed.stall, Path(folder))
        found.append(one)
        times = f"{one['named']:>5.1f} s {one['goes_on']:>6.1f} s {1000 * one['usual']:>8.1f} ms"
        same = "identical" if one["identical"] else "DIFFERS"
        print(f"{kind:<8} {times} {one['status']:>9} {one['updates']:>8}  {same}", flush=True)
    if parsed.json:
        print(json.dumps(found, allow_nan=False))
    good = all(one["named"] <= MOST_SECONDS and one["status"] == "finished" and one["identical"] for one in found)
    print(f"named within {MOST_SECONDS:g} s, finished and replayed: {'all' if good else 'MISSED'}")
    return 0 if good or not parsed.strict else 1


if __name__ == "__main__":
    sys.exit(main())
