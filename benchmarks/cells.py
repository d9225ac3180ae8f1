"""Many lab runs as one table: a line per entry, a column per cell, each with mean and spread over seeds."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.config import RunConfig
from paceline.data.datasets import load, locate
from paceline.reports.charts import Point, Series, draw_rows
from paceline.settings.resolve import resolve
from paceline.simulation.lab.run import LabTimes, run_rows


@dataclass(frozen=True)
class Wanted:
    """One run and its place in the table."""

    entry: str
    cell: str
    config: RunConfig


class Cells:
    """Accuracies by entry and cell; None for a run that diverged."""

    def __init__(self, file: Path | None) -> None:
        self.found: dict[tuple[str, str], list[float | None]] = defaultdict(list)
        self._file = file

    def run(self, wanted: Sequence[Wanted], data_dir: str, device: str, part: str) -> None:
        """Run all at once; append every result to the file as soon as its run ends."""
        dataset = load(locate("fashion-mnist", Path(data_dir)))
        names = {f"{number}": one for number, one in enumerate(wanted)}
        configs = [resolve(replace(one.config, name=name)) for name, one in names.items()]
        spent = LabTimes()
        for finished in run_rows(configs, dataset, torch.device(device), _silent, spent, (part,)):
            assert finished.config.name is not None
            one = names[finished.config.name]
            value = finished.result[f"{part}_accuracy"] if finished.result["status"] == "finished" else None
            self.found[one.entry, one.cell].append(value)
            self._write(one, value, part)
        print(f"\n{spent.line()}", flush=True)

    def _write(self, one: Wanted, value: float | None, part: str) -> None:
        if self._file is None:
            return
        with self._file.open("a", newline="") as stream:
            csv.writer(stream).writerow([one.entry, one.cell, one.config.seed, part, "" if value is None else value])

    def read(self, file: Path, part: str) -> None:
        """Read the results of an earlier call from a file."""
        with file.open(newline="") as stream:
            for entry, cell, _, of, value in csv.reader(stream):
                if of == part:
                    self.found[entry, cell].append(float(value) if value else None)

    def draw(self, wanted: Sequence[Wanted], path: Path, title: str) -> str | None:
        """Draw a line per entry and a series per cell; return why no figure was drawn, or None."""
        entries, cells = (
            list(dict.fromkeys(names)) for names in zip(*((w.entry, w.cell) for w in wanted), strict=True)
        )
        series = []
        for cell in cells:
            points = []
            for entry in entries:
                good = [value for value in self.found[entry, cell] if value is not None]
                lost = len(good) < len(self.found[entry, cell])
                spread = statistics.stdev(good) if len(good) > 1 else None
                points.append(Point(statistics.fmean(good) if good else None, spread, lost))
            series.append(Series(cell, points))
        return draw_rows(path, title, "test accuracy, %", entries, series)

    def show(self, wanted: Sequence[Wanted]) -> None:
        """Print the table in Markdown."""
        cells = list(dict.fromkeys(one.cell for one in wanted))
        print("| | " + " | ".join(cells) + " |\n" + "|---" * (len(cells) + 1) + "|")
        for entry in dict.fromkeys(one.entry for one in wanted):
            print(f"| {entry} | " + " | ".join(cell_text(self.found[entry, cell]) for cell in cells) + " |", flush=True)


def cell_text(values: list[float | None]) -> str:
    """Return mean, spread and the number of diverged runs as text.

    >>> cell_text([90.0, 91.0, None]), cell_text([]), cell_text([None])
    ('90.50 ± 0.71, 1 of 3 NaN', '', 'NaN')
    """
    good = [value for value in values if value is not None]
    lost = len(values) - len(good)
    if not good:
        return "NaN" if values else ""
    spread = f" ± {statistics.stdev(good):.2f}" if len(good) > 1 else ""
    return f"{statistics.fmean(good):.2f}{spread}" + (f", {lost} of {len(values)} NaN" if lost else "")


def _silent(text: str, share: float) -> None:
    pass
