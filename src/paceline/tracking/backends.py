"""`--track csv`: progress and evaluations as `metrics.csv` in the run's folder; the shortest example of a tracker."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

FIGURES = ("loss", "rate", "staleness", "live", "lr", "test_accuracy", "test_loss", "train_accuracy", "train_loss")


class CsvFile:
    """A line for each row of progress and each evaluation."""

    def started(self, settings: dict[str, Any], folder: Path) -> None:
        self._file = (folder / "metrics.csv").open("w", newline="", buffering=1)
        names = ("kind", "now", "updates", "samples", *FIGURES)
        self._lines = csv.DictWriter(self._file, names, extrasaction="ignore")
        self._lines.writeheader()

    def row(self, kind: str, fields: dict[str, Any]) -> None:
        if kind in ("progress", "evaluation"):
            self._lines.writerow({"kind": kind, **fields})

    def finished(self, result: dict[str, Any] | None) -> None:
        self._file.close()
