"""`paceline simulate`: run a config on a simulated cluster and write its run folder."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from paceline.assembly.preflight import announce_rule, provenance, startup_warnings
from paceline.assembly.run import make_server, make_worker, timing_layout, timing_server, work_of
from paceline.assembly.task import make_task, prepare_device
from paceline.assembly.work import WorkAssignment
from paceline.config import RunConfig, max_workers_of
from paceline.core.messages import Join, Reply
from paceline.core.schedules import Budget
from paceline.core.server import Server
from paceline.core.worker import LocalWorker
from paceline.data.datasets import DATASETS, Location, load, resolve_dataset
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.folder import ALL_GONE, RunFolder, new_folder
from paceline.runtimes.server.accounting import TimeShares
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import LocalRuntime
from paceline.settings.fault_table import Fault, never_fired, read_faults
from paceline.settings.notation import count
from paceline.settings.preprocessing import split_of
from paceline.settings.resolve import resolve
from paceline.simulation.cluster import DEFAULT_SPEED, cluster_of
from paceline.simulation.event_queue import EventQueue
from paceline.simulation.faults import inject
from paceline.simulation.simulator import Simulation
from paceline.system.signals import stop_signals
from paceline.tasks.given_weights import read_given
from paceline.tasks.supervised import SupervisedTask
from paceline.tasks.synthetic import TimingModel


def simulate(config: RunConfig, console: Console) -> tuple[RunFolder, dict[str, Any]]:
    """Run the config under a virtual clock; return the run folder and the result."""
    config = resolve(config)
    if config.like is None and config.speeds is None:
        config = dataclasses.replace(config, speeds=DEFAULT_SPEED)  # marks the folder as a simulated run
    faults = check(config)
    config, location = (config, None) if config.timing_only else resolve_dataset(config)
    with new_folder(config) as folder:
        return folder, _simulate(config, folder, location, faults, console)


def check(config: RunConfig) -> tuple[Fault, ...]:
    """Raise UserError for every mistake that can be found before the run; return the fault table."""
    cluster_of(config, 0)
    if config.parameters is not None and not config.timing_only:
        raise UserError("--parameters gives the size of a model that is not trained: add --timing-only")
    if config.parameters is not None and not count(config.parameters):
        raise UserError("--parameters 0: a model has at least one parameter: give a larger number")
    if config.timing_only and config.eval_every is not None:
        raise UserError("--timing-only computes no weights to evaluate: leave out --eval-every and its options")
    if config.timing_only and config.snapshots is not None:
        raise UserError("--timing-only has no weights to keep: leave out --snapshots")
    if config.timing_only and config.weights is not None:
        raise UserError("--timing-only has no weights to begin from: leave out --weights")
    if config.mirror not in (None, "none"):
        raise UserError(f"--mirror {config.mirror}: simulate a run again instead of copying it: leave it out")
    if config.best is not None:
        raise UserError("--best: a simulated run keeps no best weights: leave it out, or train for real")
    if config.device != "cpu":
        raise UserError(f"--device {config.device}: simulated runs compute on the CPU; leave it out")
    return read_faults(Path(config.faults), max_workers_of(config)) if config.faults is not None else ()


def _simulate(
    config: RunConfig, folder: RunFolder, location: Location | None, faults: tuple[Fault, ...], console: Console
) -> dict[str, Any]:
    from paceline.runs.recovery import rebuild

    parts = _timing_parts(config) if config.timing_only else _training_parts(config, folder, location, console)
    for line in startup_warnings(config, location):
        console.note(line)
    if parts.work is not None:
        announce_rule(config, parts.work, console.report)
    queue, to_come = EventQueue(), list(faults)
    hosts: list[Host] = []

    def start_server(send: Callable[[Reply], None]) -> Host:
        """Start the server; after a crash, rebuild it from checkpoint and log."""
        server, rebuilt = parts.make_server(), None
        if hosts:
            hosts[-1].close()
            rebuilt = rebuild(server, parts.make_worker, parts.model, config, folder, console.report)
        so_far, facts = rebuilt.now if rebuilt is not None else 0.0, provenance(config, location)
        runtime = SimulatedRuntime(send, lambda worker: _time_shares(simulation, worker))
        run = server, parts.model, parts.work, config, folder, console.report, runtime
        host = Host(*run, so_far, facts, lambda: queue.now)
        if rebuilt is not None:
            host.resume_from(rebuilt)
        hosts.append(host)
        if config.max_seconds is not None:
            queue.at(queue.now + host.seconds_left, lambda host: _check_time_limit(simulation, host), host)
        return host

    def make_worker(worker: int, incarnation: int) -> LocalWorker:
        return parts.make_worker(Join(worker, incarnation, parts.quotas[worker], config.threads or 1))

    def note_and_inject(simulation: Simulation, fault: Fault) -> None:
        row = {name: value for name, value in dataclasses.asdict(fault).items() if name not in ("kind", "at")}
        hosts[-1].events.write("fault", hosts[-1].clock.now(), fault=fault.kind, **row)
        inject(simulation, fault)
        to_come.remove(fault)

    cluster, workers = cluster_of(config, parts.num_floats, faults), config.workers or 1
    simulation = Simulation(queue, cluster, workers, make_worker, start_server, config.max_workers, note_and_inject)
    began = time.perf_counter()
    with stop_signals(console.report, react=lambda reason: setattr(queue, "stopped", True)) as reasons:
        simulation.run()
        host = hosts[-1]
        if not host.server.finished:
            host.stop(reasons[0] if reasons else ALL_GONE)
        for line in never_fired(to_come, config.faults, queue.now):
            console.note(line)
        result = host.finish(_extra_results(simulation, time.perf_counter() - began))
    host.close()
    return result


def _check_time_limit(simulation: Simulation, host: Host) -> None:
    """Stop at --max-seconds; plan another check if the run's clock was paused meanwhile."""
    queue = simulation.queue
    if host is not simulation.side or simulation.network.server_down:
        return  # the restarted server plans its own check
    if not simulation.num_running and queue.is_empty:
        return  # no worker is left or will join: the run ends anyway
    host.check_time_limit()
    if host.server.finished:
        queue.stopped = True
    else:
        queue.at(queue.now + host.seconds_left, lambda host: _check_time_limit(simulation, host), host)


class SimulatedRuntime(LocalRuntime):
    """Sends replies to the simulator, which measures where a worker's virtual time goes."""

    def __init__(self, send: Callable[[Reply], None], time_shares: Callable[[int], TimeShares]) -> None:
        super().__init__(send)
        self._time_shares = time_shares

    def time_shares(self, worker: int) -> TimeShares:
        """Return where a worker's time went."""
        return self._time_shares(worker)


@dataclass(frozen=True)
class RunParts:
    """The parts of a simulated run: the model, its data, and how to make a server and a worker."""

    model: SupervisedTask | TimingModel
    work: WorkAssignment | None
    quotas: list[int | None]
    num_floats: int
    make_server: Callable[[], Server]
    make_worker: Callable[[Join], LocalWorker]


def _training_parts(config: RunConfig, folder: RunFolder, location: Location | None, console: Console) -> RunParts:
    prepare_device(config)
    dataset = load(location, report=console.report) if location is not None else None
    given = read_given(config, folder.initial_file)
    task = make_task(config, dataset, given)
    work = work_of(task, config)

    def worker(join: Join) -> LocalWorker:
        return make_worker(config, make_task(config, dataset, given), work, join)

    return RunParts(task, work, work.quotas, task.layout.size, partial(make_server, config, task, work), worker)


def _timing_parts(config: RunConfig) -> RunParts:
    """Return the parts of a run whose workers take time but compute nothing; only the data set's size is used."""
    if config.task is not None and config.parameters is None:
        raise UserError("--timing-only with a custom task needs its size: add --parameters, as in --parameters 25.6M")
    info, workers = DATASETS[config.dataset], config.workers or 1
    own = config.epoch_mode == "own"
    passes = workers if own and split_of(config).kind == "full" else 1  # over all data, by all workers in one epoch
    samples = max(1, round(config.epochs * info.train_size * passes))
    quota = max(1, round(samples / (config.batch_size * workers))) if own else None
    budget = Budget(samples, info.train_size, steps=config.steps, per_worker=own)
    layout, quotas = timing_layout(config), [quota] * max_workers_of(config)
    model, server = TimingModel(layout.size, config.batch_size), partial(timing_server, config, layout, budget)
    return RunParts(model, None, quotas, layout.size, server, partial(LocalWorker, model, model))


def _time_shares(simulation: Simulation, number: int) -> TimeShares:
    """Return a worker's time shares so far; time without a step or a message on the network is waiting."""
    worker, now = simulation.workers[number], simulation.queue.now
    sending = simulation.network.links[number].seconds_in_flight
    here = worker.present + (now - worker.joined_at if worker.instance is not None else 0.0)
    begun = now - worker.step_began if worker.step_began is not None else 0.0
    computing, longest = worker.computing + begun, max(worker.longest, begun)
    step = median(worker.recent) if worker.recent else None
    waiting = max(0.0, here - computing - sending)
    return TimeShares(computing, sending, waiting, steps=worker.num_steps, longest=longest, step=step)


def _extra_results(simulation: Simulation, wall_seconds: float) -> dict[str, Any]:
    utilisation = []
    came = max((worker.number for worker in simulation.workers if worker.incarnation >= 0), default=-1) + 1
    for worker in simulation.workers[:came]:
        spent, whole = _time_shares(simulation, worker.number), worker.present or 1.0
        shares = {"computing": spent.computing, "waiting": spent.waiting, "sending": spent.sending}
        utilisation.append({name: round((seconds or 0.0) / whole, 4) for name, seconds in shares.items()})
    return {
        "simulated": True,
        "virtual_seconds": round(simulation.queue.now, 6),
        "wall_seconds": round(wall_seconds, 3),
        "events": simulation.num_events,
        "heap_actions": simulation.queue.num_done,
        "utilisation": utilisation,
        "staleness_histogram": dict(sorted(simulation.side.server.staleness.items())),
    }
