"""What happens before a run starts: check the device, warn the user, record where things came from."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

from paceline.assembly.core import make_model
from paceline.assembly.efficiency import cost_of_many_workers
from paceline.assembly.work import WorkAssignment
from paceline.config import RunConfig
from paceline.data.datasets import DatasetInfo, Location
from paceline.errors import UserError
from paceline.interfaces import Report
from paceline.runs.folder import RunFolder
from paceline.settings.resolve import lr_scale
from paceline.settings.rules import AUTOMATIC, chosen
from paceline.settings.strategies import strategy_of
from paceline.settings.warnings import advice, crowding
from paceline.system.cpu import cores
from paceline.system.environment import git_state
from paceline.system.sealed_weights import read_weights


def require_device(config: RunConfig) -> None:
    """Check that the device is there, and a compiler if the step is compiled."""
    if config.compile:
        _require_compiler(config)
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "--device cuda: this machine has no CUDA device that torch can use; leave it out for the CPU"
            )
        if config.delay:
            raise UserError("--delay slows processes: workers on a GPU are one process; leave out one of the two")


def _require_compiler(config: RunConfig) -> None:
    """Check what torch.compile needs: a C++ compiler, and Triton for a GPU."""
    wanted = [os.environ.get("CXX", ""), "g++", "clang++", "c++"] if config.device == "cpu" else ["gcc", "clang", "cc"]
    if not any(name and shutil.which(name) for name in wanted):
        raise UserError(f"--compile needs a compiler ({', '.join(filter(None, wanted))}): install one, or leave it out")
    if config.device == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError("--compile on a GPU needs triton, which is missing: 'pip install triton', or leave it out")


def require_fitting_weights(config: RunConfig, folder: RunFolder, info: DatasetInfo | None) -> None:
    """Check the run's copy of `--weights`, and that they fit a built-in model, from the shapes of its tensors alone.

    A task of the user's own is built only where it is needed: there they are compared.
    """
    read_weights(folder.initial_file, config.weights_sha256)
    if info is None:
        return
    import torch

    from paceline.tasks.given_weights import read_given

    with torch.device("meta"):
        model = make_model(config.model, info.image_shape, len(info.classes))
    if (given := read_given(config, folder.initial_file)) is not None:
        given.require_fit(model)


def announce_rule(config: RunConfig, work: WorkAssignment, report: Report) -> None:
    """Say which rule `auto` has chosen, and what many workers cost; called where the rule is built."""
    if config.rule in AUTOMATIC:
        report({"kind": "note", "text": chosen(config, work.skew).line(config.workers or 1)})
        if (cost := cost_of_many_workers(config, work.budget.samples)) is not None:
            report({"kind": "note", "text": cost})


def announce_batches(config: RunConfig, batch_size: int | None, shuffles: bool, report: Report) -> None:
    """Say that the run's batches are not those of the DataLoader that the user's task was given, if they differ."""
    if batch_size is not None and (batch_size != config.batch_size or not shuffles):
        order = "" if shuffles else ", in its order"
        report(
            {
                "kind": "note",
                "text": f"the task's train DataLoader has batches of {batch_size}{order}: this run shuffles its data "
                f"set and trains on batches of {config.batch_size} (--batch-size)",
            }
        )


def startup_warnings(config: RunConfig, location: Location | None, is_here: bool = False) -> list[str]:
    """Warnings for the user before the run starts, one line each. `is_here`: all workers are on this machine."""
    lines = []
    if location is not None and location.sample:
        lines.append(
            "using the built-in sample of Fashion-MNIST (12,000 + 2,000 images): "
            "'paceline data get fashion-mnist' fetches all 70,000"
        )
    strategy = strategy_of(config)
    pushes = strategy.pushes_per_step(config.workers or 1)
    if pushes > 1 and not config.timing_only and not strategy.is_local and lr_scale(config) == 1.0:
        lines.append(
            f"one update averages {pushes} batches ({pushes * config.batch_size} samples) at the lr of one: "
            "--scale-lr auto scales it, with warm-up"
        )
    return [*lines, *advice(config), *(crowding(config, cores()) if is_here else [])]


def provenance(config: RunConfig, location: Location | None) -> dict[str, Any]:
    """The origin of data and code, for the result."""
    return {
        "data_origin": location.origin if location is not None else f"task {config.task}",
        "data_path": str(location.path) if location is not None else None,
        "data_is_sample": location.sample if location is not None else False,
        "git": git_state(),
    }
