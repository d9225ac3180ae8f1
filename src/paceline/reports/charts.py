"""Charts of many runs: one row per setting, or lines over a setting; readable without colour."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NO_MATPLOTLIB = "no figure: matplotlib is not installed: pip install 'paceline[report]', then the same command draws it"
COLOURS = ("#404040", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#8C6D00", "#7A3E9D")
CROSSES = ("x", "X", "+", "1", "2", "3", "4", "|")
MARKERS = ("o", "D", "s", "^", "v", "P", "*", "h")
DASHES = ("-", "--", "-.", ":")
OUTLIER_POINTS = 20.0  # accuracies this many points below the lower quartile are drawn at the edge, with their value


@dataclass(frozen=True)
class Point:
    """The figure of one setting; None if all of its runs failed or it is unknown."""

    mean: float | None
    spread: float | None = None
    failed: bool = False  # a run diverged or collapsed


@dataclass(frozen=True)
class Series:
    """The points drawn with one marker."""

    name: str
    points: list[Point]


def save_figure(path: Path, draw: Callable[[Any], None], size: tuple[float, float]) -> str | None:
    """Draw into a new figure and save it; without matplotlib, return a line that says so."""
    if importlib.util.find_spec("matplotlib") is None:
        return NO_MATPLOTLIB
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=120)
    return None


def draw_rows(path: Path, title: str, unit: str, names: Sequence[str], series: Sequence[Series]) -> str | None:
    """Draw one row per name and one marker per series, bars for the spread; failed runs in a separate strip."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        edge, right = _limits(series)
        strip = edge - 0.07 * (right - edge)
        lost = any(point.failed for one in series for point in one.points)
        for number, one in enumerate(series):
            shift = 0.0 if len(series) == 1 else 0.36 * (number / (len(series) - 1) - 0.5)
            for place, point in enumerate(one.points):
                _draw_point(axes, point, place + shift, number, edge, strip)
            style: dict[str, Any] = {"color": COLOURS[number], "linestyle": "none"}
            fill = "none" if number == 0 else COLOURS[number]
            axes.plot([], [], label=one.name, marker=MARKERS[number], markerfacecolor=fill, **style)
            if any(point.failed for point in one.points):
                axes.plot([], [], label=f"{one.name}: failed", marker=CROSSES[number], **style)
        axes.set_xlim(strip - 0.03 * (right - edge) if lost else edge, right)
        ticks = [tick for tick in axes.get_xticks() if edge <= tick <= right]
        labels = [f"{tick:g}" for tick in ticks]
        if lost:
            axes.axvline(edge, color="#999999", linewidth=0.8)
            ticks, labels = [strip, *ticks], ["failed", *labels]
        axes.set_xticks(ticks, labels, fontsize=8)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.grid(axis="both", color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(unit)
        figure.suptitle(title, fontsize=10)
        if len(series) > 1:
            figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)

    return save_figure(path, draw, (8.0, 1.6 + 0.24 * max(3, len(names)) * max(1.0, len(series) / 3)))


def _limits(series: Sequence[Series]) -> tuple[float, float]:
    """Return axis limits just beyond the lowest figure that is not an outlier, and the highest."""
    known = [(point.mean, point.spread or 0.0) for one in series for point in one.points if point.mean is not None]
    if not known:
        return 0.0, 1.0
    least = sorted(mean for mean, _ in known)[len(known) // 4] - OUTLIER_POINTS
    lowest = min(max(mean - spread, least) for mean, spread in known if mean >= least)
    top = max(mean for mean, _ in known)
    highest = max(min(mean + spread, top + 0.05 * (top - lowest)) for mean, spread in known)  # clip long bars
    room = 0.04 * (highest - lowest) or 1.0
    return lowest - room, highest + room


def _draw_point(axes: Any, point: Point, y: float, number: int, edge: float, strip: float) -> None:
    colour = COLOURS[number]
    if point.failed:
        axes.plot(strip, y, marker=CROSSES[number], color=colour, markersize=5)
    if point.mean is None:
        return
    fill = "none" if number == 0 else colour
    if point.mean < edge:
        axes.plot(edge, y, marker="<", color=colour, markerfacecolor=fill, markersize=5, clip_on=False)
        axes.annotate(f"{point.mean:.1f}", (edge, y), (6, 0), "data", "offset points", va="center", fontsize=7)
        return
    style = {"fmt": MARKERS[number], "color": colour, "markerfacecolor": fill}
    axes.errorbar(point.mean, y, xerr=point.spread, markersize=4.5, capsize=2, **style)


def draw_lines(
    path: Path, title: str, unit: str, setting: str, values: Sequence[float], series: Sequence[Series]
) -> str | None:
    """Draw one line per series over the values of a setting; mark failed runs at the lower edge."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        logarithmic = min(values) > 0 and max(values) >= 10 * min(values)
        axes.set_xscale("log" if logarithmic else "linear")
        lost = False
        for number, one in enumerate(series):
            _draw_line(axes, _aside(values, number - (len(series) - 1) / 2, logarithmic), one, number)
            for value, point in zip(values, one.points, strict=True):
                if point.failed:
                    lost = True
                    _draw_lost(axes, value, number)
        axes.set_xticks(values, [f"{value:g}" for value in values], minor=False)
        axes.minorticks_off()
        axes.grid(color="#e6e6e6", linewidth=0.6)
        axes.set_xlabel(setting)
        axes.set_ylabel(unit)
        figure.suptitle(title, fontsize=10)
        if lost:
            low, high = axes.get_ylim()
            axes.set_ylim(low - 0.06 * len(series) * (high - low), high)
            axes.plot([], [], "kx", label="crossed marker at the lower edge: failed")
        if len(series) > 1 or lost:
            figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)

    return save_figure(path, draw, (7.0, 4.2 + 0.12 * len(series)))


def _aside(values: Sequence[float], places: float, logarithmic: bool) -> list[float]:
    """Shift the values slightly, so that error bars do not hide each other."""
    if logarithmic:
        return [value * (max(values) / min(values)) ** (0.006 * places) for value in values]
    return [value + 0.006 * places * (max(values) - min(values)) for value in values]


def _draw_line(axes: Any, values: Sequence[float], one: Series, number: int) -> None:
    means = [math.nan if point.mean is None else point.mean for point in one.points]
    spreads = [point.spread or 0.0 for point in one.points]
    style = {"color": COLOURS[number], "marker": MARKERS[number], "linestyle": DASHES[number % len(DASHES)]}
    axes.errorbar(values, means, yerr=spreads, label=one.name, linewidth=1.2, markersize=5, capsize=3, **style)


def _draw_lost(axes: Any, value: float, number: int) -> None:
    """Draw the series' marker, hollow and crossed, above the axis; one height per series."""
    style = {"transform": axes.get_xaxis_transform(), "color": COLOURS[number], "linestyle": "none", "zorder": 5}
    height = 0.03 + 0.05 * number
    axes.plot(value, height, marker=MARKERS[number], markersize=9, markerfacecolor="none", **style)
    axes.plot(value, height, marker="x", markersize=5, **style)
