"""Make `docs/scale.md` and its figures: the speed of each strategy on 10 to 10,000 simulated workers.

    python tools/make_scale_page.py            # needs the extra `report`; about five minutes on one core

The same command makes the same bytes.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scale_model as model
from scale_figures import TITLES, Cells, draw_all, label
from scale_model import Cell, Found

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = "python tools/make_scale_page.py"
TEMPLATE = Path(__file__).with_name("scale_page.md")


def all_cells() -> list[Cell]:
    axes = itertools.product(model.STRATEGIES, model.WORKERS, model.GBITS, model.CONDITIONS)
    return [Cell(*place) for place in axes]


def plain(number: float) -> str:
    """Format a number with three significant digits.

    >>> plain(123456.0), plain(1.234), plain(0.0)
    ('123,000', '1.23', '0')
    """
    if number == 0:
        return "0"
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def percent(share: float) -> str:
    """Format a share in percent, with a decimal below 10 %.

    >>> percent(0.775), percent(0.0123), percent(0.0002)
    ('78 %', '1.2 %', '<0.1 %')
    """
    if share < 0.001:
        return "<0.1 %"
    return f"{100 * share:.{int(share < 0.1)}f} %"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] + ["---:"] * (len(head) - 1), *rows]]
    return "\n".join(lines)


def rate_table(cells: Cells, condition: str, gbits: int) -> str:
    """Return the table of samples per second and computing share by strategy."""
    rows = []
    for strategy in model.STRATEGIES:
        found = [cells[Cell(strategy, workers, gbits, condition)] for workers in model.WORKERS]
        shown = ["stalls" if one is None else f"{plain(one.rate)} ({percent(one.computing)})" for one in found]
        rows.append([f"`{label(strategy)}`", *shown])
    rows.append(["never waiting", *(plain(model.ideal_rate(workers)) for workers in model.WORKERS)])
    return table([f"{gbits} Gbit/s, {TITLES[condition]}", *(f"{n:,} workers" for n in model.WORKERS)], rows)


def staleness_table(cells: Cells, gbits: int) -> str:
    """Return the table of mean staleness for strategies that have any."""
    rows = []
    for strategy, condition in itertools.product(("bounded", "async"), model.CONDITIONS):
        found = [cells[Cell(strategy, workers, gbits, condition)] for workers in model.WORKERS]
        shown = ["stalls" if one is None else plain(one.staleness) for one in found]
        rows.append([f"`{label(strategy)}`, {TITLES[condition]}", *shown])
    return table([f"mean staleness, {gbits} Gbit/s", *(f"{n:,} workers" for n in model.WORKERS)], rows)


def fed_table() -> str:
    """Return the table of workers that one server can feed, by model size."""
    rows = []
    for name, parameters in (("LeNet5", 61_706), ("CNN", 1_200_000), ("ResNet50", model.PARAMETERS)):
        server = model.SERVER_SECONDS * parameters / model.PARAMETERS
        links = [Cell("async", 1, gbits).link for gbits in model.GBITS]
        fed = [model.workers_fed(4 * parameters, model.STEP_SECONDS, link, server) for link in links]
        rows.append([f"{name}-size, {plain(parameters)} parameters", *(f"{number:,.0f}" for number in fed)])
    return table(["workers one server feeds", *(f"{gbits} Gbit/s" for gbits in model.GBITS)], rows)


def ring_table(cells: Cells) -> str:
    """Return the table of simulated ring rounds and their formula."""
    rows = []
    for gbits, workers in itertools.product(model.GBITS, model.WORKERS):
        cell = Cell("allreduce", workers, gbits)
        found = cells[cell]
        assert found is not None
        simulated = workers * model.BATCH / found.rate - model.STEP_SECONDS
        bandwidth = 2 * (workers - 1) / workers * model.NBYTES / cell.link.bandwidth
        latency = 2 * (workers - 1) * model.LATENCY
        gap = abs(simulated / (bandwidth + latency) - 1)
        assert gap < 1e-6, f"{cell}: the ring takes {simulated} s, its formula {bandwidth + latency}"
        rows.append([f"{gbits} Gbit/s, {workers:,} workers", *(f"{s:.4f}" for s in (bandwidth, latency, simulated))])
    return table(["exchange, seconds", "2(n-1)/n bytes/bandwidth", "2(n-1) latency", "simulated"], rows)


def star_gap(cells: Cells) -> float:
    """Return the largest difference between a simulated `sync` round and its formula."""
    gaps = []
    for gbits, workers in itertools.product(model.GBITS, model.WORKERS):
        cell = Cell("sync", workers, gbits)
        found = cells[cell]
        assert found is not None
        gaps.append(abs(workers * model.BATCH / found.rate / model.round_seconds(cell) - 1))
    return max(gaps)


def chosen(cells: Cells, workers: int, gbits: int, condition: str) -> str:
    """Return the fastest strategy that sends gradients, and `local` if it is faster."""
    found = {s: cells[Cell(s, workers, gbits, condition)] for s in model.STRATEGIES}
    rates = {strategy: one.rate for strategy, one in found.items() if one is not None}
    best = max((s for s in rates if s != "local"), key=lambda s: rates[s])
    text = f"`{label(best)}` {plain(rates[best])}"
    if rates["local"] > rates[best]:
        text += f"; `{label('local')}` {plain(rates['local'])}"
    return text


def choice_table(cells: Cells, condition: str) -> str:
    rows = [
        [f"{workers:,} workers", *(chosen(cells, workers, gbits, condition) for gbits in model.GBITS)]
        for workers in model.WORKERS
    ]
    return table([TITLES[condition], *(f"{gbits} Gbit/s" for gbits in model.GBITS)], rows)


class Ask:
    """Looks up a figure for a template field such as `{rate:allreduce 100 10 even}`."""

    def __init__(self, answer: Callable[..., str]) -> None:
        self._answer = answer

    def __format__(self, place: str) -> str:
        return self._answer(*(int(word) if word.isdecimal() else word for word in place.split()))


def page(cells: Cells) -> str:
    """Return the template with every figure filled in."""

    def found(strategy: str, workers: int, gbits: int, condition: str = "even") -> Found:
        one = cells[Cell(strategy, workers, gbits, condition)]
        assert one is not None, "the template names only cells with figures"
        return one

    def seconds(*place: Any) -> str:
        """Return the seconds per round of all workers."""
        return plain(place[1] * model.BATCH * Cell(*place).steps_a_push / found(*place).rate)

    def fed(gbits: int) -> str:
        link = Cell("async", 1, gbits).link
        return f"{model.workers_fed(model.NBYTES, model.STEP_SECONDS, link, model.SERVER_SECONDS):.0f}"

    def limit(gbits: int) -> str:
        link = Cell("async", 1, gbits).link
        return plain(model.BATCH * model.star_limit(model.NBYTES, link, model.SERVER_SECONDS))

    return TEMPLATE.read_text(encoding="utf-8").format(
        command=COMMAND,
        num_cells=len(cells),
        pushes=sum(cell.pushes for cell, one in cells.items() if one is not None) / 1e6,
        model=model,
        parameters=model.PARAMETERS / 1e6,
        megabytes=model.NBYTES / 1e6,
        step=1000 * model.STEP_SECONDS,
        latency=1000 * model.LATENCY,
        server=1000 * model.SERVER_SECONDS,
        rate=Ask(lambda *place: plain(found(*place).rate)),
        share=Ask(lambda *place: percent(found(*place).computing)),
        round=Ask(seconds),
        fed=Ask(fed),
        limit=Ask(limit),
        choice=Ask(lambda condition: choice_table(cells, condition)),
        rates=Ask(lambda condition, gbits: rate_table(cells, condition, gbits)),
        staleness=Ask(lambda gbits: staleness_table(cells, gbits)),
        fed_table=fed_table(),
        ring_table=ring_table(cells),
        star_gap=star_gap(cells),
    )


def main() -> int:
    begun = time.perf_counter()
    cells: Cells = {}
    for cell in all_cells():
        cells[cell] = model.simulate(cell)
        print(f"{time.perf_counter() - begun:6.0f} s  {cell}", file=sys.stderr)
    draw_all(cells, DOCS / "figures")
    (DOCS / "scale.md").write_text(page(cells), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
