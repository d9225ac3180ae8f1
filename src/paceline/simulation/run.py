"""`paceline simulate`: from a config to the result of a run on a cluster that does not exist."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline.assembly.preflight import facts_of, startup_warnings
from paceline.assembly.run import make_seat, make_server, timing_layout, timing_server, work_of
from paceline.assembly.task import make_task, prepare_device
from paceline.assembly.work import Work
from paceline.config import RunConfig, places_of
from paceline.core.messages import Join, Reply
from paceline.core.schedules import Budget
from paceline.core.server import Server
from paceline.core.worker import Seat
from paceline.data.datasets import DATASETS, Location, load, settle_data
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.folder import ALL_GONE, RunFolder, holding
from paceline.runtimes.server.accounting import Spent
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import LocalRuntime
from paceline.settings.fault_table import Fault, read_faults
from paceline.settings.notation import count
from paceline.settings.resolve import resolve
from paceline.simulation.cluster import DEFAULT_SPEED, cluster_of
from paceline.simulation.faults import inject
from paceline.simulation.simulator import Simulation
from paceline.system.signals import stop_signals
from paceline.tasks.supervised import SupervisedTask
from paceline.tasks.synthetic import TimingModel


def simulate(config: RunConfig, console: Console) -> tuple[RunFolder, dict[str, Any]]:
    """Run what the config says under a virtual clock; returns where it lies and what it came to."""
    config = resolve(config)
    if config.like is None and config.speeds is None:
        config = dataclasses.replace(config, speeds=DEFAULT_SPEED)  # so that the folder says what kind of run it was
    faults = check(config)
    config, location = (config, None) if config.timing_only else settle_data(config)
    folder = RunFolder.create(config)
    with holding(folder):
        return folder, _simulate(config, folder, location, faults, console)


def check(config: RunConfig) -> tuple[Fault, ...]:
    """Every mistake that can be found before anything is made; returns the faults."""
    cluster_of(config, 0)
    if config.parameters is not None and not config.timing_only:
        raise UserError("--parameters is the size of a model that is not there: add --timing-only")
    if config.parameters is not None and not count(config.parameters):
        raise UserError("--parameters 0: a model has at least one parameter")
    if config.timing_only and config.eval_every is not None:
        raise UserError("--timing-only computes nothing to evaluate: leave out --eval-every and what goes with it")
    if config.timing_only and config.snapshots is not None:
        raise UserError("--timing-only has no weights to keep: leave out --snapshots")
    if config.device != "cpu":
        raise UserError(f"--device {config.device}: simulated runs compute on the CPU; leave it out")
    return read_faults(Path(config.faults), places_of(config)) if config.faults is not None else ()


def _simulate(
    config: RunConfig, folder: RunFolder, location: Location | None, faults: tuple[Fault, ...], console: Console
) -> dict[str, Any]:
    from paceline.runs.recovery import rebuild
    from paceline.simulation.event_queue import Agenda

    crew = _timing_crew(config) if config.timing_only else _training_crew(config, location, console)
    for line in startup_warnings(config, location, crew.work.skew if crew.work is not None else None):
        console.note(line)
    agenda = Agenda()
    hosts: list[Host] = []

    def start_server(send: Callable[[Reply], None]) -> Host:
        """The first time a new one; later, what checkpoint and log say it was."""
        server, rebuilt = crew.make_server(), None
        if hosts:
            hosts[-1].close()
            rebuilt = rebuild(server, crew.make_seat, crew.model, config, folder, console.report)
        so_far, facts = rebuilt.now if rebuilt is not None else 0.0, facts_of(config, location)
        runtime = SimulatedRuntime(send, lambda worker: _spent(simulation, worker))
        parts = server, crew.model, crew.work, config, folder, console.report, runtime
        host = Host(*parts, so_far, facts, lambda: agenda.now)
        if rebuilt is not None:
            host.go_on(rebuilt)
        hosts.append(host)
        if config.max_seconds is not None:
            agenda.at(agenda.now + host.seconds_left, lambda host: _look_at_the_clock(simulation, host), host)
        return host

    def come(worker: int, incarnation: int) -> Seat:
        return crew.make_seat(Join(worker, incarnation, crew.quotas[worker], config.threads or 1))

    cluster = cluster_of(config, crew.num_floats, faults)

    def note_and_inject(simulation: Simulation, fault: Fault) -> None:
        row = {name: value for name, value in dataclasses.asdict(fault).items() if name not in ("kind", "at")}
        hosts[-1].events.write("fault", hosts[-1].clock.now(), fault=fault.kind, **row)
        inject(simulation, fault)

    workers, places = config.workers or 1, config.max_workers
    simulation = Simulation(agenda, cluster, workers, come, start_server, places, note_and_inject)
    began = time.perf_counter()
    with stop_signals(console.report, react=lambda reason: setattr(agenda, "stopped", True)) as reasons:
        simulation.run()
        host = hosts[-1]
        if not host.server.over:
            host.stop(reasons[0] if reasons else ALL_GONE)
        result = host.finish(_found(simulation, time.perf_counter() - began))
    host.close()
    return result


def _look_at_the_clock(simulation: Simulation, host: Host) -> None:
    """The virtual clock reads --max-seconds, unless it stood still meanwhile."""
    agenda = simulation.agenda
    if host is not simulation.side or simulation.wire.is_down:
        return  # a server that starts again plans again
    if not simulation.num_here and agenda.is_empty:
        return  # nobody is left, and nobody is to come: that is how it ends
    host.look_at_the_clock()
    if host.server.over:
        agenda.stopped = True
    else:
        agenda.at(agenda.now + host.seconds_left, lambda host: _look_at_the_clock(simulation, host), host)


class SimulatedRuntime(LocalRuntime):
    """Replies go to the simulator, which measures where a worker's virtual time goes."""

    def __init__(self, send: Callable[[Reply], None], time_shares: Callable[[int], Spent]) -> None:
        super().__init__(send)
        self._time_shares = time_shares

    def time_shares(self, worker: int) -> Spent:
        """Where a worker's time went."""
        return self._time_shares(worker)


@dataclass(frozen=True)
class Crew:
    """Who takes part: how a server and a worker are made, and what they train."""

    model: SupervisedTask | TimingModel
    work: Work | None
    quotas: list[int | None]
    num_floats: int
    make_server: Callable[[], Server]
    make_seat: Callable[[Join], Seat]


def _training_crew(config: RunConfig, location: Location | None, console: Console) -> Crew:
    """Workers that compute real gradients."""
    prepare_device(config)
    dataset = load(location, report=console.report) if location is not None else None
    task = make_task(config, dataset)
    work = work_of(task, config)

    def seat(join: Join) -> Seat:
        return make_seat(config, make_task(config, dataset), work, join)

    return Crew(task, work, work.quotas, task.layout.size, lambda: make_server(config, task, work), seat)


def _timing_crew(config: RunConfig) -> Crew:
    """Workers that take time and compute nothing; the data set is known by its size."""
    if config.task is not None and config.parameters is None:
        raise UserError("--timing-only with a task of your own: give its size, as in --parameters 25.6M")
    info, workers = DATASETS[config.dataset], config.workers or 1
    own = config.epoch_mode == "own"
    quota = max(1, round(config.epochs * info.train_size / (config.batch_size * workers))) if own else None
    samples = max(1, round(config.epochs * info.train_size))
    budget = Budget(samples, info.train_size, steps=config.steps, own=own)
    layout = timing_layout(config)
    model = TimingModel(layout.size, config.batch_size)

    def server() -> Server:
        return timing_server(config, layout, budget)

    return Crew(model, None, [quota] * places_of(config), layout.size, server, lambda join: Seat(model, model, join))


def _spent(simulation: Simulation, number: int) -> Spent:
    """Where a worker's time has gone so far: what is neither a step nor a message under way is waiting."""
    worker, sending, now = simulation.workers[number], simulation.wire.lines[number].under_way, simulation.agenda.now
    here = worker.present + (now - worker.joined_at if worker.seat is not None else 0.0)
    computing = worker.computing + (now - worker.step_began if worker.step_began is not None else 0.0)
    step = median(worker.recent) if worker.recent else None
    return Spent(computing, sending, max(0.0, here - computing - sending), steps=worker.num_steps, step=step)


def _found(simulation: Simulation, wall_seconds: float) -> dict[str, Any]:
    """What a simulated run adds to the result."""
    utilisation = []
    came = max((worker.number for worker in simulation.workers if worker.incarnation >= 0), default=-1) + 1
    for worker in simulation.workers[:came]:
        spent, whole = _spent(simulation, worker.number), worker.present or 1.0
        shares = {"computing": spent.computing, "waiting": spent.waiting, "sending": spent.sending}
        utilisation.append({name: round((seconds or 0.0) / whole, 4) for name, seconds in shares.items()})
    return {
        "simulated": True,
        "virtual_seconds": round(simulation.agenda.now, 6),
        "wall_seconds": round(wall_seconds, 3),
        "events": simulation.num_events,
        "heap_actions": simulation.agenda.num_done,
        "utilisation": utilisation,
        "staleness_histogram": dict(sorted(simulation.side.server.staleness.items())),
    }
