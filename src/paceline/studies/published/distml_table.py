"""Table of the published all-reduce rows next to our runs, and our logs in the published format."""

from __future__ import annotations

from typing import Any

from paceline.reports.tables import formatted, markdown_table
from paceline.runs.events import read_events
from paceline.runs.folder import RunFolder
from paceline.studies.published.distml import DistmlRow
from paceline.studies.published.rows import RowResult
from paceline.studies.published.throughput import epochs_of, rates_by_step

HEAD = (
    *("row", "GPUs", "data/sec", "ours", "speed-up", "of", "ours", "test %, epoch 3", "ours", "epoch s, ours"),
    *("test s, ours", "here"),
)
NOTES = """Published: RTX 2080 Ti, batch 128 per GPU, Adam with lr .01 x GPUs. data/sec is samples per second since the
start. The published speed-up is relative to the data/sec in column "of", ours to our run with one worker. The published
resnet18 has a 1-channel stem and no downsampling (8.89 M parameters); ours is the standard one (11.18 M). The published
transformer classifies on position 0 under a causal mask, without a published accuracy; ours attends in both directions.
Epoch 3 is the fourth. Accuracies are of live weights on both sides."""
Rows = list[RowResult[DistmlRow]]


def rows_of(results: Rows) -> list[dict[str, Any]]:
    """Return the published figures and ours, for `table.csv` and the table."""
    alone = {
        (one.row.model, one.row.dataset): one.result["samples_per_second"]
        for one in results
        if one.result is not None and one.row.workers == 1
    }
    return [_values(one, alone.get((one.row.model, one.row.dataset))) for one in results]


def _values(one: RowResult[DistmlRow], alone: float | None) -> dict[str, Any]:
    row, result = one.row, one.result or {}
    rate = result.get("samples_per_second")
    epochs = epochs_of(_events(one)) if one.result is not None else []
    tested = [epoch.test_seconds for epoch in epochs if epoch.test_seconds is not None]
    here = one.why_not or f"{result['strategy']}, {row.workers} on {result['device']}, {result['updates']:,} steps"
    return {
        "row": row.name,
        "gpus": row.gpus,
        "published_data_per_second": row.samples_per_second,
        "data_per_second": rate,
        "published_speedup": row.speedup,
        "published_baseline": row.baseline,
        "speedup": rate / alone if rate is not None and alone else None,
        "published_test_accuracy": row.test_accuracy,
        "test_accuracy": result.get("test_accuracy"),
        "epoch_seconds": sum(epoch.seconds for epoch in epochs) / len(epochs) if epochs else None,
        "test_seconds": sum(tested) / len(tested) if tested else None,
        "here": here if result.get("status") in (None, "finished") else f"{result['status']}: {here}",
    }


def _events(one: RowResult[DistmlRow]) -> list[dict[str, Any]]:
    assert one.folder is not None
    return read_events(RunFolder(one.folder).events_file)


def markdown(results: Rows) -> str:
    forms = ("", "", ".2f", ",.2f", ".2f", ".2f", ".2f", ".2f", ".2f", ".1f", ".2f", "")
    return "\n".join([*markdown_table(HEAD, formatted(rows_of(results), forms)), "", NOTES, ""])


def log(results: Rows) -> str:
    """Return the log of each of our runs, by step and by epoch, in the published format."""
    lines, seen = [], set()
    for one in results:
        if one.result is None or one.folder in seen:
            continue
        seen.add(one.folder)
        lines += [f"## {one.row.model}-{one.row.dataset}, {one.row.workers} on {one.result['device']}", ""]
        rates = [f"- Step{step}: {rate:.2f} data/sec" for step, rate in rates_by_step(_events(one))]
        lines += rates or [f"- Step{one.result['updates']}: {one.result['samples_per_second']:.2f} data/sec"]
        for epoch in epochs_of(_events(one)):
            tested = f", test time {epoch.test_seconds:.2f} sec" if epoch.test_seconds is not None else ""
            accuracy = f", test accuracy: {epoch.test_accuracy / 100:.4f}" if epoch.test_accuracy is not None else ""
            lines.append(f"- Epoch {epoch.number - 1} in {epoch.seconds:.2f} sec{tested}{accuracy}")
        lines.append("")
    return "\n".join(lines)
