"""Plain tables for the terminal: runs side by side, data sets and where they lie. Reads run folders only."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.data.datasets import remedy
from paceline.data.download import DatasetStatus
from paceline.runs.folder import RunFolder


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first column to the left, numbers to the right.

    >>> print(table(["run", "loss"], [["a", "0.5"]]))
    run  loss
    a     0.5
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def as_csv(rows: list[dict[str, Any]]) -> str:
    """One line a row, under the names of the first."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def compare(paths: list[Path]) -> str:
    """One row a run: how it kept pace, how long it took, how good it got."""
    rows: list[tuple[list[str], dict[str, Any] | None, list[str]]] = []
    for path in paths:
        folder = RunFolder.open(path)
        config, result = folder.config(), folder.result()
        name = f"{config.strategy} {config.workers}w"
        if result is None:
            rows.append(([name, "-", "-", "-", "-", "-"], None, ["unfinished", path.name]))
            continue
        rows.append(([name, *_measured(result)], result, [result["status"], path.name]))
    others = _others([result for _, result, _ in rows if result is not None])
    header = ["pace", "seconds", "samples/s", "train %", "test %", "stale", *others, "status", "run"]
    cells = [
        [*first, *(_number(_other(result, name), ".4g") for name in others), *last] for first, result, last in rows
    ]
    return table(header, cells)


def _others(results: list[dict[str, Any]]) -> list[str]:
    """What runs measured beside accuracies: the loss where something is not classified, metrics, reported figures."""
    names = {"test loss": None} if any(result["test_accuracy"] is None for result in results) else {}
    for result in results:
        names |= dict.fromkeys(result.get("test_metrics") or {})
        names |= dict.fromkeys(name for row in (result.get("reported") or {}).values() for name in row)
    return [name for name in names if any(_other(result, name) is not None for result in results)]


def _other(result: dict[str, Any] | None, name: str) -> float | None:
    if result is None or name == "test loss":
        return result["test_loss"] if result is not None else None
    rows = [result.get("test_metrics") or {}, *(result.get("reported") or {}).values()]
    return next((row[name] for row in rows if name in row), None)


def _measured(result: dict[str, Any]) -> list[str]:
    return [
        _number(result["train_seconds"], ".1f"),
        _number(result["samples_per_second"], ",.0f"),
        _number(result["train_accuracy"], ".2f"),
        _number(result["test_accuracy"], ".2f"),
        _number(result["staleness"]["mean"], ".2f"),
    ]


def run_list(rows: list[dict[str, Any]], where: str) -> str:
    """One line a run, as `runs.listing` found them."""
    if not rows:
        return f"{where} holds no runs: 'paceline train' makes one"
    cells = [
        [
            row["run"],
            *(str(row[name] or "-") for name in ("strategy", "model", "workers", "status")),
            _number(row["test_accuracy"], ".2f"),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(row["changed"])),
        ]
        for row in rows
    ]
    return table(["run", "strategy", "model", "workers", "status", "test %", "changed"], cells)


def data_table(rows: list[DatasetStatus]) -> str:
    """One row a data set, then where each lies or how to get it, and under which terms."""
    cells = [
        [row.name, f"{row.train_size:,}", f"{row.test_size:,}", (row.origin or "here") if row.found else "not here"]
        for row in rows
    ]
    lines = [table(["data set", "train", "test", "found"], cells), ""]
    for row in rows:
        where = f"{row.path}" if row.found else remedy(row.name)
        lines += [f"{row.name}: {where}", f"  {row.licence}"]
    return "\n".join(lines)
