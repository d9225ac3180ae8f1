"""From a config to a result: checks what can be checked, finds the data, and hands the run to its runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.assembly.work import divide_work
from paceline.config import SIMULATED_ONLY, RunConfig, is_simulated
from paceline.data.datasets import SAMPLE, Location, load, locate
from paceline.errors import RunFailed, UserError
from paceline.reports.console import Console
from paceline.runs.arrival_log import next_life
from paceline.runs.folder import ALL_GONE, INTERRUPTED, NOT_COME, TERMINATED, RunFolder, is_script
from paceline.settings.durations import parse_delays
from paceline.settings.fault_table import Fault
from paceline.settings.preprocessing import reading_of
from paceline.settings.ranks import Rank, config_of, rank_here
from paceline.settings.resolve import check_names, lr_scale, resolve
from paceline.settings.rules import chosen
from paceline.settings.strategies import on_ring, parse_strategy, pushes_in_a_step
from paceline.settings.warnings import advice
from paceline.system.environment import git_state
from paceline.system.signals import interrupts


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
        raise UserError(f"{path} is a simulated run, which cannot be resumed: {folder.way_on(config)}")
    with folder.locked():
        return folder, _resume(path, folder, config, console)


def _resume(path: Path, folder: RunFolder, config: RunConfig, console: Console) -> dict[str, Any]:
    folder.require_unfinished()
    location = locate_data(config)
    refuse_restart(config)
    incarnation, _ = next_life(folder.arrivals_file, config)
    if in_this_process(config):
        require_device(config)
        return _train_here(config, folder, location, console, incarnation)
    return _train_on_processes(config, folder, location, console, incarnation)


def refuse_imagined(config: RunConfig) -> None:
    """Settings that only a simulated cluster has."""
    asked = [name for name in SIMULATED_ONLY if getattr(config, name) not in (None, False)]
    if asked:
        raise UserError(
            f"{asked[0]} = {getattr(config, asked[0])!r} is for 'paceline simulate': real machines have theirs"
        )


def refuse_restart(config: RunConfig, launched: bool = False) -> None:
    """Only processes of our own are started again."""
    if not config.restart or not (launched or in_this_process(config)):
        return
    what = "--device cuda" if config.device == "cuda" else "--strategy classic"
    why = "a launcher started these processes" if launched else f"{what} trains in the process of this command"
    raise UserError(
        f"--restart {config.restart} starts a killed server again, and {why}: leave it out, "
        "'paceline resume' goes on after a kill"
    )


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


def locate_data(config: RunConfig) -> Location | None:
    """Where the run's data set lies; a task of one's own brings its data along."""
    if config.task is not None:
        return None
    location = locate(config.dataset, Path(config.data_dir) if config.data_dir is not None else None)
    return dataclasses.replace(location, reading=reading_of(config))


def settle_data(config: RunConfig) -> tuple[RunConfig, Location | None]:
    """The data set of a new run; where that is the sample the config says so, and no later look-up finds other data."""
    location = locate_data(config)
    if location is not None and location.sample:
        config = dataclasses.replace(config, dataset=SAMPLE)
        location = locate_data(config)
    return config, location


def in_this_process(config: RunConfig) -> bool:
    """Whether the workers need no processes of their own."""
    return parse_strategy(config.strategy).name == "classic" or config.device == "cuda"


def require_device(config: RunConfig) -> None:
    """The device that was asked for must be there, and a compiler where the step is to be compiled."""
    if config.compile:
        _require_compiler(config)
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "--device cuda: this machine has no CUDA device that torch can use; leave it out for the CPU"
            )
        if config.delay:
            raise UserError(
                "--delay slows processes: workers that share a GPU are one process; leave out one of the two"
            )


def _require_compiler(config: RunConfig) -> None:
    """What torch.compile needs: a C++ compiler, and Triton for a GPU."""
    wanted = [os.environ.get("CXX", ""), "g++", "clang++", "c++"] if config.device == "cpu" else ["gcc", "clang", "cc"]
    if not any(name and shutil.which(name) for name in wanted):
        raise UserError(f"--compile needs a compiler ({', '.join(filter(None, wanted))}): install one, or leave it out")
    if config.device == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError(
            "--compile on a GPU needs triton, which is not installed: 'pip install triton', or leave it out"
        )


def hint(config: RunConfig, location: Location | None, console: Console, skew: float | None = None) -> None:
    """What the user should know before it starts, one line each; `skew` says how far workers' labels are apart."""
    if location is not None and location.sample:
        console.note(
            "using the built-in sample of Fashion-MNIST (12,000 + 2,000 images): "
            "'paceline data get fashion-mnist' fetches all 70,000"
        )
    strategy = parse_strategy(config.strategy)
    pushes = pushes_in_a_step(strategy, config.workers or 1)
    learns = not config.timing_only and not strategy.is_local
    if pushes > 1 and learns and lr_scale(config) == 1.0:
        console.note(
            f"one update averages {pushes} batches ({pushes * config.batch_size} samples) at the lr of one: "
            "--scale-lr auto scales it, with warm-up"
        )
    if config.rule == "auto" and not config.timing_only:
        console.note(chosen(config, skew).line(config.workers or 1))
    for line in advice(config):
        console.note(line)


def facts_of(config: RunConfig, location: Location | None) -> dict[str, Any]:
    """What the result records about where things came from."""
    return {
        "data_origin": location.origin if location is not None else f"task {config.task}",
        "data_path": str(location.path) if location is not None else None,
        "data_is_sample": location.sample if location is not None else False,
        "git": git_state(),
    }


@contextlib.contextmanager
def holding(folder: RunFolder) -> Iterator[None]:
    """A new folder is ours alone; a run that fails before it starts leaves none behind."""
    with folder.locked():
        try:
            yield
        except BaseException:
            folder.discard_unstarted()
            raise


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
        hint(config, location, console, skew)
        data = {"dataset": shared.spec() if shared is not None else None}
        spec = {**data, "facts": facts_of(config, location), "resume": incarnation > 0}
        processes = Processes(spec, shared.fds if shared is not None else [], incarnation, faults=faults)
        if on_ring(config):
            processes = processes.in_ring()
        result = run_local(config, folder, forks, processes, console.report)
    require_survivors(result, folder)
    return result


def require_survivors(result: dict[str, Any], folder: RunFolder) -> None:
    """A run that ended because nobody was left is a failure, with a way on."""
    if result["status"] == "stopped" and result["reason"] in (ALL_GONE, NOT_COME):
        raise RunFailed(f"{result['reason']} at update {result['updates']}: {folder.way_on(folder.config())}")


def _train_here(
    config: RunConfig,
    folder: RunFolder,
    location: Location | None,
    console: Console,
    incarnation: int,
) -> dict[str, Any]:
    """`classic`, or several workers on one GPU: everything in this process; an incarnation above 0 resumes."""
    from paceline.assembly.run import make_join, make_seat, make_server, make_task, prepare_device, work_of
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
    hint(config, location, console, work.skew)

    def seat(join: Any) -> Any:
        return make_seat(config, make_task(config, dataset).to(device), work, join)

    rebuilt = rebuild(server, seat, task, config, folder, console.report) if incarnation else None
    seconds = rebuilt.now if rebuilt is not None else 0.0
    host = Host(server, task, work, config, folder, console.report, seconds, facts_of(config, location))
    if rebuilt is not None:
        host.go_on(rebuilt)
    seats = [seat(make_join(config, work, worker, incarnation)) for worker in range(config.workers or 1)]
    with stop_signals(console) as reason:
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
    with contextlib.closing(meeting), stop_signals(console) as reasons:
        if not rank.leads:
            result = Member(config, rank, dataset, meeting).follow()
            return RunFolder(Path(result["folder"])), result
        folder = RunFolder.create(config)
        with holding(folder):
            member = Member(config, rank, dataset, meeting)
            hint(config, location, console, member.place.work.skew)
            facts = {**facts_of(config, location), "folder": str(folder.path)}
            return folder, member.lead(folder, console.report, facts, lambda: reasons[0] if reasons else None)


@contextlib.contextmanager
def stop_signals(console: Console, react: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """Ctrl-C and SIGTERM become a reason to stop, looked at between two steps; a second Ctrl-C does not wait."""
    reasons: list[str] = []

    def stop(number: int, frame: object) -> None:
        if reasons and number == signal.SIGINT:
            raise KeyboardInterrupt
        reasons.append(INTERRUPTED if number == signal.SIGINT else TERMINATED)
        console.report({"kind": "stopping", "reason": reasons[0]})
        if react is not None:
            react(reasons[0])

    with interrupts(stop):
        yield reasons
