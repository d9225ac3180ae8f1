"""Table of the published key-value store by epoch, next to our runs."""

from __future__ import annotations

from typing import Any

from paceline.reports.tables import formatted, markdown_table
from paceline.runs.events import read_events
from paceline.runs.folder import RunFolder
from paceline.studies.published.mxnet import MxnetRow
from paceline.studies.published.rows import RowResult
from paceline.studies.published.throughput import Epoch, epochs_of

HEAD = ("row", "epoch", "train %", "ours", "valid %", "ours", "seconds", "ours", "here")
FORMS = ("", "", ".2f", ".2f", ".2f", ".2f", "g", ",.1f", "")
NOTES = """Published: machines with two GTX 980 each and 1 Gbit/s between them; batch sizes are per machine; SGD with
momentum .9. Each published machine is one worker here; if workers share a device, compare accuracy but not seconds.
Our train accuracy is measured on the whole train set after the epoch, the published one during it on augmented images.
Valid is the test set. Accuracies are of live weights on both sides. The async rows on CIFAR-10 were published without
figures."""
PAIRS = {"train_accuracy": "train_accuracy", "valid_accuracy": "test_accuracy", "seconds": "seconds"}
"""Published figures of an epoch, and the names of ours."""
EVERY = 10  # shown epochs of a row published without figures: every tenth
Rows = list[RowResult[MxnetRow]]


def rows_of(results: Rows) -> list[dict[str, Any]]:
    """Return one line per published epoch, or per tenth epoch of ours if none was published."""
    return [line for one in results for line in _lines(one)]


def _lines(one: RowResult[MxnetRow]) -> list[dict[str, Any]]:
    theirs = dict(one.row.epochs)
    ours = _our_epochs(one)
    numbers = sorted(theirs) if theirs else [number for number in ours if number % EVERY == 0]
    if ours and not set(numbers) & set(ours):
        numbers = sorted({*numbers, max(ours)})  # a short run ends before the first published epoch
    lines = []
    for number in numbers or [0]:
        published, mine = theirs.get(number), ours.get(number)
        line: dict[str, Any] = {"row": one.row.name, "epoch": number or None}
        for name, ours_name in PAIRS.items():
            line |= {f"published_{name}": getattr(published, name, None), name: getattr(mine, ours_name, None)}
        lines.append({**line, "here": _here(one, mine)})
    return lines


def _our_epochs(one: RowResult[MxnetRow]) -> dict[int, Epoch]:
    """Return our epochs by number; a run ended by --steps before its first epoch is epoch 0."""
    if one.result is None or one.folder is None:
        return {}
    found = epochs_of(read_events(RunFolder(one.folder).events_file))
    if not found:
        accuracies = one.result["test_accuracy"], one.result["train_accuracy"]
        return {0: Epoch(0, one.result["train_seconds"], None, *accuracies)}
    return {epoch.number: epoch for epoch in found}


def _here(one: RowResult[MxnetRow], mine: Epoch | None) -> str:
    if one.result is None:
        return one.why_not or ""
    result = one.result
    how = f"{result['strategy']}, {result['workers']} on {result['device']}"
    if result["status"] != "finished":
        return f"{result['status']} after {result['updates']:,} updates: {how}"
    if mine is None:
        return f"{how}: not run so far"
    samples = f", {result['samples']:,} samples" if not mine.number else ""
    return f"{how}, {result['updates']:,} updates in all{samples}"


def markdown(results: Rows) -> str:
    return "\n".join([*markdown_table(HEAD, formatted(rows_of(results), FORMS)), "", NOTES, ""])
