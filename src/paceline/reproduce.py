"""`paceline reproduce`: a published table, ours beside theirs; every row a run folder, finished rows are kept."""

from __future__ import annotations

import csv
import io
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from paceline.assemble import resolve
from paceline.config import RunConfig
from paceline.data.datasets import load
from paceline.errors import UserError
from paceline.lab.rows import Finished, run_rows
from paceline.launch import facts_of, locate_data, require_device
from paceline.published.optml import PublishedRow
from paceline.reports.console import Console
from paceline.runs.environment import environment
from paceline.runs.folder import RunFolder, write_atomically
from paceline.runs.result import weights_sha256

FIGURES = ("train_accuracy", "train_loss", "test_accuracy", "test_loss")


@dataclass(frozen=True)
class Reproduced:
    """One published row and our runs of it, one a seed."""

    published: PublishedRow
    results: list[dict[str, Any]]

    def mean(self, figure: str) -> float | None:
        """Over the seeds that did not diverge."""
        values = [result[figure] for result in self.results if result["status"] == "finished"]
        return statistics.fmean(values) if values else None

    def spread(self, figure: str) -> float:
        values = [result[figure] for result in self.results if result["status"] == "finished"]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    @property
    def difference(self) -> float | None:
        """Ours minus theirs in test accuracy, where both have one."""
        ours, theirs = self.mean("test_accuracy"), self.published.test_accuracy
        return ours - theirs if ours is not None and theirs is not None else None

    @property
    def num_diverged(self) -> int:
        return sum(result["status"] == "diverged" for result in self.results)


def reproduce(
    rows: list[PublishedRow],
    seeds: int,
    epochs: float,
    device: str,
    data_dir: str | None,
    folder: Path,
    console: Console,
    compiled: bool,
) -> list[Reproduced]:
    """Run every row that has no result yet, and gather them all."""
    configs = [row.config(seed, epochs, data_dir, str(folder)) for row in rows for seed in range(seeds)]
    resolved = [resolve(config) for config in configs]
    require_device(RunConfig(device=device))
    todo = [config for config in resolved if not _done(config)]
    if todo:
        location = locate_data(todo[0])
        if location is not None and location.sample:
            console.note("using the built-in sample: figures are not comparable; 'paceline data get fashion-mnist'")
        assert location is not None
        if len(todo) < len(resolved):
            console.note(f"{len(resolved) - len(todo)} of {len(resolved)} runs are there already")
        began = time.perf_counter()

        def progress(text: str, share: float) -> None:
            left = (time.perf_counter() - began) * (1 - share) / share if share > 0.02 else None
            later = f", about {left:.0f} s left" if left is not None else ""
            console.report({"kind": "working", "text": f"{100 * share:3.0f} %  {text}{later}"})

        dataset = load(location)
        for finished in run_rows(todo, dataset, torch.device(device), progress, compiled):
            _keep(finished, facts_of(finished.config, location))
    by_name = {config.name: _result(config) for config in resolved}
    return [Reproduced(row, [by_name[f"{row.name}-seed{seed}"] for seed in range(seeds)]) for row in rows]


def _done(config: RunConfig) -> bool:
    folder = RunFolder(Path(config.runs) / (config.name or ""))
    if not folder.config_file.exists():
        return False
    if folder.result() is None:
        raise UserError(f"{folder.path} holds a half-made run: remove it to make it again")
    then = folder.config()
    if (then.epochs, then.seed, then.lr) != (config.epochs, config.seed, config.lr):
        raise UserError(f"{folder.path} was made with {then.epochs:g} epochs: use another --runs, or remove it")
    return True


def _keep(finished: Finished, facts: dict[str, Any]) -> None:
    """Write a row's run folder; the result comes last."""
    folder = RunFolder.create(finished.config)
    tensors = {name: view.clone() for name, view in finished.layout.views(finished.weights).items()}
    write_atomically(folder.weights_file, save(tensors))
    extra = {
        "weights_sha256": weights_sha256(tensors),
        "num_parameters": finished.layout.num_parameters,
        "reason": None,
    }
    folder.write_result({**finished.result, **extra, "lab": True, **facts, "environment": environment()})


def _result(config: RunConfig) -> dict[str, Any]:
    result = RunFolder(Path(config.runs) / (config.name or "")).result()
    assert result is not None, f"{config.name} was made a moment ago"
    return result


def _cell(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def markdown(found: list[Reproduced], seeds: int) -> str:
    """The table: theirs, ours, and the difference in test accuracy."""
    head = ["row", "train %", "ours", "test %", "ours", "difference", "test loss", "ours", "their seconds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one in found:
        theirs, accuracy = one.published, one.mean("test_accuracy")
        note = f" ({one.num_diverged} of {seeds} NaN)" if one.num_diverged else ""
        spread = f" ± {one.spread('test_accuracy'):.2f}" if seeds > 1 and accuracy is not None else ""
        cells = [
            theirs.name,
            _cell(theirs.train_accuracy),
            _cell(one.mean("train_accuracy")),
            "NaN" if theirs.diverged else _cell(theirs.test_accuracy),
            f"{_cell(accuracy)}{spread}{note}" if accuracy is not None else f"NaN{note}",
            _cell(one.difference, "+.2f"),
            "" if theirs.diverged else _cell(theirs.test_loss, ".4f"),
            _cell(one.mean("test_loss"), ".4f"),
            _cell(theirs.seconds, ",.0f"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def as_csv(found: list[Reproduced]) -> str:
    """One line a run."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["row", "seed", *(f"published_{name}" for name in FIGURES), *FIGURES, "status", "updates"])
    for one in found:
        theirs = [getattr(one.published, name) for name in FIGURES]
        for result in one.results:
            ours = [result[name] for name in FIGURES]
            writer.writerow([one.published.name, result["seed"], *theirs, *ours, result["status"], result["updates"]])
    return text.getvalue()


def summary(found: list[Reproduced]) -> list[str]:
    """How many rows agree, by strategy."""
    lines = []
    for mode, within in (("classic", 1.0), ("sync", 1.0), ("async", 2.0)):
        rows = [one for one in found if one.published.mode == mode and one.published.test_accuracy is not None]
        same = [one for one in rows if not one.published.diverged]
        near = [one for one in same if one.difference is not None and abs(one.difference) <= within]
        both = sum(one.published.diverged and bool(one.num_diverged) for one in rows)
        if rows:
            nan = f"; {both} diverged there and here" if both else ""
            lines.append(f"{mode}: {len(near)} of {len(same)} rows within {within:g} of the published accuracy{nan}")
    return lines
