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
    """Accuracies by entry, cell and seed; None for a run that diverged."""

    def __init__(self, file: Path | None) -> None:
        self._found: dict[tuple[str, str], dict[int, float | None]] = defaultdict(dict)
        self._file = file

    def run(self, wanted: Sequence[Wanted], data_dir: str, device: str, part: str) -> None:
        """Run all at once, equal settings once; append every result to the file as soon as its run ends.

        Runs that the file already has are not made again.
        """
        if self._file is not None and self._file.exists():
            self.read(self._file, part)
        alike: dict[str, list[Wanted]] = defaultdict(list)
        for one in wanted:
            if one.config.seed not in self._found[one.entry, one.cell]:
                alike[repr(one.config)].append(one)
        if not alike:
            return
        names = {f"{number}": group for number, group in enumerate(alike.values())}
        configs = [resolve(replace(group[0].config, name=name)) for name, group in names.items()]
        dataset, spent = load(locate("fashion-mnist", Path(data_dir))), LabTimes()
        for finished in run_rows(configs, dataset, torch.device(device), _silent, spent, (part,)):
            assert finished.config.name is not None
            is_good = finished.result["status"] in ("finished", "collapsed")
            value = finished.result[f"{part}_accuracy"] if is_good else None
            for one in names[finished.config.name]:
                self._found[one.entry, one.cell][one.config.seed] = value
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
            for entry, cell, seed, of, value in csv.reader(stream):
                if of == part:
                    self._found[entry, cell][int(seed)] = float(value) if value else None

    def values(self, entry: str, cell: str) -> list[float | None]:
        """The accuracies of a cell, by seed."""
        return [value for _, value in sorted(self._found[entry, cell].items())]

    def draw(self, wanted: Sequence[Wanted], path: Path, title: str) -> str | None:
        """Draw a line per entry and a series per cell; return why no figure was drawn, or None."""
        entries, cells = (
            list(dict.fromkeys(names)) for names in zip(*((w.entry, w.cell) for w in wanted), strict=True)
        )
        series = []
        for cell in cells:
            points = []
            for entry in entries:
                values = self.values(entry, cell)
                good = [value for value in values if value is not None]
                lost = len(good) < len(values)
                spread = statistics.stdev(good) if len(good) > 1 else None
                points.append(Point(statistics.fmean(good) if good else None, spread, lost))
            series.append(Series(cell, points))
        return draw_rows(path, title, "test accuracy, %", entries, series)

    def show(self, wanted: Sequence[Wanted]) -> None:
        """Print the table in Markdown."""
        cells = list(dict.fromkeys(one.cell for one in wanted))
        print("| | " + " | ".join(cells) + " |\n" + "|---" * (len(cells) + 1) + "|")
        for entry in dict.fromkeys(one.entry for one in wanted):
            print(
                f"| {entry} | " + " | ".join(cell_text(self.values(entry, cell)) for cell in cells) + " |", flush=True
            )

    def compare(self, wanted: Sequence[Wanted], base: str) -> None:
        """Print by how much each entry is above `base`, over the seeds that both have, with a 95 % interval."""
        cells = list(dict.fromkeys(one.cell for one in wanted))
        print(f"\nabove {base}, paired by seed, mean and 95 % interval")
        print("| | " + " | ".join(cells) + " |\n" + "|---" * (len(cells) + 1) + "|")
        for entry in dict.fromkeys(one.entry for one in wanted if one.entry != base):
            texts = []
            for cell in cells:
                ours, theirs = self._found[entry, cell], self._found[base, cell]
                pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
                texts.append(difference_text([(a, b) for a, b in pairs if a is not None and b is not None]))
            print(f"| {entry} | " + " | ".join(texts) + " |", flush=True)


STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95 % quantiles of Student's t, by degrees of freedom."""


def difference_text(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the mean of the differences and the half width of its 95 % interval.

    >>> difference_text([(90.0, 89.0), (91.0, 89.5), (90.5, 90.0)]), difference_text([(1.0, 2.0)])
    ('+1.00 ± 1.24', '-1.00')
    """
    if not pairs:
        return ""
    differences = [one - other for one, other in pairs]
    if len(differences) == 1:
        return f"{differences[0]:+.2f}"
    width = STUDENT.get(len(differences) - 1, 1.96) * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.fmean(differences):+.2f} ± {width:.2f}"


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
