"""Cost of `paceline watch` on a 4-worker LeNet5 run: CPU time of its server, and the training throughput with it.

    python benchmarks/watching.py [--pairs N] [--quick] [--json] [--strict] [--no-browser]

One run trains all the time; pages open and close. `reader` receives the page's events like a browser on another
machine, `chromium` draws them on the same cores. Throughput comes from arrivals.log, CPU time from /proc.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import ours
import pairs
from processes import ended

sys.path.insert(0, str(Path(__file__).parents[1]))
from paceline.runs.arrival_log import RECORD_BYTES
from tests.support.browser import CHROMIUM, Browser

PHASE_SECONDS, QUICK_SECONDS, SETTLING_SECONDS = 10.0, 4.0, 2.0
MOST_SHARE, LEAST_RATIO = 0.01, 0.99


class Watch:
    """`paceline watch RUN` in its own process."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "paceline", "watch", str(folder), "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", self.process.stdout.readline().decode())
        assert found is not None, "paceline watch did not say where it is"
        self.port, self.address = int(found[1]), found[0]


def processor_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Disturbance(pairs.Disturbance):
    """Disturbance by other programs; live and ended descendants of this process do not count."""

    def _seconds(self) -> tuple[float, float, float, float]:  # type: ignore[override]
        stolen, busy, total, local_state = super()._seconds()
        return stolen, busy, total, local_state + sum(map(processor_seconds, descendants(os.getpid())))


def descendants(pid: int) -> set[int]:
    """Return all live descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, fresh = set(), {pid}
    while fresh:
        fresh = {one for one, parent in parents.items() if parent in fresh}
        found |= fresh
    return found


class Reader:
    """Receives events and counts their bytes."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._connection.request("GET", "/events")
        self._response = self._connection.getresponse()
        self.nbytes = self.events = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while line := self._response.readline():
            self.nbytes += len(line)
            self.events += line.startswith(b"data")

    def close(self) -> None:
        sock = self._response.fp.raw._sock  # type: ignore[union-attr]
        sock.shutdown(2)
        self._thread.join()


class Stage:
    """One run and one watch server, measured together."""

    def __init__(self, run: ours.Run, watch: Watch, seconds: float) -> None:
        self._log, self._watch, self._seconds = run.folder / "arrivals.log", watch, seconds
        self.shares: dict[str, list[float]] = {"alone": [], "reader": [], "chromium": []}
        self.events: list[float] = []
        self.drawing: list[float] = []

    def measure(self, side: str) -> float:
        """Return the pushes per second, and store the server's share of a core."""
        time.sleep(SETTLING_SECONDS)
        size, used, began = self._log.stat().st_size, processor_seconds(self._watch.process.pid), time.perf_counter()
        time.sleep(self._seconds)
        lasted = time.perf_counter() - began
        self.shares[side].append((processor_seconds(self._watch.process.pid) - used) / lasted)
        return (self._log.stat().st_size - size) / RECORD_BYTES / lasted

    def alone(self) -> float:
        return self.measure("alone")

    def read(self) -> float:
        reader = Reader(self._watch.port)
        try:
            before, rate = reader.events, self.measure("reader")
            self.events.append((reader.events - before) / (self._seconds + SETTLING_SECONDS))
            return rate
        finally:
            reader.close()

    def browse(self, browser: Browser) -> float:
        browser.open(self._watch.address)
        browser.wait_for("document.documentElement.dataset.drawn === 'true'")
        try:
            time.sleep(SETTLING_SECONDS)
            used, began = browser.processor_seconds(), time.perf_counter()
            rate = self.measure("chromium")
            self.drawing.append((browser.processor_seconds() - used) / (time.perf_counter() - began))
            return rate
        finally:
            browser.open("about:blank")


def report(stage: Stage, rows: list[pairs.Row]) -> None:
    print(pairs.table(rows, "pushes/s", sides=("watched", "alone")))
    for side, shares in stage.shares.items():
        if shares:
            found = pairs.estimate([100 * share for share in shares])
            disposition = "" if side == "alone" else f"  bar <={100 * MOST_SHARE:g} %: "
            disposition += "" if side == "alone" else pairs.judge(found, at_most=100 * MOST_SHARE)
            span = f"{found.least:.2f}..{found.most:.2f}"
            print(f"watch server, {side:<9} {found.median:5.2f} % of a core, {span}{disposition}")
    if stage.drawing:
        print(f"Chromium itself, drawing: {100 * statistics.median(stage.drawing):.1f} % of a core")
    if stage.events:
        print(f"{sum(stage.events) / len(stage.events):.2f} events per second per page")


def without(stage: Stage, browser: Browser) -> float:
    with browser.stopped():
        return stage.alone()


def main() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument("--no-browser", action="store_true", help="leave Chromium out")
    parsed = parser.parse_args()
    number, seconds = pairs.num_pairs(parsed), QUICK_SECONDS if parsed.quick else PHASE_SECONDS

    def compare(name: str, watched: Callable[[], float], alone: Callable[[], float]) -> pairs.Row:
        with Disturbance() as by:
            sides = {"watched": watched, "alone": alone}
            measured = pairs.interleave(sides, number, say=pairs.teller(parsed, name))
        return pairs.make_row(name, measured["watched"], measured["alone"], by, at_least=LEAST_RATIO)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        with ours.running("async", "lenet5", 4, 1, [*ours.ENDLESS]) as run:
            run.wait_for_pushes(200)
            watch = Watch(run.folder)
            with ended([watch.process]):
                stage = Stage(run, watch, seconds)
                rows = [compare("reader", stage.read, stage.alone)]
                if CHROMIUM is not None and not parsed.no_browser:
                    with Browser(Path(profile)) as browser:
                        sides = (lambda: stage.browse(browser)), (lambda: without(stage, browser))
                        rows.append(compare("chromium", *sides))
                report(stage, rows)
    return pairs.close(parsed, "watching", rows, shares=stage.shares, events_per_second=stage.events)


if __name__ == "__main__":
    sys.exit(main())
