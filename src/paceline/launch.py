"""From settings to a result: check them, start the first process, find the data, run."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.assembly.preflight import require_device
from paceline.config import RunConfig, is_script, is_simulated
from paceline.data.datasets import Location, locate_data, resolve_dataset
from paceline.errors import UserError
from paceline.interfaces import Report
from paceline.object_store.mirroring import mirrored_to_store
from paceline.reports.console import Console
from paceline.runs.arrival_log import next_incarnation
from paceline.runs.folder import RunFolder, new_folder
from paceline.settings.fault_table import Fault
from paceline.settings.features import Feature
from paceline.settings.ranks import Rank, config_of
from paceline.settings.resolve import check_names, check_processes, refuse_simulated, resolve
from paceline.settings.stopping import BUILT_IN_METRICS, require_measured
from paceline.settings.strategies import in_this_process, on_ring, require_feature

if TYPE_CHECKING:
    from paceline.runtimes.local.fork_server import ForkServer


def train(
    config: RunConfig,
    console: Console,
    rank: Rank | None = None,
    tls: bool | None = None,
    command: list[str] | None = None,
) -> tuple[RunFolder, dict[str, Any]]:
    """Train a new run; return its folder and its result.

    `rank` says which process this is if a launcher started it. `tls` says whether to encrypt what the ranks of a star
    send; None: if they are on several machines. `command` is the user's script and its arguments, if it trains.
    """
    if rank is not None:
        config = config_of(rank, config, has_server=command is not None)
        if command is not None or not on_ring(config):
            from paceline.runtimes.cluster.rank_star import train_as_rank_of_star

            return train_as_rank_of_star(config, rank, console, tls, command)
    if command is not None:
        from paceline.runtimes.scripts.launch import run_script

        return run_script(config, command, console)
    if tls:
        require_feature(config, Feature.TLS, "--tls")
    config = resolve(config, launched=rank is not None)
    refuse_simulated(config)
    check_processes(config, launched=rank is not None)
    if config.task is None:
        require_measured(config, BUILT_IN_METRICS, has_test=True)  # the task of a user's own is asked once it is built
    faults = _faults(config)
    if config.compile or config.device != "cpu":
        require_device(config)
    if rank is not None:
        from paceline.runtimes.ring.rank import train_as_rank

        if rank.leads and not rank.is_alone:
            console.note("the ring between hosts is Gloo's or NCCL's own: neither encrypted nor authenticated")
        config, location = resolve_dataset(config)
        return train_as_rank(config, rank, location, console.report)
    with _fork_server(config) as forks:  # it imports torch while this process finds the data
        config, location = resolve_dataset(config)
        with new_folder(config) as folder, mirrored_to_store(folder, config, console.report):
            return folder, _run(config, folder, location, forks, console.report, 0, faults)


def resume(
    path: Path, console: Console, upkeep: dict[str, Any] | None = None, rank: Rank | None = None
) -> tuple[RunFolder, dict[str, Any]]:
    """Go on with a run that was stopped or killed, from its newest checkpoint and its log.

    `upkeep` holds new values for settings of the run's files.
    """
    if rank is not None:
        raise UserError(f"{path} is resumed by one command on one machine: leave the launcher out")
    folder = RunFolder.open(path)
    config = dataclasses.replace(folder.config(), **(upkeep or {}))
    check_names(config)
    if is_simulated(config):
        raise UserError(f"{path} is a simulated run, which cannot be resumed: {folder.resume_hint(config)}")
    if folder.served().get("by_hand"):
        what = f"{path} was served to workers that connect, and they would not find it"
        raise UserError(f"{what}: 'paceline server --resume {path}' continues it, with the workers that come back")
    with folder.locked():
        folder.require_unfinished(config.recovery)
        if is_script(config):
            from paceline.runtimes.scripts.launch import resume_script

            return folder, resume_script(folder, config, console)
        location = locate_data(config)
        check_processes(config)
        require_device(config)
        incarnation, _ = next_incarnation(folder.arrivals_file, config)
        with mirrored_to_store(folder, config, console.report), _fork_server(config) as forks:
            return folder, _run(config, folder, location, forks, console.report, incarnation)


def _faults(config: RunConfig) -> tuple[Fault, ...]:
    if config.faults is None:
        return ()
    from paceline.runtimes.local.fault_injection import faults_for_processes

    return faults_for_processes(config)


def _fork_server(config: RunConfig) -> AbstractContextManager[ForkServer | None]:
    """Start the process that forks the server and the workers; None if they all run in this process."""
    if in_this_process(config):
        return nullcontext()
    from paceline.runtimes.local.fork_server import ForkServer

    return ForkServer()


def _run(
    config: RunConfig,
    folder: RunFolder,
    location: Location | None,
    forks: ForkServer | None,
    report: Report,
    incarnation: int,
    faults: tuple[Fault, ...] = (),
) -> dict[str, Any]:
    """Train in this process or on processes of this machine; an incarnation above 0 resumes."""
    if forks is None:
        from paceline.runtimes.local.in_process import train_in_process

        return train_in_process(config, folder, location, report, incarnation)
    from paceline.runtimes.local.run import train_on_processes

    with forks:  # all processes end before the folder is unlocked or removed
        return train_on_processes(config, folder, location, forks, report, incarnation, faults)
