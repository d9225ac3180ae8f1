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
    if "cwd" in spec:
        os.chdir(spec["cwd"])
    sys.argv = spec["script"]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except PacelineError as error:
        if not spec.get("replay"):
            raise
        if isinstance(error, RunFailed):  # the recorded run lost this worker
            return 0
        print(f"{spec['name']}: {error}", file=sys.stderr)
        return error.exit_code
    return 0
