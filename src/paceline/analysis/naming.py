"""The names of a run's model and data, as tables, pages and lines show them: of own code, its own names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.config import SCRIPT, RunConfig, to_dict
from paceline.runs.folder import RunFolder

OWN_DATA = "own data"
NO_DATA = "-"  # of a run that only simulated times
HEAD_BYTES = 1 << 13  # of the events file: its first row tells the names
Facts = Mapping[str, Any]
"""A result, or what `named_settings` returns: the settings of an own task name the model and data of another run."""


def model_name(facts: Facts) -> str:
    """The model: as in `--model`, or the class of an own one; if that was not recorded, the script or task.

    >>> model_name({"task": "script:train", "model": "Net"}), model_name({"task": "tasks.py:build", "model": None})
    ('Net', 'tasks:build')
    >>> model_name({"timing_only": True, "parameters": "62k", "model": "lenet5"})
    '62k parameters'
    """
    if facts.get("parameters"):
        return f"{facts['parameters']} parameters"
    return str(facts.get("model") or own_source(facts) or "-")


def dataset_name(facts: Facts) -> str:
    """The data set: as in `--dataset`, or the class of an own one if that says something.

    >>> dataset_name({"task": None, "dataset": "cifar10"}), dataset_name({"task": "script:train", "dataset": None})
    ('cifar10', 'own data')
    """
    if facts.get("timing_only"):
        return NO_DATA
    return str(facts.get("dataset") or (OWN_DATA if facts.get("task") else "-"))


def own_source(facts: Facts) -> str | None:
    """The file of an own loop, or the function of an own task; None for a built-in model and data set.

    Runs of one source are compared. A task is the same by its file and by its module.

    >>> own_source({"task": "script:train"}), own_source({"task": None})
    ('train.py', None)
    >>> own_source({"task": "code/cnn.py:build"}), own_source({"task": "code.cnn:build"})
    ('cnn:build', 'cnn:build')
    """
    task = facts.get("task")
    if not task:
        return None
    where, _, name = str(task).rpartition(":")
    if where == SCRIPT:
        return f"{name}.py"
    module = where.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    return f"{module}:{name}" if module else name


def subject(facts: Facts) -> str:
    """What is trained, on what.

    >>> subject({"task": None, "model": "lenet5", "dataset": "fashion-mnist"})
    'lenet5 on fashion-mnist'
    >>> subject({"task": "script:train", "model": None, "dataset": None})
    'own model on own data (train.py)'
    >>> subject({"timing_only": True, "parameters": "62k", "model": "lenet5", "dataset": "fashion-mnist"})
    '62k parameters, times only'
    """
    source = own_source(facts)
    if facts.get("timing_only"):
        return f"{model_name(facts)}, times only"
    model = model_name(facts) if source is None else facts.get("model") or "own model"
    return f"{model} on {dataset_name(facts)}" + (f" ({source})" if source is not None else "")


def title(facts: Facts) -> str:
    """The headline of a run.

    >>> title({"strategy": "bounded:2", "workers": 4, "task": "script:train", "model": "Net", "dataset": None})
    'bounded:2, 4 workers: Net on own data (train.py)'
    """
    workers = facts.get("workers") or 1
    return f"{facts.get('strategy')}, {workers:,} worker{'s' if workers != 1 else ''}: {subject(facts)}"


def named_settings(config: RunConfig, recorded: Facts) -> dict[str, Any]:
    """The settings of a run, with the names of an own model and data from its result or its first event."""
    settings = to_dict(config)
    if config.task is not None:
        settings |= {name: recorded.get(name) for name in ("model", "dataset")}
    return settings


def read_named_settings(folder: RunFolder, config: RunConfig, result: Facts | None) -> dict[str, Any]:
    """The same, from the folder of a run, which may not have ended."""
    return named_settings(config, result if result is not None else _first_event(folder) if config.task else {})


def _first_event(folder: RunFolder) -> dict[str, Any]:
    try:
        with folder.events_file.open("rb") as file:
            row = json.loads(file.read(HEAD_BYTES).partition(b"\n")[0])
    except (OSError, ValueError):
        return {}
    names = {name: row.get(name) for name in ("model", "dataset")} if isinstance(row, dict) else {}
    return {name: value for name, value in names.items() if isinstance(value, str)}
