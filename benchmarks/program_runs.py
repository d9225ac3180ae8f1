"""Copies of public programs for other benchmarks: start one plain or adopted, read its metric, or time its steps."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import adoption_probe
from hosts import Host
from processes import LEAST_STEPS, common_rate, end, ended
from programs import PROGRAMS, Insert, insert

PATIENCE_SECONDS, POLL_SECONDS = 3600.0, 0.05
PROBE = Insert("import torch", ("import adoption_probe; adoption_probe.start()",))


@dataclass(frozen=True)
class Variant:
    """One way to run a program; without a strategy it is started by python."""

    adopted: bool = False
    double: bool = False
    strategy: str | None = None

    @property
    def workers(self) -> int:
        return 2 if self.strategy else 1


VARIANTS = {
    "plain": Variant(),
    "alone": Variant(adopted=True),
    "2x batch": Variant(double=True),
    "sync": Variant(adopted=True, strategy="sync"),
    "async": Variant(adopted=True, strategy="async"),
}


@dataclass(frozen=True)
class Copy:
    """A fresh copy of a program, the words that run it there, and the run that it will be under Paceline."""

    folder: Path
    run: Path
    command: list[str]

    def under(self, strategy: str, seed: int, flags: tuple[str, ...] = ()) -> list[str]:
        """Return what follows `paceline run` or `paceline server`, up to the script."""
        where = ("--name", self.folder.name, "--runs", str(self.run.parent))
        return ["--strategy", strategy, "--threads", "1", "--seed", str(seed), *flags, *where]


@dataclass
class Started:
    """A process of ours or of the plain program, in its own copy of the program."""

    process: subprocess.Popen[bytes]
    folder: Path
    run: Path

    def finish(self) -> Started:
        """Wait for its end; raise the last lines of its messages if it failed."""
        with ended([self.process], within=PATIENCE_SECONDS):
            if self.process.wait(PATIENCE_SECONDS):
                words = self.messages()
                raise RuntimeError(f"{self.folder.name} ended with exit code {self.process.returncode}: {words}")
        return self

    def messages(self) -> str:
        return (self.folder / "messages.txt").read_text(errors="replace")[-1500:]

    def wait_for_steps(self, number: int, num_processes: int) -> list[int]:
        """Wait until `num_processes` processes have made `number` steps each, and return their ids."""
        is_over = False
        while not is_over:
            is_over = self.process.poll() is not None
            done = [process for process, times in adoption_probe.times_of(self.folder).items() if len(times) >= number]
            if len(done) >= num_processes:
                return done
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"{self.folder.name} ended after fewer than {number} steps: {self.messages()}")

    def sha256(self) -> str:
        return str(json.loads((self.run / "result.json").read_text())["weights_sha256"])


class Bench:
    """Runs variants of one program in copies below a temporary folder; a metric is measured once."""

    def __init__(self, name: str, source: Path, root: Path, quick: bool) -> None:
        self.name, self.program, self.root, self.quick = name, PROGRAMS[name], root, quick
        self._staged, self._count = root / name, 0
        self._metrics: dict[tuple[str, int], tuple[float, Started]] = {}
        shutil.copytree(source / self.program.folder, self._staged)
        if self.program.setup is not None:
            self.program.setup(self._staged)
        stand_in = [str((source / "stand-in").resolve())] if (source / "stand-in").is_dir() else []
        path = os.pathsep.join([*stand_in, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}

    def start(self, kind: str, seed: int, flags: tuple[str, ...] = (), extra: str = "") -> Started:
        """Start a variant in a fresh copy; `flags` are those of `paceline run`, `extra` those of the program."""
        copy, variant = self.copy(kind, seed, extra), VARIANTS[kind]
        command = copy.command
        if variant.strategy is not None:
            words = copy.under(variant.strategy, seed, ("-n", str(variant.workers), *flags))
            command = ["-m", "paceline", "run", *words, *command]
        return Started(self.open(command, copy.folder), copy.folder, copy.run)

    def copy(self, kind: str, seed: int, extra: str = "") -> Copy:
        """Make a fresh copy for a variant, with the lines that adopt Paceline unless it is a plain one."""
        self._count += 1
        variant, program = VARIANTS[kind], self.program
        folder = self.root / f"{self.name}-{self._count}-{kind.replace(' ', '-')}-seed{seed}"
        shutil.copytree(self._staged, folder)
        self._write_script(folder / program.script, variant.adopted, seed)
        command = program.command(seed, double=variant.double, workers=variant.workers, quick=self.quick)
        return Copy(folder, self.root / "runs" / folder.name, command + extra.split())

    def _write_script(self, script: Path, adopted: bool, seed: int) -> None:
        source = script.read_text(encoding="utf8")
        source = insert(source, (*(self.program.inserts if adopted else ()), PROBE))
        if self.program.seed_text is not None:
            source = source.replace(self.program.seed_text, str(seed))
        script.write_text(source, encoding="utf8")
        shutil.copy(adoption_probe.__file__, script.parent)

    def open(self, command: list[str], folder: Path, host: Host | None = None) -> subprocess.Popen[bytes]:
        """Start Python in a copy, on a test host if one is given; its messages go to a file of the copy."""
        words, env = [sys.executable, *command], self._env
        if host is not None:
            words, env = host.command(words), {**host.environment, **env}
        with (folder / "messages.txt").open("ab") as messages:
            return subprocess.Popen(
                words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages
            )

    def verb(self, verb: str, started: Started) -> int:
        """Run `paceline VERB RUN` and return its exit code."""
        process = self.open(["-m", "paceline", verb, str(started.run)], started.folder)
        with ended([process], within=PATIENCE_SECONDS):
            return process.wait(PATIENCE_SECONDS)

    def metric(self, kind: str, seed: int) -> tuple[float, Started]:
        """Return the metric of a variant and its run."""
        if (kind, seed) not in self._metrics:
            started = self.start(kind, seed).finish()
            self._metrics[kind, seed] = self.read_metric(started), started
        return self._metrics[kind, seed]

    def figures(self) -> dict[str, float]:
        """Return all metrics measured so far, by variant and seed."""
        return {f"{kind} {seed}": value for (kind, seed), (value, _) in self._metrics.items()}

    def read_metric(self, started: Started, killed: int | None = None) -> float:
        """Return the mean of the last metrics that its processes printed, except the one that was killed."""
        texts = adoption_probe.texts_of(started.folder)
        found = [self.program.metric_in(text) for process, text in texts.items() if process != killed]
        values = [value for value in found if value is not None]
        if not values:
            raise RuntimeError(f"{started.folder.name} printed no metric: {started.messages()}")
        return statistics.mean(values)

    def rate(self, kind: str, copies: int, seconds: float) -> float:
        """Return the samples per second of `copies` processes, or of one run of two workers."""
        started = [self.start(kind, copy, extra=self.program.speed_arguments) for copy in range(copies)]
        num_processes = VARIANTS[kind].workers
        with ended([one.process for one in started], within=PATIENCE_SECONDS):
            for one in started:
                one.wait_for_steps(LEAST_STEPS, num_processes)
            time.sleep(seconds)
            for one in started:
                end(one.process)
        steps = [times for one in started for times in adoption_probe.times_of(one.folder).values()]
        for one in started:
            shutil.rmtree(one.folder)
            shutil.rmtree(one.run, ignore_errors=True)
        return common_rate({number: [(t, self.program.batch) for t in times] for number, times in enumerate(steps)})
