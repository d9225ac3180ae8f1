"""A worker that runs a user's script for a server on any machine, as `paceline worker` finds out from its welcome."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.runtimes.scripts.process import run_script
from paceline.runtimes.scripts.remote.client import LoopClient, StartAgain
from paceline.runtimes.scripts.remote.code import ServedScript
from paceline.runtimes.scripts.served_loop import WorkerEnv
from paceline.system.process import TETHER_VARIABLE, die_with, helper_command, helper_environment
from paceline.transports.auth import TOKEN_VARIABLE


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
        os.execve(self.line[0], [*self.line, "--worker", str(worker)], self.environment)

    def start(self, worker: int | None) -> subprocess.Popen[bytes]:
        """Start it as a process that ends with this one."""
        number = ["--worker", str(worker)] if worker is not None else []
        end_too = functools.partial(die_with, os.getpid())
        return subprocess.Popen([*self.line, *number], cwd=self.cwd, env=self.environment, preexec_fn=end_too)


def work_in_processes(command: WorkerCommand, workers: list[int | None]) -> bool:
    """Run several workers of one script beside each other. Return whether all of them trained to the end."""
    started = [command.start(worker) for worker in workers]
    return not any([process.wait() for process in started])


def work_in_script(
    client: LoopClient, welcome: dict[str, Any], config: RunConfig, script: str | None, say: Callable[[str], None]
) -> None:
    """Run the script that the server's welcome names, to its end.

    `script` is its file on this machine, if it is not where the server has it. Raise StartAgain if the server does not
    know this worker any more, because it was restarted or has lost it.
    """
    served, worker = ServedScript.from_fields(welcome["script"]), welcome["worker"]
    line = served.find(script)
    say(f"worker {worker} of {config.workers}: {config.strategy}, {line[0]}, {config.threads} threads")
    try:
        run_script(WorkerEnv(config, worker, welcome["incarnation"], client, served.typed, None, client.keep), line)
    except StartAgain:
        raise StartAgain(worker) from None
    finally:
        client.close()
