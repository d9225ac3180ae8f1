"""A worker that runs a user's script for a server on any machine, as `paceline worker` finds out from its welcome."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, max_workers_of
from paceline.errors import Diverged, Interrupted, PacelineError, UserError
from paceline.runtimes.scripts.process import run_script
from paceline.runtimes.scripts.remote.client import LoopClient, StartAgain
from paceline.runtimes.scripts.remote.code import ServedScript
from paceline.runtimes.scripts.served_loop import WorkerEnv
from paceline.system.process import TETHER_VARIABLE, die_with, helper_command, helper_environment
from paceline.system.signals import leave_signal
from paceline.system.terminal import counted
from paceline.transports.auth import TOKEN_VARIABLE
from paceline.transports.frames import Ending

LEAVE_SECONDS = 10.0  # how long a worker that got SIGTERM may take for its push
LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class WorkerCommand:
    """The command that starts a worker like this one, in the folder and environment that this process began with."""

    line: list[str]
    cwd: str
    environment: dict[str, str]

    @staticmethod
    def of(words: list[str], token: bytes) -> WorkerCommand:
        """`words` are the flags of `paceline worker`, without its number. One that ssh started stays tied to it."""
        module = "paceline.cli.ssh_worker" if TETHER_VARIABLE in os.environ else "paceline"
        environment = {**helper_environment(), TOKEN_VARIABLE: os.fsdecode(token)}
        return WorkerCommand(helper_command(module, "worker", *words), str(Path.cwd()), environment)

    def replace_process(self, worker: int) -> None:
        """Run it in the place of this process, with a new interpreter."""
        os.chdir(self.cwd)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self.line[0], [*self.line, "--worker", str(worker)], self.environment)

    def start(self, worker: int | None, out: int | None = None) -> subprocess.Popen[str]:
        """Start it as a process that ends with this one. All its output goes to `out`, if that is given."""
        number = ["--worker", str(worker)] if worker is not None else []
        return subprocess.Popen(
            [*self.line, *number],
            stdout=out,
            stderr=None if out is None else subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=self.cwd,
            env=self.environment,
            preexec_fn=functools.partial(die_with, os.getpid()),
        )

    def run(self, worker: int | None, pass_on: Callable[[str], None]) -> int:
        """Run it to its end and return its exit code; `pass_on` gets each line that it writes."""
        with self.start(worker, subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                pass_on(line.rstrip())
        return process.returncode


BAD_ENDS: dict[int, type[PacelineError]] = {Ending.STOPPED: Interrupted, Ending.DIVERGED: Diverged}


def require_good_end(ending: int) -> None:
    """Raise Interrupted if the server said that its run was stopped, and Diverged if it has diverged."""
    said = {
        Ending.STOPPED: "the run was stopped: 'paceline server --resume RUN' on its machine continues the run",
        Ending.DIVERGED: "training has diverged: the server, and 'paceline status RUN' on its machine, say why",
    }
    if ending in BAD_ENDS:
        raise BAD_ENDS[ending](said[Ending(ending)])


def work_in_processes(command: WorkerCommand, workers: list[int | None]) -> bool:
    """Run several workers of one script beside each other. Return whether all of them trained to the end.

    On SIGTERM they leave after their pushes, and it raises KeyboardInterrupt.
    """
    with leave_signal(LEAVE_SECONDS) as is_leaving:
        started = [command.start(worker) for worker in workers]
        told = False
        while any(process.poll() is None for process in started):
            if is_leaving() and not told:
                told = True
                for process in started:
                    process.terminate()
            time.sleep(LOOK_SECONDS)
    if told:
        raise KeyboardInterrupt
    codes = {process.returncode for process in started}
    for ending, error in BAD_ENDS.items():
        if error.exit_code in codes:
            require_good_end(ending)
    return not any(codes)


def work_in_script(
    client: LoopClient, welcome: dict[str, Any], config: RunConfig, script: str | None, say: Callable[[str], None]
) -> None:
    """Run the script that the server's welcome names, to its end. Raise UserError if it ends without having joined.

    `script` is its file on this machine, if it is not where the server has it. Raise StartAgain if the server does not
    know this worker any more, because it was restarted or has lost it.
    """
    served, worker = ServedScript.from_fields(welcome["script"]), welcome["worker"]
    line = served.find(script)
    if isinstance(sys.stdout, io.TextIOWrapper):  # often a log or a pipe: show what the script prints at once
        sys.stdout.reconfigure(line_buffering=True)
    threads = counted(config.threads or 1, "thread")
    say(f"worker {worker} of {max_workers_of(config)}: {config.strategy}, {line[0]}, {threads}")
    try:
        run_script(WorkerEnv(config, worker, welcome["incarnation"], client, served.typed, None, client.keep), line)
    except StartAgain:
        raise StartAgain(worker) from None
    finally:
        client.close()
    require_good_end(client.ending)
    if not client.has_joined:
        raise UserError(
            f"{line[0]} ended without calling paceline.join() and session.prepare(...): nothing was trained"
        )
