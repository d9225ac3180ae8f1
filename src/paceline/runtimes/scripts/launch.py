"""`paceline run`: several processes of one user script, and a server that gets the model from them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.assembly.preflight import provenance
from paceline.config import SCRIPT, RunConfig, given, max_workers_of
from paceline.errors import UserError
from paceline.object_store.mirroring import mirrored_to_store
from paceline.reports.console import Console
from paceline.runs.arrival_log import next_incarnation
from paceline.runs.folder import RunFolder, new_folder, require_survivors
from paceline.runs.recording import ScriptCall
from paceline.runtimes.local.fault_injection import faults_for_processes
from paceline.runtimes.local.fork_server import ForkServer
from paceline.runtimes.local.process_plan import ProcessPlan
from paceline.runtimes.local.run import run_local
from paceline.runtimes.local.worker_output import WorkerOutput
from paceline.runtimes.scripts.lines_to_add.message import require_paceline
from paceline.settings.features import SCRIPT_MAY_DECIDE, Feature
from paceline.settings.resolve import resolve_own_loop
from paceline.settings.strategies import require_feature


def settings_of_script(config: RunConfig, command: list[str]) -> tuple[RunConfig, list[str]]:
    """Check `command` (a script and its arguments); return the run's settings, and the names of those that are given.

    A script that does not import Paceline is refused, with the lines to add.
    """
    if not command:
        raise UserError("which script? as in 'paceline run -n 4 train.py'")
    script = Path(command[0])
    if script.is_dir():
        raise UserError(f"script {script} is a folder: give the script in it, as in 'paceline run {script}/train.py'")
    if not script.is_file():
        raise UserError(f"script {script} does not exist")
    if script.suffix == ".toml":
        raise UserError(f"{script} is a file of settings, and no script: 'paceline train {script}'")
    typed = list(given(config, SCRIPT_MAY_DECIDE))
    config = resolve_own_loop(dataclasses.replace(config, task=f"{SCRIPT}:{script.stem}"))
    require_paceline(script)
    return config, typed


def run_script(config: RunConfig, command: list[str], console: Console) -> tuple[RunFolder, dict[str, Any]]:
    """Run `command` on the config's workers on this machine and return the result."""
    config, typed = settings_of_script(config, command)
    faults = faults_for_processes(config)
    with new_folder(config) as folder, mirrored_to_store(folder, config, console.report), ForkServer() as forks:
        ScriptCall.of(command).save(folder)
        spec = {"facts": provenance(config, None), "script": command, "typed": typed}
        processes = ProcessPlan(spec, [], server_role="script server", worker_role="script", faults=faults)
        with _output_of(config, console) as output:
            result = run_local(config, folder, forks, processes, console.report, output)
    require_survivors(result, folder)
    return folder, result


def resume_script(folder: RunFolder, config: RunConfig, console: Console) -> dict[str, Any]:
    """Start the script again in its folder. The server resumes from the newest checkpoint.

    Later pushes are read from the folder if the run is durable, else they are lost.
    """
    call = script_to_resume(folder, config, console.note)
    incarnation, _ = next_incarnation(folder.arrivals_file, config)
    spec = {"facts": provenance(config, None), "script": call.command, "cwd": call.cwd, "resume": True}
    with mirrored_to_store(folder, config, console.report), ForkServer() as forks:
        processes = ProcessPlan(spec, [], incarnation, server_role="script server", worker_role="script")
        with _output_of(config, console) as output:
            result = run_local(config, folder, forks, processes, console.report, output)
    require_survivors(result, folder)
    return result


@contextlib.contextmanager
def _output_of(config: RunConfig, console: Console) -> Iterator[WorkerOutput | None]:
    """Show what several workers print line by line; one alone has the terminal to itself, unless JSON follows."""
    is_alone = (config.workers or 1) == 1 and max_workers_of(config) == 1
    if is_alone and not console.keeps_stdout:
        yield None
        return
    with contextlib.closing(WorkerOutput(console.report, console.is_behind, numbered=not is_alone)) as output:
        yield output


def script_to_resume(folder: RunFolder, config: RunConfig, note: Callable[[str], None]) -> ScriptCall:
    """The script of a run that goes on; lines say that it begins at its top, and whether it has changed."""
    if config.recovery == "skip-batch":
        require_feature(config, Feature.SKIP_BATCH, "--recovery skip-batch")
    call = ScriptCall.load(folder)
    if call.changed:
        note(f"{call.path} has changed since the run began: it goes on with the script as it is now")
    note(f"{call.path.name} starts again from its top, in {call.cwd}: it writes again what it writes before its loop")
    return call
