"""Flip random bits in every file of a run folder, and let every verb that reads it answer.

    python benchmarks/bit_flips.py [--flips N] [--seed N] [--verbs NAME ...] [--files PATTERN ...] [--old] [--strict]

Each trial copies a run folder, flips one to three bits of one file and calls the command line in this process. An
answer is right if it is that of the undamaged folder, or says in a line what cannot be read; it is wrong if it is a
traceback, another answer without such a line, or weights that the run never had. The last three must be 0.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pairs

from paceline.cli.main import main
from paceline.runs.arrival_log import RECORD_BYTES
from paceline.system.sealed_weights import check_weights
from paceline.system.strict_json import seal, to_json

TASK = """
import torch, paceline
def build():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(7))
    y = (x.sum(1) > 0).long()
    test = x[:16], y[:16]
    return paceline.Task(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, train=(x, y), test=test)
"""
PAGE = "the page: "
WEIGHTS = "the weights it wrote: "
STEPS, CUT = 48, 16
TRAIN = (
    *("--task", "task.py:build", "--strategy", "classic", "--steps", str(STEPS), "--batch-size", "8", "--lr", "0.05"),
    *(
        "--threads",
        "1",
        "--snapshots",
        "0.3",
        "--eval-every",
        "1",
        "--average",
        "16",
        "--checkpoint-every",
        "0.001",
        "--keep",
        "100",
    ),
)
SAME, ONE_LINE, NOTED, UNNOTICED, TRACEBACK, WRONG = (
    *("same answer", "refused in a line", "answered, with a note", "UNNOTICED", "TRACEBACK", "WRONG WEIGHTS"),
)
BAD = (UNNOTICED, TRACEBACK, WRONG)
NOTES = re.compile(
    r"cannot be read|damaged|ignored|using an older one|cut off|torn|no longer counts|missing|was changed|config.toml: "
)
TIMED = re.compile(r"^ *\d+ %|^training time|samples/s")
INTERRUPTED = 130
MEMORY = Path("/dev/shm")  # files in memory, because every run syncs its own
DATE = 1_700_000_000.0
WHOLE, KILLED = "whole", "killed"  # the two run folders: one that finished, one that was killed and can be resumed


def make_runs(folder: Path, old: bool = False) -> None:
    """Train a run to its end in `folder`/pristine, and cut a copy to what a killed run leaves.

    `old`: without the checksums of rows, results and weights, as older versions wrote them.
    """
    Path(folder / "task.py").write_text(TASK)
    with quiet(), contextlib.chdir(folder):
        assert main(["train", *TRAIN, "--runs", "pristine", "--name", WHOLE]) == 0
    whole, killed = folder / "pristine" / WHOLE, folder / "pristine" / KILLED
    (whole / "server.json").write_text(to_json(seal({"address": "127.0.0.1:29500", "pid": 1, "by_hand": False})))
    shutil.copytree(whole, killed)
    for name in ("result.json", "weights.safetensors", "live.safetensors", "server.json"):
        (killed / name).unlink()
    log, events = killed / "arrivals.log", killed / "events.jsonl"
    for run, last in ((whole, STEPS), (killed, STEPS - CUT)):
        checkpoints = sorted(path for path in (run / "checkpoints").iterdir() if path.name.isdecimal())
        kept = [path for path in checkpoints if int(path.name) <= last][-2:]
        for path in set(checkpoints) - set(kept):
            shutil.rmtree(path)
    log.write_bytes(log.read_bytes()[: -CUT * RECORD_BYTES])
    events.write_bytes(b"".join(events.read_bytes().splitlines(keepends=True)[:-CUT]))
    for file in folder.glob("pristine/**/*.json*") if old else ():
        file.write_text(re.sub(r', "crc32": "\w+"|,\s*"sha256_of_the_rest": "\w+"', "", file.read_text()))
    for file in folder.glob("pristine/*/*.safetensors") if old else ():
        file.write_bytes(file.read_bytes().replace(b'"sha256"', b'"sha257"'))


@contextlib.contextmanager
def quiet() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Capture both streams."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def call(*arguments: str) -> tuple[int, str]:
    """Run one verb in this process; return its exit code and all it printed."""
    with quiet() as (out, err):
        code = main(list(arguments))
    return code, out.getvalue() + err.getvalue()


def without_times(text: str) -> str:
    """Return the text without lines that hold times of this machine."""
    return "\n".join(line for line in text.splitlines() if not TIMED.search(line))


def _file(path: str) -> str:
    """Return what a verb wrote, and remove it."""
    content = Path(path).read_bytes() if Path(path).exists() else b""
    Path(path).unlink(missing_ok=True)
    return (gzip.decompress(content) if path.endswith(".gz") else content).hex()


def _report(run: str) -> tuple[int, str]:
    code, text = call("report", run, "-o", "page.html")
    return code, text + _file("page.html")


def _trace(run: str) -> tuple[int, str]:
    code, text = call("trace", run, "-o", "trace.json")
    return code, text + _file("trace.json")


def _export(run: str) -> tuple[int, str]:
    code, text = call("export", run, "--to", "csv")
    return code, text + _file(f"{run}/metrics.csv")


def _landscape(run: str) -> tuple[int, str]:
    code, text = call("landscape", run, "--grid", "3", "--samples", "16", "-o", "picture")
    Path("picture/landscape.json").unlink(missing_ok=True)  # it holds seconds
    return code, without_times(text) + _file("picture/landscape.csv")


def _watch(run: str) -> tuple[int, str]:
    """What the live page, /metrics and the terminal show of all runs of a folder."""
    from paceline.reports.html import render
    from paceline.reports.watch.prometheus import exposition
    from paceline.reports.watch.sources import FolderSource

    code, text = call("watch", run, "--terminal")
    source = FolderSource(Path(run).parent)
    digests = [digest for digest in source.poll().values() if digest is not None]
    notes = "".join(note for digest in digests for note in digest["notes"])
    statuses = [snapshot.status for snapshot in source.run_snapshots()]
    return code, text + notes + PAGE + render(digests) + exposition(statuses)


def _replay_until(run: str) -> tuple[int, str]:
    code, text = call("replay", run, "--until", "30", "--output", "until.safetensors")
    return code, text + (WEIGHTS + _file("until.safetensors") if code in (0, 1) else "")


def _resume(run: str) -> tuple[int, str]:
    """Resume the killed run; the answer is the digest of its weights."""
    code, text = call("resume", run)
    if code:
        return code, text
    weights = Path(run, "weights.safetensors")
    check_weights(weights)
    return code, without_times(text) + WEIGHTS + weights.read_bytes().hex()


VERBS: dict[str, Callable[[str], tuple[int, str]]] = {
    "list": lambda run: call("list", str(Path(run).parent)),
    "compare": lambda run: call("compare", run),
    "status": lambda run: call("status", run),
    "report": _report,
    "trace": _trace,
    "export": _export,
    "watch": _watch,
    "replay": lambda run: call("replay", run),
    "replay --until": _replay_until,
    "landscape": _landscape,
    "resume": _resume,
}
NEEDS = {"resume": KILLED}  # the other verbs read both; it is the last, because it changes the folder


class Trial:
    """A copy of the run folders at a fixed place, so that equal answers are equal texts."""

    def __init__(self, folder: Path) -> None:
        self._pristine, self._copy = folder / "pristine", folder / "copy"
        self.files = sorted(
            str(file.relative_to(self._pristine)) for file in self._pristine.rglob("*.*") if file.is_file()
        )
        self._right: dict[tuple[str, str], tuple[int, str]] = {}

    def restore(self) -> None:
        """Make a fresh copy, with fixed dates."""
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._pristine, self._copy)
        for file in self._copy.rglob("*"):
            os.utime(file, (DATE, DATE))

    def flip(self, name: str, generator: random.Random) -> None:
        """Flip one to three bits of a file."""
        file = self._copy / name
        content = bytearray(file.read_bytes())
        for _ in range(generator.randint(1, 3)):
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        file.write_bytes(content)
        os.utime(file, (DATE, DATE))

    def right(self, verb: str, run: str) -> tuple[int, str]:
        """Return the answer on the undamaged folder."""
        if (verb, run) not in self._right:
            self.restore()
            self._right[verb, run] = VERBS[verb](f"copy/{run}")
        return self._right[verb, run]

    def judge(self, verb: str, run: str) -> tuple[str, str]:
        """Return how the verb answers on the damaged copy, and what it said."""
        try:
            code, text = VERBS[verb](f"copy/{run}")
        except (Exception, SystemExit) as error:  # whatever a verb raises is a finding
            return TRACEBACK, f"{type(error).__name__}: {error}"
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if (code, text) == self._right[verb, run]:
            return SAME, text
        shown = [line for line in text.splitlines() if "paceline: " in line]
        if code == 2:
            return (ONE_LINE if len(shown) == 1 else UNNOTICED), text
        if WEIGHTS in text and text.partition(WEIGHTS)[2] != self._right[verb, run][1].partition(WEIGHTS)[2]:
            return WRONG, text
        return (NOTED if NOTES.search(text.partition(PAGE)[0]) else UNNOTICED), text


def measure(
    folder: Path,
    flips: int,
    seed: int,
    verbs: list[str],
    patterns: list[str],
    tell: Callable[[str], None],
    bad: Sequence[str] = BAD,
) -> dict[tuple[str, str], Counter[str]]:
    """Return the number of answers of each kind, by verb and file."""
    found: dict[tuple[str, str], Counter[str]] = {}
    with contextlib.chdir(folder):
        trial = Trial(folder)
        files = [file for file in trial.files if not patterns or any(re.search(one, file) for one in patterns)]
        for number in range(flips):
            name = files[number % len(files)]
            run = Path(name).parts[0]
            asked = [verb for verb in verbs if NEEDS.get(verb, run) == run]
            for verb in asked:
                trial.right(verb, run)
            trial.restore()
            trial.flip(name, random.Random(f"{seed} {number}"))
            for verb in asked:
                kind, text = trial.judge(verb, run)
                found.setdefault((verb, name), Counter())[kind] += 1
                if kind in bad:
                    tell(f"flip {number} of {name}, {verb}: {kind}: {text[:600]}")
    return found


def table(found: dict[tuple[str, str], Counter[str]], verbs: list[str]) -> str:
    """Return a row per file and a column per verb: same answers + refusals + answers with a note, then what is bad."""
    rows = [["file", *verbs]]
    for name in sorted({name for _, name in found}):
        cells = []
        for verb in verbs:
            counts = found.get((verb, name), Counter())
            bad = sum(counts[kind] for kind in BAD)
            cells.append(f"{counts[SAME]}+{counts[ONE_LINE]}+{counts[NOTED]}" + (f" !{bad}" if bad else ""))
        rows.append([name, *cells])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main_of_benchmark() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbs", nargs="+", default=list(VERBS), choices=list(VERBS))
    parser.add_argument("--old", action="store_true", help="files without checksums; the unnoticed do not count")
    parser.add_argument("--files", nargs="+", default=[])
    parsed = parser.parse_args()
    import paceline.studies.landscape.figure as figure

    figure.draw = lambda *_: None  # the picture takes matplotlib seconds
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="paceline-bit-flips-", dir=MEMORY if MEMORY.is_dir() else None) as home:
        make_runs(Path(home), parsed.old)
        bad_kinds = BAD[1:] if parsed.old else BAD
        flips = parsed.flips // 4 if parsed.quick else parsed.flips
        found = measure(
            Path(home), flips, parsed.seed, parsed.verbs, parsed.files, lambda text: print(text, flush=True), bad_kinds
        )
    print(table(found, parsed.verbs))
    total: Counter[str] = Counter()
    for counts in found.values():
        total.update(counts)
    kinds = (SAME, ONE_LINE, NOTED, *BAD)
    print(f"{flips} flips: " + ", ".join(f"{total[kind]} {kind}" for kind in kinds))
    print(f"{time.perf_counter() - began:.0f} s")
    bad = sum(total[kind] for kind in bad_kinds)
    if parsed.json:
        print(to_json({"benchmark": "bit_flips", "flips": flips, **{kind: total[kind] for kind in kinds}}))
    return 1 if parsed.strict and bad else 0


if __name__ == "__main__":
    sys.exit(main_of_benchmark())
