"""Statistics of all benchmarks: interleaved measurements, medians with distribution-free intervals, steal time.

A bar is missed only if the whole interval lies on its wrong side.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.system.strict_json import to_json

LEAST_PAIRS = 7
QUICK_PAIRS = 3
MOST_DISTURBED = 5.0
MET, NOISE, MISSED = "met", "within noise", "MISSED"


@dataclass(frozen=True)
class Estimate:
    """A median, its interval from order statistics, and the extremes."""

    median: float
    low: float
    high: float
    least: float
    most: float
    coverage: float
    """Probability that the interval contains the true median, for any distribution."""


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median and its narrowest interval between order statistics with at least 95 % coverage.

    Below 6 values no interval has that coverage: then it spans all values, and `coverage` has its probability.

    >>> estimate([1, 2, 3, 4, 5, 6, 7])
    Estimate(median=4, low=1, high=7, least=1, most=7, coverage=0.984375)
    """
    ordered, number = sorted(values), len(values)
    outside, rank = _outside(number, 1), 1
    while rank + 1 <= number // 2 and _outside(number, rank + 1) <= 0.05:
        rank += 1
        outside = _outside(number, rank)
    low, high = ordered[rank - 1], ordered[number - rank]
    return Estimate(statistics.median(ordered), low, high, ordered[0], ordered[-1], 1.0 - outside)


def _outside(number: int, rank: int) -> float:
    """Return the probability that the median lies outside the `rank`-th smallest and largest of `number` values."""
    return min(1.0, 2.0 * sum(math.comb(number, k) for k in range(rank)) / 2.0**number)


def judge(found: Estimate, *, at_least: float | None = None, at_most: float | None = None) -> str:
    """Return met if the median reaches every bar, missed if the whole interval misses one, else within noise."""
    if (at_least is not None and found.high < at_least) or (at_most is not None and found.low > at_most):
        return MISSED
    kept = (at_least is None or found.median >= at_least) and (at_most is None or found.median <= at_most)
    return MET if kept else NOISE


class Disturbance:
    """Measures the share of CPU time that other virtual machines and other programs took, in percent.

    Programs that the benchmark started and waited for do not count.
    """

    def __enter__(self) -> Disturbance:
        self._before, self.steal_percent, self.others_percent = self._seconds(), 0.0, 0.0
        return self

    def __exit__(self, *exception: object) -> None:
        stolen, busy, total, local_state = (now - then for now, then in zip(self._seconds(), self._before, strict=True))
        self.steal_percent = 100.0 * stolen / max(total, 1e-9)
        self.others_percent = 100.0 * max(0.0, busy - local_state) / max(total, 1e-9)

    @staticmethod
    def _seconds() -> tuple[float, float, float, float]:
        """Return the stolen, busy and total CPU seconds of all cores, and those of this process and its children."""
        ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        user, nice, system, _, _, irq, softirq, steal = (tick / os.sysconf("SC_CLK_TCK") for tick in ticks)
        local_state = sum(os.times()[:4])
        return steal, user + nice + system + irq + softirq, sum(ticks) / os.sysconf("SC_CLK_TCK"), local_state


def interleave(
    sides: dict[str, Callable[[], float]], rounds: int, warm: bool = False, say: Callable[[str], None] | None = None
) -> dict[str, list[float]]:
    """Measure every side `rounds` times, one after another, each round in the reverse order of the one before.

    With `warm`, a first round is discarded (file caches, compiled bytecode).
    """
    measured: dict[str, list[float]] = {name: [] for name in sides}
    if warm:
        for measure in sides.values():
            measure()
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in order:
            measured[name].append(sides[name]())
        if say is not None:
            say(f"round {number + 1} of {rounds}: " + ", ".join(f"{name} {measured[name][-1]:.5g}" for name in order))
    return measured


@dataclass(frozen=True)
class Row:
    """One line of a table: two sides, the figure computed per pair, and its bar."""

    name: str
    ours: float
    peer: float | None
    found: Estimate
    bar: str
    disposition: str
    steal_percent: float
    others_percent: float
    pairs: int


def compare(
    name: str,
    ours: Callable[[], float],
    peer: Callable[[], float],
    pairs: int,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    say: Callable[[str], None] | None = None,
) -> Row:
    """Measure two sides in interleaved pairs and return the median of ours / peer."""
    with Disturbance() as by:
        measured = interleave({"ours": ours, "peer": peer}, pairs, say=say)
    return make_row(name, measured["ours"], measured["peer"], by, at_least=at_least, at_most=at_most)


def make_row(
    name: str,
    ours: list[float],
    peer: list[float],
    by: Disturbance,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    combine: Callable[[float, float], float] = lambda a, b: a / b,
) -> Row:
    """Return a row from measured pairs; `combine` computes the figure of one pair."""
    found = estimate([combine(a, b) for a, b in zip(ours, peer, strict=True)])
    bar = f">={at_least:g}" if at_least is not None else f"<={at_most:g}" if at_most is not None else "-"
    if at_least is not None and at_most is not None:
        bar = f"{at_least:g}..{at_most:g}"
    disposition = judge(found, at_least=at_least, at_most=at_most) if bar != "-" else ""
    middles = statistics.median(ours), statistics.median(peer)
    return Row(name, *middles, found, bar, disposition, by.steal_percent, by.others_percent, len(ours))


def table(rows: Sequence[Row], unit: str, figure: str = "ratio", sides: tuple[str, str] = ("ours", "peer")) -> str:
    """Format the rows as a table of at most 80 columns."""
    heads = f"{sides[0]:>7} {sides[1]:>7} {figure:>6} {'interval':>11} {'min..max':>11} {'bar':>6} verdict"
    lines = [f"{unit:<14} {heads}"]
    for row in rows:
        spans = (_span(row.found.low, row.found.high), _span(row.found.least, row.found.most))
        figures = f"{_short(row.ours):>7} {_short(row.peer):>7} {row.found.median:>6.3f}"
        line = f"{row.name:<14.14} {figures} {spans[0]:>11} {spans[1]:>11} {row.bar:>6} {row.disposition}"
        lines.append(line.rstrip())
    if rows:
        sure = f"interval of the median at {100 * rows[0].found.coverage:.3g} %"
        lines += [f"median of {rows[0].pairs} interleaved pairs; {sure}", disturbed(rows)]
    return "\n".join(lines)


def disturbed(rows: Sequence[Row]) -> str:
    """Return the disturbance of the worst row as text, with a warning if it is too high to judge by."""
    steal, others = max(row.steal_percent for row in rows), max(row.others_percent for row in rows)
    warning = ": too much, measure again" if steal + others > MOST_DISTURBED else ""
    return f"steal at most {steal:.1f} %, other programs at most {others:.1f} % of the processors{warning}"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _span(low: float, high: float) -> str:
    return f"{low:.2f}..{high:.2f}"


def flags(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, help=f"interleaved pairs [{LEAST_PAIRS}; with --quick {QUICK_PAIRS}]")
    parser.add_argument("--quick", action="store_true", help="short and rough: only tests the script")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--verbose", action="store_true", help="print every pair as it is measured")
    return parser


def num_pairs(parsed: argparse.Namespace) -> int:
    """Return the number of pairs; print a note if they are too few to judge by."""
    pairs: int = parsed.pairs or (QUICK_PAIRS if parsed.quick else LEAST_PAIRS)
    if pairs < LEAST_PAIRS:
        print(f"{pairs} pairs are fewer than {LEAST_PAIRS}: rough figures, not to be quoted")
    return pairs


def teller(parsed: argparse.Namespace, name: str) -> Callable[[str], None] | None:
    """Return a function that prints each round, or None without `--verbose`."""
    return (lambda text: print(f"  {name}: {text}", flush=True)) if parsed.verbose else None


def close(parsed: argparse.Namespace, benchmark: str, rows: Sequence[Row], **extra: Any) -> int:
    """Print the JSON line with `--json` and return the exit code."""
    if parsed.json:
        print(to_json({"benchmark": benchmark, "rows": [asdict(row) for row in rows], **extra}))
    return int(parsed.strict and any(row.disposition == MISSED for row in rows))
