"""Run many configs into one folder and keep finished runs: in the lab, simulated, or trained for real."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from paceline.assembly.preflight import provenance, require_device
from paceline.config import FIELDS, RunConfig
from paceline.data.datasets import load, locate_data, resolve_dataset
from paceline.errors import Interrupted, UserError
from paceline.launch import train
from paceline.reports.console import Console
from paceline.runs.durable_files import write_atomically
from paceline.runs.folder import RunFolder
from paceline.runs.result import weights_sha256
from paceline.settings.ranks import rank_here
from paceline.settings.resolve import resolve
from paceline.simulation.cluster import DEFAULT_SPEED
from paceline.simulation.lab.evaluation import ALL_PARTS
from paceline.simulation.lab.run import LabResult, LabTimes, Pause, Progress, check_rows, run_rows
from paceline.simulation.run import simulate
from paceline.system.environment import environment
from paceline.system.sealed_weights import seal_weights
from paceline.system.signals import INTERRUPTED, TERMINATED
from paceline.system.terminal import seconds_text
from paceline.tracking.feed import feed
from paceline.tracking.registry import make_tracker

MAY_DIFFER = ("runs", "data_dir", "threads", "device", "checkpoint_every", "track", "weights")
"""Settings that do not change a run's result."""
MAX_LAB_BATCH = {"cpu": 1, "cuda": 256}
"""Maximum runs per lab batch. A CPU gains nothing from more, and one run per batch is saved as soon as it ends."""
UNFINISHED = ".unfinished"
"""Folder beside the run folders, of the lab's unfinished runs."""
SAMPLE_NOTE = "using the built-in sample: figures are not comparable; 'paceline data get fashion-mnist' fetches all"


def resolve_for_simulation(config: RunConfig) -> RunConfig:
    """Resolve a simulated run's config, with its cluster and data set filled in, to compare with a folder's config."""
    config = resolve(config)
    if config.speeds is None and config.like is None:
        config = replace(config, speeds=DEFAULT_SPEED)
    return resolve_dataset(config)[0]


def note_sample(requested: list[RunConfig], resolved: list[RunConfig], console: Console) -> None:
    """Print one note if any run uses the built-in sample instead of its data set."""
    if any(had.dataset != has.dataset for had, has in zip(requested, resolved, strict=True)):
        console.note(SAMPLE_NOTE)


def why_not_in_lab(config: RunConfig) -> str | None:
    """Return why the lab cannot run this config, or None if it can."""
    try:
        check_rows([config])
    except UserError as error:
        return str(error)
    return None


def folder_of(config: RunConfig) -> RunFolder:
    assert config.name is not None
    return RunFolder(Path(config.runs) / config.name)


def is_done(config: RunConfig) -> bool:
    """Return whether the run's folder holds its result; raise UserError if it holds something else."""
    if config.mirror not in (None, "none"):
        raise UserError(f"mirror = '{config.mirror}': many runs are not copied to a store; leave it out")
    folder = folder_of(config)
    if not folder.config_file.is_file():
        if folder.path.exists() and not _is_abandoned(folder.path):
            raise UserError(f"{folder.path} exists and is not a run folder: use another --runs, or remove it")
        return False
    then = folder.config()
    for name in FIELDS:
        if name not in MAY_DIFFER and getattr(then, name) != getattr(config, name):
            made = f"{folder.path} was made with {name} = {getattr(then, name)!r}, not {getattr(config, name)!r}"
            raise UserError(f"{made}: use another --runs, or remove it")
    result = folder.result()
    return result is not None and result.get("reason") not in (INTERRUPTED, TERMINATED)


def _is_abandoned(path: Path) -> bool:
    """Return whether a folder was created for a run whose config was never written."""
    return path.is_dir() and all(file.name.startswith(".config.toml.") for file in path.iterdir())


def result_of(config: RunConfig) -> dict[str, Any]:
    """Return the result of a finished run."""
    result = folder_of(config).result()
    assert result is not None, f"{config.name} has finished"
    return result


def run_missing(configs: list[RunConfig], device: str, console: Console, pause_after: float | None = None) -> None:
    """Run every resolved config that has no result yet, and save each result as soon as its run ends.

    After `pause_after` seconds, keep the state of the lab's unfinished runs and raise Interrupted.
    """
    require_device(RunConfig(device=device))
    pause = Pause(Path(configs[0].runs) / UNFINISHED, time.perf_counter() + (pause_after or math.inf))
    with _missing(configs, console) as (todo, progress):
        for config in todo:
            remove_incomplete(folder_of(config))
        num_left = _run_all(todo, device, console, progress, pause)
    if num_left:
        done = len(configs) - num_left
        kept = f"{done} of {len(configs)} runs are done, the state of the others is kept in {pause.folder}"
        raise Interrupted(f"stopped after {seconds_text(pause_after or 0.0)}: {kept}; run the same command to continue")


@contextlib.contextmanager
def _missing(configs: list[RunConfig], console: Console) -> Iterator[tuple[list[RunConfig], BatchProgress]]:
    """Lock the folder and yield the configs without a result; if interrupted, say how to continue."""
    with lock_folder(Path(configs[0].runs)):
        todo = [config for config in configs if not is_done(config)]
        there, total = len(configs) - len(todo), len(configs)
        if there:
            console.note(f"{there} of {total} runs are there already")
        progress = BatchProgress(console, len(todo))
        try:
            yield todo, progress
        except KeyboardInterrupt:
            num_kept = max(there + progress.num_done, sum(map(is_done, configs)))  # one may have ended just now
            kept = f"{num_kept} of {total} runs are done and kept in {configs[0].runs}"
            raise Interrupted(f"interrupted: {kept}; run the same command to continue") from None


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create and lock `folder`, so that no other command runs the same configs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"folder {folder} cannot be written: {error.strerror}; try --runs DIR") from None
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is in use by another command: wait for it, or stop it first") from None
        yield
    finally:
        os.close(lock)


def _run_all(todo: list[RunConfig], device: str, console: Console, progress: BatchProgress, pause: Pause) -> int:
    """Run in the lab all configs it supports, then simulate the others one by one; return how many are left."""
    reasons = {config.name: why_not_in_lab(config) for config in todo}
    simulated = [config for config in todo if reasons[config.name] is not None]
    if simulated and device != "cpu":
        console.note(f"{len(simulated)} of {len(todo)} runs are simulated on the CPU: {reasons[simulated[0].name]}")
    spent = _run_in_lab([config for config in todo if reasons[config.name] is None], device, progress, pause)
    if spent.num_rows > 1:
        console.note(f"the lab on {device}: {spent.line()}")
    for place, config in enumerate(simulated):
        if pause.is_due and (place or spent.num_rows):
            return spent.num_left + len(simulated) - place
        inner = InnerConsole(progress)
        _, result = simulate(config, inner)
        progress.num_done += result["reason"] not in (INTERRUPTED, TERMINATED)
        if inner.stopping is not None:  # the run may still have finished, if only its evaluation was left
            raise KeyboardInterrupt
    return spent.num_left


def remove_incomplete(folder: RunFolder) -> None:
    """Delete the folder of an interrupted run; refuse if another process holds its lock."""
    if folder.config_file.exists():
        with folder.locked():
            shutil.rmtree(folder.path)
    elif folder.path.exists():
        shutil.rmtree(folder.path)


def _run_in_lab(configs: list[RunConfig], device: str, progress: BatchProgress, pause: Pause) -> LabTimes:
    spent = LabTimes()
    for part in _same_data(configs):
        location = locate_data(part[0])
        assert location is not None, "the lab does not run custom tasks"
        dataset = load(location)
        for start in range(0, len(part), MAX_LAB_BATCH[device]):
            together = part[start : start + MAX_LAB_BATCH[device]]
            if pause.is_due and spent.num_rows:  # a call goes on at least a little
                spent.num_left += len(together)
                continue
            if device == "cpu":
                torch.set_num_threads(together[0].threads or 1)  # as the simulator does
            how = dataset, torch.device(device), progress.part(len(together)), spent, ALL_PARTS, pause
            for finished in run_rows(together, *how):
                _write_run(finished, {**provenance(finished.config, location), "lab_device": device})
                progress.num_done += 1
    return spent


def _same_data(configs: list[RunConfig]) -> Iterable[list[RunConfig]]:
    parts: dict[tuple[object, ...], list[RunConfig]] = {}
    for config in configs:
        parts.setdefault((config.dataset, config.data_dir, config.max_length, config.image_size), []).append(config)
    return parts.values()


def _write_run(finished: LabResult, facts: dict[str, Any]) -> None:
    """Write a lab run's folder; the result file comes last."""
    folder = RunFolder.create(finished.config)
    tensors = {name: view.clone() for name, view in finished.layout.views(finished.weights).items()} | finished.buffers
    write_atomically(folder.weights_file, seal_weights(save(tensors)))
    if not torch.equal(finished.weights, finished.live):
        live = {name: view.clone() for name, view in finished.layout.views(finished.live).items()}
        live |= finished.live_buffers
        write_atomically(folder.live_weights_file, seal_weights(save(live)))
    extra = {
        "weights_sha256": weights_sha256(tensors),
        "num_parameters": finished.layout.num_parameters,
    }
    folder.write_result({**finished.result, **extra, "lab": True, **facts, "environment": environment()})
    for name in finished.config.track or ():
        feed(folder, name, make_tracker(name))


class BatchProgress:
    """Reports to the console how many runs are done and how long the rest will take."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.num_done, self._total = console, 0, total
        self._began = time.perf_counter()

    def part(self, size: int) -> Progress:
        """Return the progress callback of the next `size` runs."""
        before = self.num_done

        def progress(text: str, share: float) -> None:
            self.show(text if size > 1 else "training", before + share * size)

        return progress

    def show(self, text: str, num_done: float) -> None:
        """Show that `num_done` runs are done, with the fraction of those that still run."""
        share = num_done / self._total
        done = f"{self.num_done} of {self._total} runs done, {text}"
        left = (time.perf_counter() - self._began) * (1 - share) / share if share > 0.02 else None
        self.console.report({"kind": "working", "text": done, "fraction": share, "seconds_left": left})


class InnerConsole(Console):
    """The console of one run of a batch: forwards its progress only."""

    def __init__(self, progress: BatchProgress, text: str = "simulating") -> None:
        super().__init__(quiet=True)
        self._batch, self._text = progress, text

    def report(self, row: dict[str, Any]) -> None:
        if row["kind"] == "progress":
            self._batch.show(self._text, self._batch.num_done + row["fraction"])
        elif row["kind"] == "stopping":
            self.stopping = row["reason"]
            self._batch.console.note(f"{self.stopping}: ending the current run")


def resolve_for_training(config: RunConfig) -> RunConfig:
    """Resolve a real run's config, with its data set filled in, to compare with a folder's config."""
    return resolve_dataset(resolve(config))[0]


def train_missing(configs: list[RunConfig], console: Console) -> None:
    """Train every resolved config that has no result yet."""
    for config in configs:
        require_device(config)
    with _missing(configs, console) as (todo, progress):
        for config in todo:
            remove_incomplete(folder_of(config))
            inner = InnerConsole(progress, f"training {config.name}")
            _, result = train(config, inner, rank_here())
            progress.num_done += result["reason"] not in (INTERRUPTED, TERMINATED)
            if inner.stopping is not None:  # the run may still have finished
                raise KeyboardInterrupt
