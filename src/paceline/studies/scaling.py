"""`paceline bench scaling`: the same run on 1, 2, 4, ... workers, for real, one after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.settings.strategies import strategy_of
from paceline.studies.batch_runs import note_sample, resolve_for_training, result_of, train_missing
from paceline.studies.scaling_table import Scaling, gather
from paceline.system.cpu import cores

KINDS = ("strong", "weak")
STEPS = 200
"""Of each worker, unless said."""


def parse_counts(text: str | None, device: str) -> list[int]:
    """`1,2,4`, rising; by default doubled from 1 up to the cores (on a GPU, which workers share, 1, 2 and 4).

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


def configs_for(asked: RunConfig, kind: str, counts: list[int], repeats: int) -> list[RunConfig]:
    """One config a count and repeat; `asked` says everything but how many workers.

    Strong: --batch-size is shared by all workers. Weak: it is each worker's own. Steps are a worker's own, so that
    every run takes about as long where workers do not get into each other's way.
    """
    strategy = strategy_of(asked)
    configs = []
    for count in counts:
        if kind == "strong" and asked.batch_size % count:
            raise UserError(
                f"--kind strong divides --batch-size {asked.batch_size} among the workers, and {count} do not divide "
                f"it: try --batch-size {count * max(1, asked.batch_size // count)}, or --kind weak"
            )
        batch = asked.batch_size // count if kind == "strong" else asked.batch_size
        steps = (asked.steps or STEPS) * (1 if strategy.in_rounds else count)
        for repeat in range(repeats):
            name = f"{count}-workers-{repeat + 1}"
            how = replace(asked, workers=count, batch_size=batch, steps=steps, threads=asked.threads or 1, score="none")
            configs.append(replace(how, name=name))
    return configs


def measure(asked: RunConfig, kind: str, counts: list[int], repeats: int, folder: Path, console: Console) -> Scaling:
    """Run what is missing; returns what all came to."""
    configs = configs_for(replace(asked, runs=str(folder)), kind, counts, repeats)
    settled = [resolve_for_training(config) for config in configs]
    note_sample(configs, settled, console)
    room = cores() // (asked.threads or 1)
    if asked.device == "cpu" and counts[-1] > room:
        console.note(
            f"{cores()} cores have room for {room} workers of {asked.threads or 1} threads: more share them, and the "
            "ideal grows no further"
        )
    train_missing(settled, console)
    ideal = [min(count, max(1, room)) if asked.device == "cpu" else 1 for count in counts]
    rows = [
        (config.workers or 1, config.batch_size, folder / str(config.name), result_of(config)) for config in settled
    ]
    return gather(kind, asked.strategy, asked.model, dict(zip(counts, ideal, strict=True)), rows)
