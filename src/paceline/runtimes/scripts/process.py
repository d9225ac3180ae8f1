"""A process that runs a user's script as one worker: `paceline.join()` in it finds the server through here."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.assembly.cpu_sharing import yield_to_server
from paceline.assembly.task import initial_seed, seed_generators
from paceline.config import from_dict
from paceline.errors import PacelineError, RunFailed
from paceline.runtimes.scripts import session
from paceline.system.memory import keep_freed_memory
from paceline.transports.shared_memory import SharedMemoryClient


def main(spec: dict[str, Any], fds: list[int]) -> int:
    """Run the script to its end, as `python SCRIPT ARGUMENTS` would."""
    keep_freed_memory()
    yield_to_server()
    config = from_dict(spec["config"])
    torch.set_num_threads(config.threads or 1)
    transport = SharedMemoryClient(socket.socket(fileno=fds[0]))
    folder = Path(spec["folder"]).resolve() if not spec.get("replay") else None
    typed = frozenset(spec.get("typed", ()))
    session.inherited = session.WorkerEnv(config, spec["worker"], spec["incarnation"], transport, typed, folder)
    seed_generators(initial_seed(config))
    if spec.get("replay"):
        return _run_again(spec)
    if "cwd" in spec:
        os.chdir(spec["cwd"])
    return _run(spec["script"])


def _run(command: list[str]) -> int:
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")
    return 0


def _run_again(spec: dict[str, Any]) -> int:
    """Run the script again for a replay, in its original folder. If the run lost this worker, end silently."""
    os.chdir(spec["cwd"])
    try:
        return _run(spec["script"])
    except RunFailed:
        return 0
    except PacelineError as error:
        print(f"{spec['name']}: {error}", file=sys.stderr)
        return error.exit_code
