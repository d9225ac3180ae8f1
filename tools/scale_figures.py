"""Draw the figures of `docs/scale.md`: legible in grey and for colour-blind readers, the same bytes every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import scale_model as model
from scale_model import Cell, Found

Cells = dict[Cell, Found | None]

COLOURS = {
    "sync": "#0072B2",
    "backup": "#56B4E9",
    "bounded": "#E69F00",
    "async": "#D55E00",
    "allreduce": "#009E73",
    "local": "#CC79A7",
}
"""The palette of Okabe and Ito, distinct for colour-blind readers; the markers differ as well."""
MARKERS = {"sync": "o", "backup": "s", "bounded": "D", "async": "v", "allreduce": "^", "local": "P"}
SIZES = {"sync": 9, "backup": 5, "bounded": 9, "async": 5, "allreduce": 7, "local": 7}
"""Marker sizes: if two strategies coincide, the smaller marker lies inside the larger."""
TITLES = {
    "even": "all alike",
    "stragglers": "5 % four times slower",
    "crashes": "a crash an hour each",
}


def label(strategy: str) -> str:
    """Return the strategy's name for the legend, close to the value of `--strategy`."""
    numbers = {"backup": ":5 %", "bounded": f":{model.BOUND}", "local": f":{model.LOCAL_STEPS}"}
    return strategy + numbers.get(strategy, "")


def figure(cells: Cells, file: Path, panels: list[tuple[str, int, str]], value: Any, y: str, ideal: Any = None) -> None:
    """Draw a panel per (title, gbits, condition): `value` of a Found over the workers, both axes logarithmic."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "paceline", "font.size": 10, "axes.spines.top": False})
    matplotlib.rcParams["axes.spines.right"] = False
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, len(panels), figsize=(1 + 3.1 * len(panels), 4.0), sharey=True, squeeze=False)
    for axis, (title, gbits, condition) in zip(axes[0], panels, strict=True):
        for strategy in model.STRATEGIES:
            found = {n: cells[Cell(strategy, n, gbits, condition)] for n in model.WORKERS}
            points = [(n, value(one)) for n, one in found.items() if one is not None and value(one) > 0]
            if points:
                draw_line(axis, strategy, points)
        if ideal is not None:
            axis.plot(model.WORKERS, [ideal(n) for n in model.WORKERS], "--", color="0.4", label="never waiting")
        axis.set(xscale="log", yscale="log", title=title, xlabel="workers", xticks=model.WORKERS)
        axis.set_xticklabels([f"{n:,}" for n in model.WORKERS])
        axis.yaxis.set_major_formatter(lambda tick, _: f"{tick:,.0f}" if tick >= 1 else f"{tick:g}")
        axis.minorticks_off()
        axis.grid(color="0.88", linewidth=0.7)
    axes[0][0].set_ylabel(y)
    lines, labels = axes[0][0].get_legend_handles_labels()
    drawn.legend(lines, labels, loc="upper center", ncols=len(labels), frameon=False, handlelength=1.6, columnspacing=1)
    drawn.tight_layout(rect=(0, 0, 1, 0.92), w_pad=1.8)
    drawn.savefig(file, metadata={"Date": None})
    pyplot.close(drawn)


def draw_line(axis: Any, strategy: str, points: list[tuple[int, float]]) -> None:
    hollow = "white" if SIZES[strategy] == 9 else COLOURS[strategy]
    marks = {"marker": MARKERS[strategy], "markersize": SIZES[strategy], "markerfacecolor": hollow}
    axis.plot(*zip(*points, strict=True), color=COLOURS[strategy], linewidth=1.4, label=label(strategy), **marks)


def draw_all(cells: Cells, folder: Path) -> None:
    """Draw every figure of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    links = [(f"{gbits} Gbit/s", gbits, "even") for gbits in model.GBITS]
    figure(cells, folder / "scale_rate.svg", links, lambda found: found.rate, "samples/s", model.ideal_rate)
    conditions = [(TITLES[name], 100, name) for name in model.CONDITIONS]
    figure(
        cells,
        folder / "scale_computing.svg",
        conditions,
        lambda found: 100 * found.computing,
        "computing at 100 Gbit/s, % of workers' time",
    )
    stale = [(f"10 Gbit/s, {TITLES[name]}", 10, name) for name in ("even", "stragglers")]
    figure(cells, folder / "scale_staleness.svg", stale, lambda found: found.staleness, "mean staleness, updates")
