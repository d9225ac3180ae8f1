"""The published parameter server on PyTorch RPC: its 55 rows (one was lost), and our settings for each."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from paceline.config import RunConfig
from paceline.errors import UserError, unknown_name

EPOCHS = 6.0
BETAS = [0.99, 0.999]
JITTER = "lognormal:1s,.2"


@dataclass(frozen=True)
class PublishedRow:
    """One run of theirs; figures are None where they lost it."""

    number: int
    mode: str
    workers: int
    split: str
    model: str
    optimizer: str
    lr: float
    momentum: float
    seconds: float | None
    train_accuracy: float | None
    train_loss: float | None
    test_accuracy: float | None
    test_loss: float | None

    @property
    def name(self) -> str:
        """As in 23-async-2-labels-cnn-sgd; unique by its number."""
        return f"{self.number:02d}-{self.mode}-{self.workers}-{self.split}-{self.model}-{self.optimizer}"

    @property
    def diverged(self) -> bool:
        """Whether they ended at chance level, as after a NaN."""
        return self.test_accuracy is not None and self.test_accuracy <= 10.0

    def config(self, seed: int, epochs: float, data_dir: str | None, runs: str) -> RunConfig:
        """The same setting here: one shared optimizer, live weights, each worker its own passes, lr as it is."""
        return RunConfig(
            dataset="fashion-mnist",
            data_dir=data_dir,
            split=self.split,
            model=self.model,
            strategy=self.mode,
            workers=self.workers,
            rule="plain",
            optimizer=self.optimizer,
            lr=self.lr,
            momentum=self.momentum,
            betas=BETAS,
            epochs=epochs,
            epoch_mode="own",
            batch_size=32,
            seed=seed,
            threads=1,
            speeds=JITTER,
            name=f"{self.name}-seed{seed}",
            runs=runs,
        )


def automatic(row: PublishedRow, seed: int, epochs: float, data_dir: str | None, runs: str) -> RunConfig:
    """What Paceline does by itself with the row's strategy, workers, data and model; rows that share those share it."""
    usual = RunConfig()
    settings: dict[str, Any] = {"rule": "auto"} if row.mode == "async" else {"average": "on"}
    if row.mode == "sync":
        settings["scale_lr"] = "auto"
    for name in ("optimizer", "lr", "momentum", "betas"):
        settings[name] = getattr(usual, name)
    name = f"auto-{row.mode}-{row.workers}-{row.split}-{row.model}-seed{seed}"
    return replace(row.config(seed, epochs, data_dir, runs), **settings, name=name)


def published_rows() -> list[PublishedRow]:
    """The table, in its own order."""
    text = resources.files("paceline.published").joinpath("optml.csv").read_text(encoding="utf-8")
    rows = []
    for number, cells in enumerate(csv.DictReader(io.StringIO(text)), 1):

        def figure(name: str, cells: dict[str, str] = cells) -> float | None:
            return float(cells[name]) if cells[name] else None

        rows.append(
            PublishedRow(
                number,
                cells["mode"],
                int(cells["workers"]),
                cells["split"],
                cells["model"],
                cells["optimizer"],
                float(cells["lr"]),
                figure("momentum") or 0.0,
                figure("seconds"),
                figure("train_accuracy"),
                figure("train_loss"),
                figure("test_accuracy"),
                figure("test_loss"),
            )
        )
    return rows


def choose_rows(text: str | None) -> list[PublishedRow]:
    """All rows, or those asked for: numbers and ranges (1,4,7-9) or words that all must be in the name (async cnn).

    >>> [row.number for row in choose_rows("1,3-4")]
    [1, 3, 4]
    """
    rows = published_rows()
    if text is None:
        return rows
    if all(part.strip().replace("-", "", 1).isdecimal() for part in text.split(",")):
        numbers = dict.fromkeys(number for part in text.split(",") for number in _range(part))
        return [_numbered(rows, number) for number in numbers]
    words = text.replace(",", " ").split()
    names = {word for row in rows for word in row.name.split("-")}
    for word in words:
        if word not in names:
            raise unknown_name("word for --rows", word, names)
    chosen = [row for row in rows if all(word in row.name.split("-") for word in words)]
    if not chosen:
        raise UserError(f"--rows '{text}': no row has all of these; the names are like {rows[20].name}")
    return chosen


def _range(part: str) -> range:
    first, dash, last = part.strip().partition("-")
    return range(int(first), int(last if dash else first) + 1)


def _numbered(rows: list[PublishedRow], number: int) -> PublishedRow:
    if not 1 <= number <= len(rows):
        raise UserError(f"--rows {number}: the table has rows 1 to {len(rows)}")
    return rows[number - 1]
