"""From a config to a result: checks what can be checked, finds the data, and hands the run to its runtime."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from paceline.assembly.preflight import (
    facts_of,
    in_this_process,
    locate_data,
    refuse_imagined,
    refuse_restart,
    require_device,
    settle_data,
    startup_warnings,
)
from paceline.assembly.work import divide_work
from paceline.config import RunConfig, is_simulated
from paceline.data.datasets import Location, load
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.arrival_log import next_incarnation
from paceline.runs.folder import RunFolder, holding, is_script, require_survivors
from paceline.settings.durations import parse_delays
from paceline.settings.fault_table import Fault
from paceline.settings.ranks import Rank, config_of, rank_here
from paceline.settings.resolve import check_names, resolve
from paceline.settings.strategies import on_ring
from paceline.system.signals import stop_signals


def train(config: RunConfig, console: Console, tls: bool = False) -> tuple[RunFolder, dict[str, Any]]:
    """Run what the config says; returns where it lies and what it came to. `tls` is for ranks of a star."""
    rank = rank_here()
    if rank is not None:
        config = config_of(rank, config)
        if not on_ring(config):
            from paceline.runtimes.cluster.rank_star import train_as_rank_of_star

            return train_as_rank_of_star(config, rank, console, tls)
    if tls:
        raise UserError(f"--tls: --strategy {config.strategy} has no server; its ring is torch.distributed's, in clear")
    config = resolve(config, launched=rank is not None)
    refuse_imagined(config)
    refuse_restart(config, launched=rank is not None)
    faults = _faults(config)
    config, location = settle_data(config)
    require_device(config)
    if rank is not None:
        return _train_as_rank(config, rank, location, console)
    folder = RunFolder.create(config)
    with holding(folder):
        if in_this_process(config):
            return folder, _train_here(config, folder, location, console, incarnation=0)
        return folder, _train_on_processes(config, folder, location, console, incarnation=0, faults=faults)


def resume(path: Path, console: Console, upkeep: dict[str, Any] | None = None) -> tuple[RunFolder, dict[str, Any]]:
    """Go on with a run that was stopped or killed, from its newest checkpoint and its log.

    `upkeep` are settings about the run's files that are to be others from here on.
    """
    if rank_here() is not None:
        raise UserError(f"{path} is resumed by one command on one machine: leave the launcher out")
    folder = RunFolder.open(path)
    config = dataclasses.replace(folder.config(), **(upkeep or {}))
    check_names(config)
    if is_script(config):
        from paceline.runtimes.scripts.launch import resume_script

        with folder.locked():
            return folder, resume_script(folder, config, console)
    if is_simulated(config):
        raise UserError(f"{path} is a simulated run, which cannot be resumed: {folder.resume_hint(config)}")
    with folder.locked():
        return folder, _resume(path, folder, config, console)


def _resume(path: Path, folder: RunFolder, config: RunConfig, console: Console) -> dict[str, Any]:
    folder.require_unfinished()
    location = locate_data(config)
    refuse_restart(config)
    incarnation, _ = next_incarnation(folder.arrivals_file, config)
    if in_this_process(config):
        require_device(config)
        return _train_here(config, folder, location, console, incarnation)
    return _train_on_processes(config, folder, location, console, incarnation)


def _faults(config: RunConfig) -> tuple[Fault, ...]:
    """What the processes of a new run are to suffer; a resumed run is left in peace."""
    if config.faults is None:
        return ()
    if in_this_process(config):
        what = "--device cuda" if config.device == "cuda" else "--strategy classic"
        raise UserError(
            f"--faults {config.faults} is for workers that are processes, and {what} has none: leave out one of the "
            "two, or try it in 'paceline simulate'"
        )
    from paceline.runtimes.local.fault_injection import faults_for_processes

    return faults_for_processes(config)


def _train_on_processes(
    config: RunConfig,
    folder: RunFolder,
    location: Location | None,
    console: Console,
    incarnation: int,
    faults: tuple[Fault, ...] = (),
) -> dict[str, Any]:
    from paceline.data.shared import SharedDataset
    from paceline.runtimes.local.fork_server import ForkServer
    from paceline.runtimes.local.supervisor import Processes, run_local

    with ForkServer() as forks:
        shared = SharedDataset(location, console.report) if location is not None else None
        skew = None
        if shared is not None:
            skew = divide_work(shared.dataset.train_labels, config).skew
        for line in startup_warnings(config, location, skew):
            console.note(line)
        data = {"dataset": shared.spec() if shared is not None else None}
        spec = {**data, "facts": facts_of(config, location), "resume": incarnation > 0}
        processes = Processes(spec, shared.fds if shared is not None else [], incarnation, faults=faults)
        if on_ring(config):
            processes = processes.in_ring()
        result = run_local(config, folder, forks, processes, console.report)
    require_survivors(result, folder)
    return result


def _train_here(
    config: RunConfig,
    folder: RunFolder,
    location: Location | None,
    console: Console,
    incarnation: int,
) -> dict[str, Any]:
    """`classic`, or several workers on one GPU: everything in this process; an incarnation above 0 resumes."""
    from paceline.assembly.run import make_join, make_seat, make_server, work_of
    from paceline.assembly.task import make_task, prepare_device
    from paceline.runs.recovery import rebuild
    from paceline.runtimes.local.in_process import run_inline
    from paceline.runtimes.server.host import Host
    from paceline.system.memory import keep_freed_memory

    keep_freed_memory()
    device = prepare_device(config)
    dataset = load(location, report=console.report) if location is not None else None
    task = make_task(config, dataset).to(device)
    work = work_of(task, config)
    server = make_server(config, task, work)
    for line in startup_warnings(config, location, work.skew):
        console.note(line)

    def seat(join: Any) -> Any:
        return make_seat(config, make_task(config, dataset).to(device), work, join)

    rebuilt = rebuild(server, seat, task, config, folder, console.report) if incarnation else None
    seconds = rebuilt.now if rebuilt is not None else 0.0
    host = Host(server, task, work, config, folder, console.report, seconds, facts_of(config, location))
    if rebuilt is not None:
        host.go_on(rebuilt)
    seats = [seat(make_join(config, work, worker, incarnation)) for worker in range(config.workers or 1)]
    with stop_signals(console.report) as reason:
        delays = parse_delays(config.delay or [], config.workers or 1)
        run_inline(host, seats, lambda: reason[0] if reason else None, delays)
        result = host.finish()
    host.close()
    return result


def _train_as_rank(
    config: RunConfig, rank: Rank, location: Location | None, console: Console
) -> tuple[RunFolder, dict[str, Any]]:
    """One of the processes that a launcher started; only the first keeps a folder, and speaks."""
    from paceline.runtimes.ring.process_group import Meeting
    from paceline.runtimes.ring.rank import Member

    if config.faults is not None:
        raise UserError(
            f"--faults {config.faults}: processes that a launcher started are not ours to kill; leave it out"
        )
    dataset = load(location) if location is not None else None
    meeting = Meeting(rank)
    with contextlib.closing(meeting), stop_signals(console.report) as reasons:
        if not rank.leads:
            result = Member(config, rank, dataset, meeting).follow()
            return RunFolder(Path(result["folder"])), result
        folder = RunFolder.create(config)
        with holding(folder):
            member = Member(config, rank, dataset, meeting)
            for line in startup_warnings(config, location, member.place.work.skew):
                console.note(line)
            facts = {**facts_of(config, location), "folder": str(folder.path)}
            return folder, member.lead(folder, console.report, facts, lambda: reasons[0] if reasons else None)
