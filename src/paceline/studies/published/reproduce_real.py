"""`paceline reproduce distml|mxnet`: train the rows of a published table that this machine can run."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.data.datasets import DATASETS, locate_data
from paceline.errors import DataError
from paceline.reports.console import Console
from paceline.studies.batch_runs import folder_of, note_sample, resolve_for_training, result_of, train_missing
from paceline.studies.published.rows import AnyRealRow, MachineSpec, RealRow, RowOptions, RowResult
from paceline.system.cpu import cores

ILSVRC12, ILSVRC12_CLASSES = "ilsvrc12", 1000


def machine_of(device: str) -> MachineSpec:
    """Count this machine's GPUs, or its cores for device cpu."""
    if device == "cpu":
        return MachineSpec(device, cores())
    import torch

    return MachineSpec(device, torch.cuda.device_count())


def run_rows(rows: Sequence[AnyRealRow], options: RowOptions, console: Console) -> list[RowResult[AnyRealRow]]:
    """Train the missing rows that can run here; rows with equal settings share a run."""
    machine = machine_of(options.device)
    reasons = {row.number: row.why_not(machine) or _missing_data(row, options) for row in rows}
    configs = {row.number: row.config(options) for row in rows if reasons[row.number] is None}
    named = {config.name: config for config in configs.values()}
    resolved = {name: resolve_for_training(config) for name, config in named.items()}
    note_sample(list(named.values()), list(resolved.values()), console)
    if reasons and not resolved:
        console.note("none of these rows can run here: the table lists the reasons")
    if resolved:
        train_missing(list(resolved.values()), console)
    results = []
    for row in rows:
        if reasons[row.number] is not None:
            results.append(RowResult(row, why_not=reasons[row.number]))
            continue
        config = resolved[configs[row.number].name]
        results.append(RowResult(row, folder_of(config).path, result_of(config)))
    return results


def _missing_data(row: RealRow, options: RowOptions) -> str | None:
    """Return why the row's data cannot be read here, or None."""
    config = row.config(options)
    if config.dataset not in DATASETS:
        return f"this version cannot read data set {config.dataset}"
    try:
        location = locate_data(config)
    except DataError as error:
        return str(error)
    if row.dataset == ILSVRC12 and location is not None:
        found = sum(folder.is_dir() for folder in (location.path / "train").glob("*"))
        if found != ILSVRC12_CLASSES:
            return f"{location.path} holds {found} classes of images, and ILSVRC12 has {ILSVRC12_CLASSES:,}"
    return None
