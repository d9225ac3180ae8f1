"""Figure of a loss landscape with the training paths, drawn from landscape.json and the grid of losses."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

from paceline.errors import UserError

LEVELS = 16
CONTOUR_MARGIN = 0.5  # height of the contours above the paths, as a share of the loss the paths descend
LABELLED = 3  # every third contour line is labelled with its loss
STYLES = (
    ("#d62728", "-", "o"),
    ("#111111", "--", "s"),
    ("#ff9d0a", "-.", "^"),
    ("#c2189b", ":", "D"),
    ("#8c564b", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("#5b2a86", (0, (1, 1)), "P"),
)
"""Colour, line and marker per run: runs differ without colour as well."""
OFFSETS = ((5, 6), (5, -12), (-11, 6), (-11, -12))  # offsets of each run's epoch labels from their snapshots


def draw(facts: dict[str, Any], x: list[float], y: list[float], losses: list[list[float]], path: Path) -> None:
    """Draw the figure to `path`; raise UserError if matplotlib is not installed."""
    try:
        figures = importlib.import_module("matplotlib.figure")
        layout = importlib.import_module("matplotlib.layout_engine").ConstrainedLayoutEngine
    except ModuleNotFoundError:
        install = "the figure needs matplotlib, which is not installed: pip install 'paceline[report]'"
        numbers = f"its numbers are in {path.parent}/landscape.csv and landscape.json"
        raise UserError(f"{install}; {numbers}") from None
    height = min(9.0, 5.9 * (y[-1] - y[0]) / (x[-1] - x[0]) + 1.7)  # inches; the same scale on both axes
    figure = figures.Figure(figsize=(7.5, height), dpi=150, layout=layout(compress=True))
    axes = figure.add_subplot()
    _draw_surface(figure, axes, facts, x, y, losses)
    for number, run in enumerate(facts["runs"]):
        _draw_path(axes, run, number, labels=_labels(facts["runs"]))
    first, second = facts["explained"]
    axes.set_xlabel(f"first principal direction ({100 * first:.1f} % of the variance)")
    axes.set_ylabel(f"second ({100 * second:.1f} %)")
    axes.set_aspect("equal")
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(y[0], y[-1])
    axes.set_title(f"{facts['trained']}, {facts['on']} loss of {facts['samples']:,} samples\n", fontsize=10)
    axes.text(0.5, 1.02, _faithfulness(facts), transform=axes.transAxes, ha="center", fontsize=7.5, color="#444444")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False, handlelength=4)
    figure.savefig(path, bbox_inches="tight")


def _faithfulness(facts: dict[str, Any]) -> str:
    """Return one line on the largest distance and loss difference between snapshots and plane."""
    points = [point for run in facts["runs"] for point in run["path"]]
    known = [p for p in points if p["loss"] is not None and p["loss_in_plane"] is not None]
    gap = max((abs(p["loss"] - p["loss_in_plane"]) for p in known), default=math.nan)
    far = max(point["distance_from_plane"] for point in points)
    return f"snapshots are up to {_short(far)} off this plane; their true loss differs by up to {_short(gap)}"


def _draw_surface(
    figure: Any, axes: Any, facts: dict[str, Any], x: list[float], y: list[float], losses: list[list[float]]
) -> None:
    on_paths = [point["loss_in_plane"] for run in facts["runs"] for point in run["path"]]
    highest = max((loss for loss in on_paths if loss is not None), default=math.inf)
    levels, norm = _levels([loss for row in losses for loss in row], highest)
    ticker = importlib.import_module("matplotlib.ticker")
    top = levels[-1]
    shown = [[loss if math.isfinite(loss) else top + abs(top) for loss in row] for row in losses]
    beyond = "max" if any(loss > top for row in shown for loss in row) else "neither"
    filled = axes.contourf(x, y, shown, levels=levels, norm=norm, cmap="YlGnBu_r", extend=beyond, alpha=0.75)
    lines = axes.contour(x, y, shown, levels=levels, norm=norm, colors="white", linewidths=0.6)
    for label in axes.clabel(lines, levels=levels[1::LABELLED], fmt=_short, fontsize=7, colors="#08306b"):
        label.set_path_effects([_outline(2.0)])
    bar = figure.colorbar(filled, ax=axes, pad=0.02, format=ticker.FuncFormatter(lambda v, _: _short(v)))
    bar.set_ticks(levels[1::LABELLED])
    bar.ax.minorticks_off()
    bar.set_label(f"{facts['on']} loss", fontsize=8)
    bar.ax.tick_params(labelsize=7)


def _levels(losses: list[float], highest: float) -> tuple[list[float], Any]:
    """Return contour levels spaced evenly in the logarithm of the loss, or in the loss if it is not positive.

    The levels end shortly above `highest`, the highest loss of the paths: slopes beyond need no detail.
    """
    colors = importlib.import_module("matplotlib.colors")
    finite = sorted(loss for loss in losses if math.isfinite(loss))
    if not finite:
        raise UserError("no point of the grid has a finite loss: use a smaller --margin")
    low = finite[0]
    high = min(finite[-1], highest + CONTOUR_MARGIN * (highest - low))
    if low <= 0.0 or high <= low:
        span = (high - low) * 1.001 or 1.0
        levels = [low + span * number / LEVELS for number in range(LEVELS + 1)]
        return levels, colors.Normalize(levels[0], levels[-1])
    low, high = low * 0.999, high * 1.001  # so that rounding puts no point outside
    ratio = high / low
    levels = [low * ratio ** (number / LEVELS) for number in range(LEVELS + 1)]
    return levels, colors.LogNorm(levels[0], levels[-1])


def _short(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"


def _labels(runs: list[dict[str, Any]]) -> list[str]:
    """Return a label per run: strategy, workers, split and weights, plus the folder's name if these are not unique."""
    plain = [_label(run) for run in runs]
    names = [Path(run["run"]).name for run in runs]
    return [text if plain.count(text) == 1 else f"{text} ({name})" for text, name in zip(plain, names, strict=True)]


def _label(run: dict[str, Any]) -> str:
    workers = run["workers"] or 1
    text = run["strategy"] if workers == 1 else f"{run['strategy']}, {workers} workers, {run['split']}"
    text = text if run["rule"] == "plain" else f"{text}, {run['rule']}"
    return f"{text}, {run['weights']} weights"


def _draw_path(axes: Any, run: dict[str, Any], number: int, labels: list[str]) -> None:
    color, line, marker = STYLES[number % len(STYLES)]
    path = run["path"]
    xs, ys = [point["x"] for point in path], [point["y"] for point in path]
    loss = path[-1]["loss"]
    ending = f", ends at {loss:.3f}" if loss is not None else ""
    style = {"color": color, "linestyle": line, "marker": marker, "markersize": 4, "linewidth": 1.5}
    axes.plot(xs, ys, color="white", linewidth=3.0, alpha=0.8, zorder=2.9 + 0.1 * number)
    axes.plot(xs, ys, **style, label=labels[number] + ending, zorder=2.95 + 0.1 * number)
    axes.plot(xs[0], ys[0], marker="o", markersize=9, color="white", markeredgecolor=color, zorder=4)
    axes.plot(xs[-1], ys[-1], marker="*", markersize=15, color=color, markeredgecolor="white", zorder=5)
    if number == 0:
        _write(axes, "start", (xs[0], ys[0]), color, (-8, -17))
    for index, epoch in _whole_epochs(path):
        _write(axes, str(epoch), (xs[index], ys[index]), color, OFFSETS[number % len(OFFSETS)])


def _whole_epochs(path: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return (index in the path, epoch) of the first snapshot of each whole epoch, at most twelve."""
    found: list[tuple[int, int]] = []
    for index, point in enumerate(path):
        epoch = math.floor(point["epochs"] + 1e-9)
        if epoch > (found[-1][1] if found else 0):
            found.append((index, epoch))
    every = math.ceil(len(found) / 12) or 1
    return [pair for pair in found if pair[1] % every == 0]


def _write(axes: Any, text: str, place: tuple[float, float], color: str, offset: tuple[int, int]) -> None:
    style = {"fontsize": 8, "color": color, "path_effects": [_outline(2.5)], "zorder": 6}
    axes.annotate(text, place, xytext=offset, textcoords="offset points", **style)


def _outline(width: float) -> Any:
    """Return a white outline that keeps letters legible on any colour."""
    return importlib.import_module("matplotlib.patheffects").withStroke(linewidth=width, foreground="white")
