"""`paceline reproduce distml|mxnet`: published tables whose rows are run for real, as far as the machine goes."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.data.datasets import DATASETS, locate_data
from paceline.errors import DataError
from paceline.reports.console import Console
from paceline.studies.batch_runs import folder_of, note_sample, resolve_for_training, result_of, train_missing
from paceline.studies.published.rows import AnyRealRow, Asked, Machine, Made, RealRow
from paceline.system.cpu import cores

ILSVRC12, ILSVRC12_CLASSES = "ilsvrc12", 1000


def machine_of(device: str) -> Machine:
    """Its GPUs, or its cores."""
    if device == "cpu":
        return Machine(device, cores())
    import torch

    return Machine(device, torch.cuda.device_count())


def run_rows(rows: Sequence[AnyRealRow], asked: Asked, console: Console) -> list[Made[AnyRealRow]]:
    """Run what can run and is not there yet; rows that come to the same setting share a run."""
    machine = machine_of(asked.device)
    reasons = {row.number: row.why_not(machine) or _missing_data(row, asked) for row in rows}
    configs = {row.number: row.config(asked) for row in rows if reasons[row.number] is None}
    named = {config.name: config for config in configs.values()}
    settled = {name: resolve_for_training(config) for name, config in named.items()}
    note_sample(list(named.values()), list(settled.values()), console)
    if reasons and not settled:
        console.note("none of these rows can run here: the table says why")
    if settled:
        train_missing(list(settled.values()), console)
    made = []
    for row in rows:
        if reasons[row.number] is not None:
            made.append(Made(row, why_not=reasons[row.number]))
            continue
        config = settled[configs[row.number].name]
        made.append(Made(row, folder_of(config).path, result_of(config)))
    return made


def _missing_data(row: RealRow, asked: Asked) -> str | None:
    """What the machine lacks of the row's data."""
    config = row.config(asked)
    if config.dataset not in DATASETS:
        return f"data set {config.dataset} is not one that this version reads"
    try:
        location = locate_data(config)
    except DataError as error:
        return str(error)
    if row.dataset == ILSVRC12 and location is not None:
        found = sum(folder.is_dir() for folder in (location.path / "train").glob("*"))
        if found != ILSVRC12_CLASSES:
            return f"{location.path} holds {found} classes of images, and ILSVRC12 has {ILSVRC12_CLASSES:,}"
    return None
