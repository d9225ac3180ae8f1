"""A process that runs a user's script as one worker: `paceline.join()` in it finds the server through here."""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.assembly.cpu_sharing import yield_to_server
from paceline.assembly.task import initial_seed, seed_generators
from paceline.config import from_dict, max_workers_of
from paceline.errors import PacelineError, RunFailed
from paceline.runs.folder import RunFolder
from paceline.runtimes.scripts import session
from paceline.runtimes.scripts.served_loop import WorkerEnv, keep_in
from paceline.settings.ranks import hide_launcher
from paceline.system.memory import keep_freed_memory
from paceline.transports.shared_memory import SharedMemoryClient


def main(spec: dict[str, Any], fds: list[int]) -> int:
    """Run the script to its end, as `python SCRIPT ARGUMENTS` would."""
    yield_to_server()
    config = from_dict(spec["config"])
    transport = SharedMemoryClient(socket.socket(fileno=fds[0]), max_workers=max_workers_of(config))
    folder = Path(spec["folder"]).resolve() if not spec.get("replay") else None
    keep = functools.partial(keep_in, RunFolder(folder)) if folder is not None else None
    typed = frozenset(spec.get("typed", ()))
    env = WorkerEnv(config, spec["worker"], spec["incarnation"], transport, typed, folder, keep)
    if "cwd" in spec:
        os.chdir(spec["cwd"])
    try:
        run_script(env, spec["script"])
    except PacelineError as error:
        if not spec.get("replay"):
            raise
        if isinstance(error, RunFailed):  # the recorded run lost this worker
            return 0
        print(f"{spec['name']}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run_script(env: WorkerEnv, command: list[str]) -> None:
    """Run a script and its arguments in this process; `paceline.join()` in it finds `env`."""
    keep_freed_memory()
    torch.set_num_threads(env.config.threads or 1)
    hide_launcher()
    session.inherited = env
    seed_generators(initial_seed(env.config))
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    with contextlib.suppress(session.TrainingOver):
        _run(command[0])
        _finish()


def _finish() -> None:
    """End the training of a worker whose script ended without an error and did not say so itself."""
    if session.joined is not None:
        session.joined.end()


def _run(script: str) -> None:
    """Run it; a `next(...)` on a loader without a further batch, which no `for` catches, may be the end of training."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if not stop.code:
            _finish()
        raise
    except PacelineError:
        raise
    except Exception as error:
        is_missing = isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration)  # in a generator
        if session.joined is not None:
            if is_missing:
                session.joined.explain_missing_batch()
            session.joined.explain(error)
        raise
