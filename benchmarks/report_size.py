"""Time and page size of `paceline report` over many long runs, compared with parsing their files.

    python benchmarks/report_size.py [--runs 20] [--events 100000] [--quick]

Each run has `--events` rows in events.jsonl and as many pushes in arrivals.log, written by the real writers. The report
skips most progress rows of long files, since the log has every push, so it can be faster than its peer.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from paceline.config import RunConfig
from paceline.core.messages import Disposition, Join, Push
from paceline.runs.arrival_log import ArrivalLog
from paceline.runs.events import EventLog
from paceline.runs.folder import RunFolder
from paceline.settings.resolve import resolve

NOTHING = torch.empty(0)
WORKERS = 4


def make_run(runs: Path, number: int, count: int) -> None:
    """Write a run of `count` seconds with one event each; every tenth is a time report or an evaluation."""
    strategy = ("async", "sync")[number % 2]
    settings = {"strategy": strategy, "workers": WORKERS, "seed": number, "lr": 0.001 * (number + 1)}
    folder = RunFolder.create(resolve(RunConfig(runs=str(runs), name=f"run-{number:02d}", **settings)))
    config, log = folder.config(), ArrivalLog(folder.arrivals_file, folder.config())
    with EventLog(folder.events_file) as events:
        events.write("run_started", 0.0, workers=WORKERS, strategy=config.strategy, updates=0)
        for worker in range(WORKERS):
            events.write("worker_joined", 0.0, worker=worker, incarnation=0, threads=1)
            log.append(Join(worker, 0), Disposition.TAKEN, 0.0)
        for second in range(1, count - WORKERS):
            write_event(events, second, count)
        for push in range(count):
            loss = 2.3 * math.exp(-4.0 * push / count) + 0.1 * math.sin(push)
            message = Push(push % WORKERS, 0, push // WORKERS, push // WORKERS, 32, loss, NOTHING, NOTHING)
            log.append(message, Disposition.TAKEN, float(push))
    log.close()
    folder.write_result({"status": "finished", "reason": None, "test_accuracy": 80.0 + number, "train_seconds": count})


def write_event(events: EventLog, second: int, count: int) -> None:
    now, share, samples = float(second), second / count, 32 * second
    if second % 20 == 0:
        events.write("evaluation", now, samples=samples, test_accuracy=90.0 * share, test_loss=2.0 - share)
    elif second % 10 == 0:
        spent = [0.7 * now] * WORKERS
        rows = {"worker": list(range(WORKERS)), "state": ["live"] * WORKERS, "computing": spent, "waiting": spent}
        counts = {"steps": [second] * WORKERS, "pushes": [second] * WORKERS, "staleness": [3.0] * WORKERS}
        rest = {"ago": [0.1] * WORKERS, "stale": [[2, second], [3, 3 * second]], "paused": {}}
        events.write("workers", now, **rows, **counts, **rest)
    else:
        course = {"updates": second, "samples": samples, "fraction": share, "loss": 2.3 - 2 * share, "rate": 32.0}
        state = {"staleness": 3.0, "live": WORKERS, "lr": 0.005, "norm": 9.0 + share}
        events.write("progress", now, **course, **state, bytes_pushed=4 * samples, bytes_pulled=4 * samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="3 runs of 20,000 events")
    asked = parser.parse_args()
    num_runs, count = (3, 20_000) if asked.quick else (asked.runs, asked.events)
    with tempfile.TemporaryDirectory() as folder:
        runs, page = Path(folder) / "runs", Path(folder) / "report.html"
        for number in range(num_runs):
            make_run(runs, number, count)
        nbytes = sum(file.stat().st_size for file in runs.rglob("*.jsonl"))
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "paceline", "report", str(runs), "-o", str(page)], check=True)
        report, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        began, before = time.perf_counter(), time.process_time()
        for file in sorted(runs.rglob("*.jsonl")):
            for line in file.read_bytes().splitlines():
                json.loads(line)
        parsing, busy = time.perf_counter() - began, time.process_time() - before
        print(f"{num_runs} runs of {count:,} events and {count:,} pushes, {nbytes / 1e6:.0f} MB of events")
        spent = used.ru_utime + used.ru_stime
        size = f"{page.stat().st_size / 1e6:.2f} MB"
        print(f"paceline report (the whole command)  {report:6.2f} s, {spent:6.2f} s of them on a core, page of {size}")
        print(f"peer: json.loads of each row alone   {parsing:6.2f} s, {busy:6.2f} s of them on a core")


if __name__ == "__main__":
    main()
