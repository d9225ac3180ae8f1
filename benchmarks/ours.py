"""Our side of every benchmark: a real `paceline train` in a temporary folder, timed by its `arrivals.log`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import LEAST_STEPS, Step, common_rate, end, ended

from paceline.core.messages import Disposition
from paceline.runs.arrival_log import RECORD_BYTES, read_arrivals
from paceline.runs.folder import RunFolder

PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.002
COMMAND = [sys.executable, "-m", "paceline", "train"]
DATA = ["--dataset", "fashion-mnist-sample", "--split", "full"]
ENDLESS = ["--epochs", "100000"]


@dataclass(frozen=True)
class Run:
    """A run in progress: its process, folder and start on the monotonic clock."""

    process: subprocess.Popen[bytes]
    folder: Path
    started: float
    workers: int

    @property
    def log(self) -> Path:
        return self.folder / "arrivals.log"

    @property
    def messages(self) -> Path:
        return self.folder.with_suffix(".txt")

    def wait_for_pushes(self, number: int) -> float:
        """Return the seconds from the command until the log has `number` pushes, after all workers' joins."""
        while time.monotonic() - self.started < PATIENCE_SECONDS:
            with contextlib.suppress(FileNotFoundError):
                _, newline, records = self.log.read_bytes().partition(b"\n")
                if newline and len(records) >= (self.workers + number) * RECORD_BYTES:
                    return time.monotonic() - self.started
            self.check_alive()
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"fewer than {number} pushes within {PATIENCE_SECONDS:g} s")

    def check_alive(self) -> None:
        """Raise the last lines of its output if the run has ended by itself."""
        if self.process.poll() is not None:
            words = self.messages.read_text(errors="replace")[-500:]
            raise RuntimeError(f"paceline ended with exit code {self.process.returncode}: {words}")

    def steps(self) -> dict[int, list[Step]]:
        """Return the arrival times of each worker's applied pushes, by the run's clock."""
        records, _ = read_arrivals(self.log, RunFolder.open(self.folder).config())
        steps: dict[int, list[Step]] = {worker: [] for worker in range(self.workers)}
        for record in records:
            if record.kind == "push" and record.disposition is Disposition.TAKEN:
                steps[record.worker].append((record.now, record.samples))
        return steps


@contextlib.contextmanager
def running(
    strategy: str, model: str, workers: int, threads: int, settings: list[str] | None = None, rule: str = "plain"
) -> Iterator[Run]:
    """Start an endless `paceline train`; stop it and remove its folder on exit."""
    with tempfile.TemporaryDirectory() as runs:
        words = ["--strategy", strategy, "--model", model, "--workers", str(workers), "--threads", str(threads)]
        words += ["--rule", rule]
        command = [*COMMAND, *DATA, *words, *(settings or ENDLESS), "--runs", runs, "--name", "run"]
        folder = Path(runs) / "run"
        with folder.with_suffix(".txt").open("wb") as messages:
            started = time.monotonic()
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages)
            with ended([process]):
                yield Run(process, folder, started, workers)


def rate(strategy: str, model: str, workers: int, threads: int, seconds: float, rule: str = "plain") -> float:
    """Return the samples per second over about `seconds` of training."""
    with running(strategy, model, workers, threads, rule=rule) as run:
        run.wait_for_pushes(1)
        time.sleep(seconds)
        run.wait_for_pushes(LEAST_STEPS * workers)
        end(run.process)
        return common_rate(run.steps())
