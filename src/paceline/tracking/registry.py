"""Trackers by name: those that are built in, and a user's own."""

from __future__ import annotations

import importlib
from typing import NamedTuple, cast

from paceline.errors import UserError, unknown_name
from paceline.settings.imports import is_installed, make_own, require_found
from paceline.tracking.tracker import Tracker


class BuiltIn(NamedTuple):
    """Where the class is, the package it needs, and how one gets that."""

    home: str
    needs: str | None = None
    install: str | None = None


TRACKERS = {
    "csv": BuiltIn("paceline.tracking.backends:CsvFile"),
    "tensorboard": BuiltIn("paceline.tracking.tensorboard:TensorBoard", "tensorboard", "'paceline[tensorboard]'"),
    "mlflow": BuiltIn("paceline.tracking.mlflow:MLflow", "mlflow", "mlflow"),
    "wandb": BuiltIn("paceline.tracking.wandb:Wandb", "wandb", "wandb"),
}
METHODS = ("started", "row", "finished")


def check_tracker(name: str) -> None:
    """Every mistake that can be found without loading anything."""
    if ":" in name:
        require_found("tracker", name, "CLASS")
        return
    if name not in TRACKERS:
        raise unknown_name("tracker", name, (*TRACKERS, "MODULE:CLASS"))
    needs, install = TRACKERS[name].needs, TRACKERS[name].install
    if needs is not None and not is_installed(needs):
        raise UserError(f"tracker {name} needs the package {needs}, which is not installed: pip install {install}")


def make_tracker(name: str) -> Tracker:
    """A new one, which has heard of nothing yet."""
    check_tracker(name)
    if ":" not in name:
        module, _, attribute = TRACKERS[name].home.partition(":")
        return cast(Tracker, getattr(importlib.import_module(module), attribute)())
    tracker = make_own("tracker", name, "CLASS")
    missing = [method for method in METHODS if not callable(getattr(tracker, method, None))]
    if missing:
        raise UserError(
            f"tracker '{name}' makes a {type(tracker).__name__} without {' and '.join(missing)}: a tracker has "
            "started(settings, folder), row(kind, fields) and finished(result)"
        )
    return cast(Tracker, tracker)
