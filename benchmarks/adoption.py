"""Unmodified public programs, and the same with at most six lines added for Paceline: metrics, speed and faults.

    python benchmarks/adoption.py --programs DIR [--only mnist,nanogpt] [--seeds N] [--part metric,speed,faults] \\
        [--kinds plain,sync,local:20]

DIR holds the programs: pytorch-examples/{mnist,vae,word_language_model}, nanogpt, makemore, dlrm; a torchvision in
DIR/stand-in is used if there is one. Everything runs in temporary copies, each process with one thread.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pairs
from processes import end, ended
from program_runs import PATIENCE_SECONDS, VARIANTS, Bench, Variant
from programs import MAX_LINES, PROGRAMS, Program

BUILT_IN = tuple(VARIANTS)
PARTS = ("metric", "speed", "faults")
ALONE_BAR, TOGETHER_BAR = 0.97, 0.90
"""Minimum throughput: alone, of the plain program; two asynchronous workers, of two plain programs."""
TOGETHER = ("nanogpt", "mnist")
ASYNC_TOLERANCE, OTHERS_TOLERANCE = 0.01, 0.02
SECONDS, QUICK_SECONDS = 10.0, 3.0
STEPS_BEFORE_FAULT, QUICK_STEPS_BEFORE_FAULT = 40, 10
STUDENT = {1: 12.71, 2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306, 10: 2.228, 12: 2.179, 14: 2.145, 16: 2.120, 18: 2.101}
"""Two-sided 95 % quantiles of Student's t, by degrees of freedom."""


@dataclass(frozen=True)
class Verdict:
    """One bar of one program."""

    program: str
    bar: str
    figure: str
    disposition: str


def seed_noise(first: list[float], second: list[float]) -> float | None:
    """Return the largest difference of two means that seeds explain (95 %), or None with one seed.

    >>> round(seed_noise([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), 2)
    2.27
    """
    if len(first) < 2:
        return None
    spread = (statistics.variance(first) + statistics.variance(second)) / 2.0
    return STUDENT.get(2 * (len(first) - 1), 2.0) * (spread * 2.0 / len(first)) ** 0.5


def same(name: str, bar: str, ours: list[float], theirs: list[float]) -> Verdict:
    """Judge whether two means differ by no more than seeds explain."""
    difference, noise = statistics.mean(ours) - statistics.mean(theirs), seed_noise(ours, theirs)
    if noise is None:
        return Verdict(name, bar, f"{difference:+.4f}", pairs.MET if not difference else "one seed: no noise known")
    disposition = pairs.MET if abs(difference) <= noise else pairs.MISSED
    return Verdict(name, bar, f"{difference:+.4f}, noise {noise:.4f}", disposition)


def near_best(
    program: Program, name: str, bar: str, ours: float, others: list[float], tolerance: float = ASYNC_TOLERANCE
) -> Verdict:
    """Judge whether ours is at most `tolerance` worse than the best of the others, and within the absolute bar."""
    best = max(others) if program.higher_is_better else min(others)
    worse = (best / ours if program.higher_is_better else ours / best) - 1.0
    at_most = program.at_most if bar == "async" else None
    good = worse <= tolerance and (at_most is None or ours <= at_most)
    limit = "" if at_most is None else f", at most {at_most:g}"
    return Verdict(name, bar, f"{ours:.4f}, {100 * worse:+.2f} % worse{limit}", pairs.MET if good else pairs.MISSED)


def measure_metrics(bench: Bench, kinds: list[str], seeds: int) -> list[Verdict]:
    """Print a line of metrics for each seed and their means; return the verdicts."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for seed in range(1, seeds + 1):
        for kind in kinds:
            found[kind].append(bench.metric(kind, seed)[0])
        print(_line(bench.name, str(seed), [values[-1] for values in found.values()]), flush=True)
    means = {kind: statistics.mean(values) for kind, values in found.items()}
    print(_line("", "mean", list(means.values())) + f"  {bench.program.unit}")
    if seeds > 1:
        print(_line("", "std", [statistics.stdev(values) for values in found.values()]))
    best, verdicts = [means[kind] for kind in ("plain", "sync") if kind in means], []
    for ours, theirs in (("alone", "plain"), ("sync", "2x batch"), ("allreduce", "sync")):
        if ours in found and theirs in found:
            verdicts.append(same(bench.name, f"{ours} = {theirs}", found[ours], found[theirs]))
    for kind in kinds:
        if kind not in (*BUILT_IN, "allreduce"):
            verdicts.append(near_best(bench.program, bench.name, kind, means[kind], best, OTHERS_TOLERANCE))
    if "async" in found:
        verdicts.append(near_best(bench.program, bench.name, "async", means["async"], best))
    return verdicts


def _line(name: str, seed: str, values: list[float]) -> str:
    return f"{name:<9} {seed:>4} " + " ".join(f"{value:>9.4f}" for value in values)


def measure_speed(bench: Bench, number: int, parsed: argparse.Namespace) -> list[pairs.Row]:
    """Return the throughput alone and, for two of the programs, on two workers, of that of plain programs."""
    seconds = QUICK_SECONDS if bench.quick else SECONDS
    cases = [("alone", 1, ALONE_BAR)]
    if bench.name in TOGETHER and len(os.sched_getaffinity(0)) > 1:
        cases.append(("async", 2, TOGETHER_BAR))
    rows = []
    for kind, copies, bar in cases:
        name = f"{bench.name} {kind}"
        ours = functools.partial(bench.rate, kind, 1, seconds)
        plain = functools.partial(bench.rate, "plain", copies, seconds)
        rows.append(pairs.compare(name, ours, plain, number, at_least=bar, say=pairs.teller(parsed, name)))
    return rows


def measure_faults(bench: Bench, seeds: int) -> list[Verdict]:
    """Replay every run, kill a worker, and resume in mid-epoch."""
    verdicts = []
    steps = QUICK_STEPS_BEFORE_FAULT if bench.quick else STEPS_BEFORE_FAULT
    for kind in ("sync", "async"):
        codes = [bench.verb("replay", bench.metric(kind, seed)[1]) for seed in range(1, seeds + 1)]
        verdicts.append(_exactly(bench.name, f"replay, {kind}", codes.count(0), seeds))
    killed = bench.start("async", 1, ("--restart-workers", "1"))
    with ended([killed.process], within=PATIENCE_SECONDS):
        victim = killed.wait_for_steps(steps, 2)[-1]
        os.kill(victim, signal.SIGKILL)
        killed.finish()
    others = [bench.metric("plain", 1)[0], bench.metric("sync", 1)[0]]
    verdicts.append(near_best(bench.program, bench.name, "worker killed", bench.read_metric(killed, victim), others))
    verdicts.append(_exactly(bench.name, "replay, killed", int(bench.verb("replay", killed) == 0), 1))
    stopped = bench.start("sync", 1)
    with ended([stopped.process], within=PATIENCE_SECONDS):
        stopped.wait_for_steps(steps, 2)
        end(stopped.process)
    resumed = bench.verb("resume", stopped)
    equal = resumed == 0 and stopped.sha256() == bench.metric("sync", 1)[1].sha256()
    verdicts.append(_exactly(bench.name, "resume, sync", int(equal), 1))
    return verdicts


def _exactly(name: str, bar: str, good: int, number: int) -> Verdict:
    return Verdict(name, bar, f"{good} of {number} identical", pairs.MET if good == number else pairs.MISSED)


def chosen(parsed: argparse.Namespace) -> list[str]:
    """Return the programs that can run here; print one line for each that lacks a package or its folder."""
    names = parsed.only.split(",") if parsed.only else list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        sys.exit(f"--only {','.join(unknown)}: choose from {', '.join(PROGRAMS)}")
    able = []
    for name in names:
        program = PROGRAMS[name]
        if not (parsed.programs / program.folder / program.script).is_file():
            print(f"{name}: skipped, {parsed.programs / program.folder / program.script} does not exist")
        elif missing := program.missing(parsed.programs):
            print(f"{name}: skipped, a package is missing: pip install -c constraints.txt {' '.join(missing)}")
        else:
            able.append(name)
    return able


def describe_lines(names: list[str]) -> str:
    """Return how many lines are added to each program."""
    too_many = [name for name in names if PROGRAMS[name].num_added > MAX_LINES]
    counts = ", ".join(f"{name} {PROGRAMS[name].num_added}" for name in names)
    return f"added lines: {counts} (at most {MAX_LINES}{': MISSED' if too_many else ''})"


def main() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument("--programs", type=Path, required=True, metavar="DIR", help="folder of the public programs")
    parser.add_argument("--only", metavar="NAME,NAME", help=f"programs: {', '.join(PROGRAMS)}")
    parser.add_argument("--seeds", type=int, help="seeds 1 to N [3; with --quick 1]")
    parser.add_argument(
        "--part", default=",".join(PARTS), metavar="PART,PART", help="parts, in this order [%(default)s]"
    )
    parser.add_argument("--kinds", metavar="KIND,KIND", help=f"ways to run: {', '.join(BUILT_IN)}, any strategy")
    parsed = parser.parse_args()
    seeds = parsed.seeds or (1 if parsed.quick else 3)
    kinds = parsed.kinds.split(",") if parsed.kinds else list(BUILT_IN)
    VARIANTS.update({kind: Variant(adopted=True, strategy=kind) for kind in kinds if kind not in BUILT_IN})
    parts = parsed.part.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        sys.exit(f"--part {','.join(unknown)}: choose from {', '.join(PARTS)}")
    names = chosen(parsed)
    print(describe_lines(names))
    verdicts: list[Verdict] = []
    rows: list[pairs.Row] = []
    benches: list[Bench] = []
    number = pairs.num_pairs(parsed) if "speed" in parts else 0
    if "metric" in parts:
        print(f"{'program':<9} {'seed':>4} " + " ".join(f"{kind:>9}" for kind in kinds))
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            part = ""
            try:
                bench = Bench(name, parsed.programs, Path(root), parsed.quick)
                benches.append(bench)
                for part in parts:
                    if part == "metric":
                        verdicts += measure_metrics(bench, kinds, seeds)
                    elif part == "speed":
                        rows += measure_speed(bench, number, parsed)
                    else:
                        verdicts += measure_faults(bench, seeds)
            except RuntimeError as error:
                print(error)
                verdicts.append(Verdict(name, part, "failed, see above", pairs.MISSED))
    for verdict in verdicts:
        print(f"{verdict.program:<9} {verdict.bar:<16} {verdict.figure:<38} {verdict.disposition}")
    if rows:
        print(pairs.table(rows, "samples/s", sides=("ours", "plain")))
    metrics = {bench.name: bench.figures() for bench in benches}
    return pairs.close(parsed, "adoption", [*rows, *verdicts], seeds=seeds, metrics=metrics)


if __name__ == "__main__":
    sys.exit(main())
