"""`paceline bench scaling`: train the same run on 1, 2, 4, ... workers, one count after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.analysis.naming import subject
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.settings.strategies import strategy_of
from paceline.studies.batch_runs import folder_of, note_sample, resolve_for_training, result_of, train_missing
from paceline.studies.scaling_table import ScalingTable, gather
from paceline.system.cpu import cores

KINDS = ("strong", "weak")
STEPS = 200  # default number of steps per worker


def parse_counts(text: str | None, device: str) -> list[int]:
    """Parse rising worker counts; by default powers of two up to the cores (on a shared GPU 1, 2 and 4).

    >>> parse_counts("1,2,4", "cpu")
    [1, 2, 4]
    """
    if text is None:
        most = 4 if device == "cuda" else cores()
        return [1 << power for power in range(most.bit_length())]
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--workers '{text}': give counts of workers, as in 1,2,4") from None
    if counts != sorted(set(counts)) or counts[0] < 1:
        raise UserError(f"--workers '{text}': give rising counts of at least 1, as in 1,2,4")
    return counts


def configs_for(base: RunConfig, kind: str, counts: list[int], repeats: int) -> list[RunConfig]:
    """Return one config per count and repeat, from `base` with another number of workers.

    Strong scaling divides --batch-size among the workers; weak scaling gives it to each. Steps are counted per
    worker, so that with perfect scaling every run takes equally long.
    """
    configs = []
    for count in counts:
        if kind == "strong" and base.batch_size % count:
            found = (
                f"--kind strong divides --batch-size {base.batch_size} among the workers, and {count} do not divide it"
            )
            fitting = count * max(1, base.batch_size // count)
            raise UserError(f"{found}: try --batch-size {fitting}, or --kind weak")
        batch = base.batch_size // count if kind == "strong" else base.batch_size
        steps = (base.steps or STEPS) * (1 if strategy_of(base).in_rounds else count)
        how = replace(base, workers=count, batch_size=batch, steps=steps, threads=base.threads or 1, score="none")
        configs += [replace(how, name=f"{count}-workers-{repeat + 1}") for repeat in range(repeats)]
    return configs


def measure(
    base: RunConfig, kind: str, counts: list[int], repeats: int, folder: Path, console: Console
) -> ScalingTable:
    """Train the missing runs and return the table of all."""
    configs = configs_for(replace(base, runs=str(folder)), kind, counts, repeats)
    resolved = [resolve_for_training(config) for config in configs]
    note_sample(configs, resolved, console)
    room = cores() // (base.threads or 1)
    if base.device == "cpu" and counts[-1] > room:
        fit = f"{cores()} cores fit {room} workers of {base.threads or 1} threads"
        console.note(f"{fit}: more workers share cores, and the ideal stays the same")
    train_missing(resolved, console)
    ideal = [min(count, max(1, room)) if base.device == "cpu" else 1 for count in counts]
    rows = [(one.workers or 1, one.batch_size, folder_of(one).path, result_of(one)) for one in resolved]
    return gather(kind, base.strategy, subject(result_of(resolved[0])), dict(zip(counts, ideal, strict=True)), rows)
