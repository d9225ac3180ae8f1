"""Many configs to many run folders, trained for real one after the other; what is there already is kept.

Used by `paceline bench scaling` and by published tables whose subject is speed.
"""

from __future__ import annotations

from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import Interrupted
from paceline.launch import require_device, train
from paceline.reports.console import Console
from paceline.runs.folder import INTERRUPTED, TERMINATED
from paceline.settings.resolve import resolve
from paceline.studies.batch_runs import Inner, Watch, alone_in, folder_of, is_done, remove_half_made, with_data_named


def settle(config: RunConfig) -> RunConfig:
    """Resolved, with the data named that it will have: what is compared with a folder's config."""
    return with_data_named(resolve(config))


def train_missing(configs: list[RunConfig], console: Console) -> None:
    """Train every settled config whose result is not there yet."""
    for config in configs:
        require_device(config)
    with alone_in(Path(configs[0].runs)):
        todo = [config for config in configs if not is_done(config)]
        if len(todo) < len(configs):
            console.note(f"{len(configs) - len(todo)} of {len(configs)} runs are there already")
        watch = Watch(console, len(todo))
        for config in todo:
            remove_half_made(folder_of(config))
            inner = Inner(watch, f"training {config.name}")
            try:
                _, result = train(config, inner)
                watch.num_done += result["reason"] not in (INTERRUPTED, TERMINATED)
                stopped = inner.stopping is not None  # perhaps when the run had only its scoring left
            except KeyboardInterrupt:
                stopped = True
            if stopped:
                num_done = len(configs) - len(todo) + watch.num_done
                raise Interrupted(
                    f"interrupted: {num_done} of {len(configs)} runs are done and kept in {config.runs}; the same "
                    "command goes on from there"
                )
