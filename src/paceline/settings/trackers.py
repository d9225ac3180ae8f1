"""Check the names of experiment trackers."""

from __future__ import annotations

from typing import NamedTuple

from paceline.errors import UserError, unknown_name
from paceline.settings.imports import is_installed, require_found


class BuiltIn(NamedTuple):
    """Where the class is, the package it needs, and how one gets that."""

    home: str
    needs: str | None = None
    install: str | None = None


TRACKERS = {
    "csv": BuiltIn("paceline.tracking.backends:CsvFile"),
    "tensorboard": BuiltIn("paceline.tracking.backends:TensorBoard", "tensorboard", "'paceline[tensorboard]'"),
    "mlflow": BuiltIn("paceline.tracking.backends:MLflow", "mlflow", "mlflow"),
    "wandb": BuiltIn("paceline.tracking.backends:Wandb", "wandb", "wandb"),
}


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
