"""A disk that is full or read-only in every phase of a run: one line, and after it is repaired the run goes on.

    python benchmarks/disk_full.py [--only TEXT] [--served] [--mounted] [--errors ENOSPC,EROFS]

Local runs, or with `--served` a server and a worker process, with `--durable`. `disk_fault.c`, compiled by gcc and
preloaded, lets calls on the named file fail. With `--mounted`, as root: a real tmpfs that is too small. A row is "good"
if the command ended with the expected code in one line that names the run and the remedy, without a traceback; if
after the repair `resume` finished the run without a lost push; and if `replay` gives the same weights.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.runs.arrival_log import read_log
from paceline.runs.folder import RunFolder

PROGRAM = [sys.executable, "-m", "paceline"]
SETTINGS = (
    *("--dataset", "fashion-mnist-sample", "--strategy", "async", "--workers", "2", "--threads", "1", "--lr", "0.01"),
    *("--epochs", "0.5", "--seed", "3", "--durable", "--checkpoint-every", "0.3", "--snapshots", "8"),
    *("--eval-every", "0.1", "--name", "it"),
)
REMEDIES = ("make room", "make it writable", "try --runs DIR", "check the disk", "give another ")
GOES_ON, REFUSED, ENDS = "goes on", "refused", "ends"
CODES = {GOES_ON: 0, REFUSED: 2, ENDS: 2}
SECONDS = 120.0
SMALL_VOLUMES_KB = (4, 8, 12, 16, 48, 200, 700, 1500, 2500)


@dataclass(frozen=True)
class Phase:
    """One phase of a run, the file that cannot be written in it, and how the run is to take it."""

    name: str
    path: str
    outcome: str
    only_when: dict[str, str] = field(default_factory=dict)
    resumed: bool = False  # the fault meets the resumed run, not the first

    def environment(self, library: Path, code: int) -> dict[str, str]:
        """The variables that make it happen."""
        return {"LD_PRELOAD": str(library), "FAULT_PATH": self.path, "FAULT_ERRNO": str(code), **self.only_when}


PHASES = (
    Phase("creation of the folder", "runs/it", REFUSED),
    Phase("config.toml", "config.toml", REFUSED),
    Phase("first event", "events.jsonl", REFUSED),
    Phase("first bytes of the log", "arrivals.log", REFUSED),
    Phase("first sync of the log", "arrivals.log", REFUSED, {"FAULT_SYNC": "1"}),
    Phase("log, 100 records later", "arrivals.log", ENDS, {"FAULT_AFTER": "100"}),
    Phase("progress event", "events.jsonl", ENDS, {"FAULT_TEXT": '"kind": "progress"'}),
    Phase("evaluation event", "events.jsonl", ENDS, {"FAULT_TEXT": '"kind": "evaluation"'}),
    Phase("checkpoint", "tensors.safetensors", GOES_ON),
    Phase("snapshot", "/snapshots", GOES_ON),
    Phase("best weights", "best.safetensors", GOES_ON),
    Phase("event of the end", "events.jsonl", ENDS, {"FAULT_TEXT": '"kind": "run_ended"'}),
    Phase("final weights", "weights.safetensors", ENDS),
    Phase("result", "result.json", ENDS),
    Phase("log of a resumed run", "arrivals.log", ENDS, resumed=True),
    Phase("event of a resumed run", "events.jsonl", ENDS, resumed=True),
)
OUTPUTS = (
    (("report", "runs/it", "-o", "page.html"), "page.html"),
    (("trace", "runs/it"), "trace.json"),
    (("replay", "runs/it", "--until", "9", "--output", "some.safetensors"), "some.safetensors"),
    (("landscape", "runs/it", "--grid", "3", "--samples", "20", "-o", "drawn"), "drawn"),
)
"""Verbs that write a file about a run, and that file."""
SERVED_PHASES = (Phase("server.json", "server.json", ENDS), *PHASES)


@dataclass
class Ended:
    """How a command ended."""

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        """What it said at its end: lines of its own error message."""
        return [line for line in self.text.splitlines() if line.startswith("paceline: ")]

    def fault(self, code: int, outcome: str = "") -> str | None:
        """What is wrong about it, if anything."""
        if "Traceback" in self.text:
            return "a traceback: " + self.text.strip().splitlines()[-1]
        if self.code != code:
            return f"exit code {self.code}, not {code}: {' '.join(self.text.split())[-300:]}"
        if outcome == GOES_ON and "could not be written in runs/it" not in self.text:
            return "no line about what could not be written"
        if code and (len(self.lines) != 1 or not any(remedy in self.lines[0] for remedy in REMEDIES)):
            return f"not one line with a remedy: {self.lines}"
        return None


class Cluster:
    """Runs commands in one folder: a run on this machine's processes, or a server with a worker process."""

    def __init__(self, folder: Path, served: bool) -> None:
        self.folder, self.served = folder, served
        self.run = RunFolder(folder / "runs/it")

    def _start(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        own = {"OMP_NUM_THREADS": "1", "COLUMNS": "1000", "PACELINE_TOKEN": "a-token-of-this-benchmark"}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(PROGRAM + words, cwd=self.folder, env={**os.environ, **own, **environment}, **pipes)  # type: ignore[call-overload, no-any-return]

    def command(self, *words: str, environment: dict[str, str] | None = None) -> Ended:
        """Run one command to its end."""
        process = self._start(list(words), environment or {})
        try:
            text = process.communicate(timeout=SECONDS)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            return Ended(-1, f"it did not end within {SECONDS:g} s: {process.communicate()[1]}")
        return Ended(process.returncode, text)

    def train(self, environment: dict[str, str]) -> Ended:
        """Train from the start."""
        if not self.served:
            return self.command("train", *SETTINGS, environment=environment)
        return self._serve([*SETTINGS], environment)

    def resume(self, environment: dict[str, str] | None = None) -> Ended:
        """Go on with the run."""
        if not self.served:
            return self.command("resume", "runs/it", environment=environment)
        return self._serve(["--resume", "runs/it"], environment or {})

    def _serve(self, words: list[str], environment: dict[str, str]) -> Ended:
        with socket_port() as port:
            pass
        address = f"127.0.0.1:{port}"
        flags = ["--overlap", "1", "--threads", "1", "--patience", "8"]
        worker = self._start(["worker", "--connect", address, *flags], {})
        try:
            ended = self.command("server", "--listen", address, *words, environment=environment)
            try:
                text = worker.communicate(timeout=60.0)[1]
                if "Traceback" in text:
                    ended.text += f"\nthe worker: {text}"
            except subprocess.TimeoutExpired:
                ended.text += "\nTraceback-free, but the worker did not end within 60 s"
                ended.code = -2
        finally:
            worker.kill()
            worker.wait()
        return ended

    def records(self) -> list[object]:
        """The intact records of the log."""
        with contextlib.suppress(PacelineError, OSError):
            config: RunConfig = self.run.config()
            return list(read_log(self.run.arrivals_file, config).records)
        return []

    def repaired(self) -> str | None:
        """Resume and replay after the repair; returns what is wrong, if anything."""
        before = self.records()
        if not self.run.result_file.exists() and before:
            again = self.resume()
            if again.code:
                return f"resume: {again.fault(0)}"
        if self.run.result_file.exists():
            result = json.loads(self.run.result_file.read_text())
            if result["lost_pushes"] or self.records()[: len(before)] != before:
                return f"{result['lost_pushes']} pushes lost"
            replayed = self.command("replay", "runs/it")
            return None if replayed.code == 0 else f"replay: {' '.join(replayed.text.split())[-200:]}"
        return None if not self.run.path.exists() else "the folder of a run that never began is left"


@contextlib.contextmanager
def socket_port() -> Iterator[int]:
    """A free port."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def faulty(phase: Phase, name: str, library: Path, served: bool) -> str:
    """Try one phase with one error; returns the row's verdict."""
    with tempfile.TemporaryDirectory(prefix="disk-full-") as folder:
        cluster = Cluster(Path(folder), served)
        environment = phase.environment(library, getattr(errno, name))
        if phase.resumed:
            first = cluster.train({**environment, "FAULT_PATH": "arrivals.log", "FAULT_AFTER": "100"})
            if (wrong := first.fault(2)) is not None:
                return f"before it: {wrong}"
            ended = cluster.resume(environment)
        else:
            ended = cluster.train(environment)
        wrong = ended.fault(CODES[phase.outcome], phase.outcome) or cluster.repaired()
        said = ended.lines[0].removeprefix("paceline: ") if ended.lines else "goes on, with a note"
        return f"WRONG: {wrong}" if wrong is not None else f"good: {said}"


def outputs(library: Path, names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Write files about a finished run to a disk that is full; yields rows."""
    with tempfile.TemporaryDirectory(prefix="disk-full-") as folder:
        cluster = Cluster(Path(folder), served=False)
        if (wrong := cluster.train({}).fault(0)) is not None:
            yield "outputs", "none", f"WRONG: {wrong}"
            return
        for words, path in OUTPUTS:
            for name in names:
                environment = Phase("", path, REFUSED).environment(library, getattr(errno, name))
                ended = cluster.command(*words, environment=environment)
                wrong = ended.fault(2)
                yield words[0], name, f"WRONG: {wrong}" if wrong is not None else f"good: {ended.lines[0][10:]}"


def mounted(kilobytes: int) -> str:
    """Train on a tmpfs of this size, then make it large; returns the row's verdict."""
    with tempfile.TemporaryDirectory(prefix="disk-full-") as folder:
        size = f"size={kilobytes}k"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
        try:
            cluster = Cluster(Path(folder), served=False)
            ended = cluster.train({})
            wrong = ended.fault(ended.code if ended.code in (0, 2) else 0)
            subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
            wrong = wrong or cluster.repaired()
            said = ended.lines[0].removeprefix("paceline: ") if ended.lines else f"exit code {ended.code}"
            return f"WRONG: {wrong}" if wrong is not None else f"good: {said}"
        finally:
            subprocess.run(["umount", folder], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="phases whose name contains this text")
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--mounted", action="store_true")
    parser.add_argument("--errors", default="ENOSPC,EROFS")
    parsed = parser.parse_args()
    verdicts = []

    def tell(name: str, error: str, verdict: str) -> None:
        verdicts.append(verdict)
        print(f"{name:<24} {error:<7} {verdict}", flush=True)

    if parsed.mounted:
        for kilobytes in SMALL_VOLUMES_KB:
            tell(f"tmpfs of {kilobytes} KB", "full", mounted(kilobytes))
    else:
        with tempfile.TemporaryDirectory(prefix="disk-full-") as built:
            library = Path(built, "disk_fault.so")
            source = Path(__file__).with_name("disk_fault.c")
            subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
            for phase in SERVED_PHASES if parsed.served else PHASES:
                for name in parsed.errors.split(",") if parsed.only in phase.name else ():
                    tell(phase.name, name, faulty(phase, name, library, parsed.served))
            if not parsed.served and parsed.only in "outputs":
                for row in outputs(library, parsed.errors.split(",")):
                    tell(*row)
    bad = sum(not verdict.startswith("good") for verdict in verdicts)
    print(f"{len(verdicts) - bad} of {len(verdicts)} good")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
