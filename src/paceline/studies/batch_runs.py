"""Many configs to many run folders: what is there already is kept; the rest runs in the lab, or simulated where the
lab cannot. Used by `paceline reproduce` and `paceline sweep`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from paceline.assembly.preflight import facts_of, require_device
from paceline.config import FIELDS, RunConfig
from paceline.data.datasets import load, locate_data, settle_data
from paceline.errors import Interrupted, UserError
from paceline.launch import train
from paceline.reports.console import Console
from paceline.runs.folder import RunFolder, write_atomically
from paceline.runs.result import weights_sha256
from paceline.settings.ranks import rank_here
from paceline.settings.resolve import resolve
from paceline.simulation.cluster import DEFAULT_SPEED
from paceline.simulation.lab.run import Finished, Progress, Spent, check_rows, run_rows
from paceline.simulation.run import simulate
from paceline.system.environment import environment
from paceline.system.signals import INTERRUPTED, TERMINATED
from paceline.tracking.feed import feed
from paceline.tracking.registry import make_tracker

MAY_DIFFER = ("runs", "data_dir", "threads", "device", "checkpoint_every", "track")
"""Settings that say where and how fast a run was made, not what it came to."""
AT_ONCE = {"cpu": 1, "cuda": 256}
"""Rows the lab is given together: a CPU gains nothing by more, and each that has ended is kept."""
SAMPLE_NOTE = "using the built-in sample: figures are not comparable; 'paceline data get fashion-mnist' fetches all"


def settle(config: RunConfig) -> RunConfig:
    """Resolved, with the cluster and the data named that it will have: what is compared with a folder's config."""
    config = resolve(config)
    if config.speeds is None and config.like is None:
        config = replace(config, speeds=DEFAULT_SPEED)
    return settle_data(config)[0]


def note_sample(asked: list[RunConfig], settled: list[RunConfig], console: Console) -> None:
    """Say once that the sample stands in for the whole."""
    if any(had.dataset != has.dataset for had, has in zip(asked, settled, strict=True)):
        console.note(SAMPLE_NOTE)


def why_not_in_the_lab(config: RunConfig) -> str | None:
    """What keeps the lab from this run."""
    try:
        check_rows([config])
    except UserError as error:
        return str(error)
    return None


def folder_of(config: RunConfig) -> RunFolder:
    assert config.name is not None
    return RunFolder(Path(config.runs) / config.name)


def is_done(config: RunConfig) -> bool:
    """Whether the run's folder holds its result; one that holds something else is an error."""
    folder = folder_of(config)
    if not folder.config_file.is_file():
        if folder.path.exists() and not _is_abandoned(folder.path):
            raise UserError(f"{folder.path} is in the way and is no run folder: use another --runs, or remove it")
        return False
    then = folder.config()
    for name in FIELDS:
        if name not in MAY_DIFFER and getattr(then, name) != getattr(config, name):
            raise UserError(
                f"{folder.path} was made with {name} = {getattr(then, name)!r}, not {getattr(config, name)!r}: "
                "use another --runs, or remove it"
            )
    result = folder.result()
    return result is not None and result.get("reason") not in (INTERRUPTED, TERMINATED)


def _is_abandoned(path: Path) -> bool:
    """Whether a folder was made for a run whose config was never written."""
    return path.is_dir() and all(file.name.startswith(".config.toml.") for file in path.iterdir())


def result_of(config: RunConfig) -> dict[str, Any]:
    """Of a run that is done."""
    result = folder_of(config).result()
    assert result is not None, f"{config.name} was made a moment ago"
    return result


def run_missing(configs: list[RunConfig], device: str, console: Console) -> None:
    """Run every settled config whose result is not there yet; each result is kept as soon as it is there."""
    require_device(RunConfig(device=device))
    with alone_in(Path(configs[0].runs)):
        _run_those_missing(configs, device, console)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other commands from running the same rows meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"folder {folder} cannot be written: {error.strerror}; try --runs DIR") from None
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is being filled by another command: wait for it, or stop it first") from None
        yield
    finally:
        os.close(lock)


def _run_those_missing(configs: list[RunConfig], device: str, console: Console) -> None:
    todo = [config for config in configs if not is_done(config)]
    if len(todo) < len(configs):
        console.note(f"{len(configs) - len(todo)} of {len(configs)} runs are there already")
    for config in todo:
        remove_half_made(folder_of(config))
    watch = Watch(console, len(todo))
    try:
        _run_all(todo, device, console, watch)
    except KeyboardInterrupt:
        num_done = len(configs) - len(todo) + watch.num_done
        raise Interrupted(
            f"interrupted: {num_done} of {len(configs)} runs are done and kept in {configs[0].runs}; "
            "the same command goes on from there"
        ) from None


def _run_all(todo: list[RunConfig], device: str, console: Console, watch: Watch) -> None:
    """In the lab what the lab can do; the rest simulated, one by one."""
    reasons = {config.name: why_not_in_the_lab(config) for config in todo}
    simulated = [config for config in todo if reasons[config.name] is not None]
    if simulated and device != "cpu":
        console.note(f"{len(simulated)} of {len(todo)} runs are simulated on the CPU: {reasons[simulated[0].name]}")
    spent = _run_in_lab([config for config in todo if reasons[config.name] is None], device, watch)
    if spent.num_rows > 1:
        console.note(f"the lab on {device}: {spent.line()}")
    for config in simulated:
        inner = Inner(watch)
        _, result = simulate(config, inner)
        watch.num_done += result["reason"] not in (INTERRUPTED, TERMINATED)
        if inner.stopping is not None:  # perhaps when the run had only its scoring left
            raise KeyboardInterrupt


def remove_half_made(folder: RunFolder) -> None:
    """What an interrupted run left; there is nothing of value in it. One that is being made is not touched."""
    if folder.config_file.exists():
        with folder.locked():
            shutil.rmtree(folder.path)
    elif folder.path.exists():
        shutil.rmtree(folder.path)


def _run_in_lab(configs: list[RunConfig], device: str, watch: Watch) -> Spent:
    spent = Spent()
    for part in _same_data(configs):
        location = locate_data(part[0])
        assert location is not None, "the lab takes no tasks of one's own"
        dataset = load(location)
        for start in range(0, len(part), AT_ONCE[device]):
            together = part[start : start + AT_ONCE[device]]
            if device == "cpu":
                torch.set_num_threads(together[0].threads or 1)  # as the simulator does
            for finished in run_rows(together, dataset, torch.device(device), watch.part(len(together)), spent):
                _keep(finished, {**facts_of(finished.config, location), "lab_device": device})
                watch.num_done += 1
    return spent


def _same_data(configs: list[RunConfig]) -> Iterator[list[RunConfig]]:
    parts: dict[tuple[object, ...], list[RunConfig]] = {}
    for config in configs:
        parts.setdefault((config.dataset, config.data_dir, config.max_length, config.image_size), []).append(config)
    yield from parts.values()


def _keep(finished: Finished, facts: dict[str, Any]) -> None:
    """Write a row's run folder; the result comes last."""
    folder = RunFolder.create(finished.config)
    tensors = {name: view.clone() for name, view in finished.layout.views(finished.weights).items()}
    write_atomically(folder.weights_file, save(tensors))
    if not torch.equal(finished.weights, finished.live):
        live = {name: view.clone() for name, view in finished.layout.views(finished.live).items()}
        write_atomically(folder.live_weights_file, save(live))
    diverged = finished.result["status"] == "diverged"
    extra = {
        "weights_sha256": weights_sha256(tensors),
        "num_parameters": finished.layout.num_parameters,
        "reason": "the weights are no longer finite" if diverged else None,
    }
    folder.write_result({**finished.result, **extra, "lab": True, **facts, "environment": environment()})
    for name in finished.config.track or ():
        feed(folder, name, make_tracker(name))


class Watch:
    """Tells the console how many runs are done and how long the rest will take."""

    def __init__(self, console: Console, total: int) -> None:
        self.num_done = 0
        self._console, self._total = console, total
        self._began = time.perf_counter()

    def part(self, size: int) -> Progress:
        """The progress of the next `size` runs."""
        before = self.num_done

        def progress(text: str, share: float) -> None:
            self.show(text if size > 1 else "training", (before + share * size) / self._total)

        return progress

    def show(self, text: str, share: float) -> None:
        done = f"{self.num_done} of {self._total} runs done, {text}"
        left = (time.perf_counter() - self._began) * (1 - share) / share if share > 0.02 else None
        self._console.report({"kind": "working", "text": done, "fraction": share, "seconds_left": left})

    def tell(self, text: str) -> None:
        """A line that stays."""
        self._console.note(text)

    def show_one(self, text: str, share: float) -> None:
        """Of one run at a time."""
        self.show(text, (self.num_done + share) / self._total)


class Inner(Console):
    """The console of one run among many: only how far it is matters."""

    def __init__(self, watch: Watch, text: str = "simulating") -> None:
        super().__init__(quiet=True)
        self._watch, self._text = watch, text

    def report(self, row: dict[str, Any]) -> None:
        if row["kind"] == "progress":
            self._watch.show_one(self._text, row["fraction"])
        elif row["kind"] == "stopping":
            self.stopping = row["reason"]
            self._watch.tell(f"{self.stopping}: ending the run that is under way")


def resolve_for_training(config: RunConfig) -> RunConfig:
    """Resolved, with the data named that it will have: what is compared with a folder's config."""
    return settle_data(resolve(config))[0]


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
                _, result = train(config, inner, rank_here())
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
