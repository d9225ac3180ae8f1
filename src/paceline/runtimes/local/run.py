"""Train a run on processes of this machine, again after a lost server. Importing this imports no torch."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from paceline.assembly.preflight import provenance, require_fitting_weights, startup_warnings
from paceline.assembly.work import divide_work
from paceline.config import UPKEEP, RunConfig, is_script
from paceline.data.datasets import Location
from paceline.data.shared import SharedDataset
from paceline.errors import ServerLost, UserError
from paceline.interfaces import Report
from paceline.runs.arrival_log import next_incarnation
from paceline.runs.folder import RunFolder, require_survivors
from paceline.runtimes.local.fork_server import ForkServer
from paceline.runtimes.local.process_plan import ProcessPlan
from paceline.runtimes.local.restart import WorkerRestarts
from paceline.runtimes.local.supervisor import Supervisor
from paceline.runtimes.local.worker_output import WorkerOutput
from paceline.settings.fault_table import Fault
from paceline.settings.strategies import on_ring
from paceline.system.memory import require_open_files

OTHER_FILES = 12  # that a server has open at least, beside the connections of its workers


def train_on_processes(
    config: RunConfig,
    folder: RunFolder,
    location: Location | None,
    forks: ForkServer,
    report: Report,
    incarnation: int,
    faults: tuple[Fault, ...] = (),
) -> dict[str, Any]:
    """Decode the data while the fork server imports torch, then train on processes of this machine."""
    shared = SharedDataset(location, report) if location is not None else None
    if shared is not None:
        divide_work(shared.dataset.train_labels, config)  # refuses a division that fails before a process is started
    if config.weights is not None:
        require_fitting_weights(config, folder, shared.dataset.info if shared is not None else None)
    for line in startup_warnings(config, location, is_here=True):
        report({"kind": "note", "text": line})
    dataset, fds = (shared.spec(), shared.fds) if shared is not None else (None, [])
    spec = {"dataset": dataset, "facts": provenance(config, location), "resume": incarnation > 0}
    processes = ProcessPlan(spec, fds, incarnation, faults=faults)
    result = run_local(config, folder, forks, processes.in_ring() if on_ring(config) else processes, report)
    require_survivors(result, folder)
    return result


def run_local(
    config: RunConfig,
    folder: RunFolder,
    forks: ForkServer,
    processes: ProcessPlan,
    report: Report,
    output: WorkerOutput | None = None,
) -> dict[str, Any]:
    """Train on processes of this machine and return the result. Restart up to `config.restart` times."""
    per_worker = 2 if processes.first_worker else 1  # a ring has a second descriptor of each
    require_open_files(per_worker * (config.workers or 1) + OTHER_FILES)
    restarts = WorkerRestarts(config.restart_workers)
    for restart in range(1, config.restart + 2):
        try:
            supervisor = Supervisor(forks, config, folder, processes, report, restarts, output)
            with contextlib.closing(supervisor):
                supervisor.start()
                supervisor.follow()
            break
        except ServerLost as lost:
            if restart > config.restart or not forks.clear():
                raise
            if is_script(config):  # its server has added to the config what the script decides
                config = replace(folder.config(), **{name: getattr(config, name) for name in UPKEEP})
            processes = processes.again(*next_incarnation(folder.arrivals_file, config))
            uses_log = config.recovery == "log" and (config.durable or not is_script(config))
            where = "its newest checkpoint" + (" and its log" if uses_log else "")
            what = f"{lost.what}: going on from {where}"
            report({"kind": "note", "text": f"{what} (restart {restart} of {config.restart})"})
    result = folder.result()
    if result is None:
        raise UserError(f"{folder.path} holds no result although its server finished: was it removed?")
    return result
