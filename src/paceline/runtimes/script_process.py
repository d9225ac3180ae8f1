"""A process that runs a user's script as one worker: `paceline.join()` in it finds the server through here."""

from __future__ import annotations

import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from paceline import session
from paceline.config import from_dict
from paceline.runtimes.allocator import keep_freed_memory
from paceline.runtimes.scheduling import yield_to_server
from paceline.transports.shared_memory import WorkerDoor


def main(spec: dict[str, Any], fds: list[int]) -> int:
    """Run the script to its end, as `python SCRIPT ARGUMENTS` would."""
    keep_freed_memory()
    yield_to_server()
    config = from_dict(spec["config"])
    torch.set_num_threads(config.threads or 1)
    door = WorkerDoor(socket.socket(fileno=fds[0]))
    session.inherited = session.Inherited(config, spec["worker"], spec["incarnation"], door)
    script, *arguments = spec["script"]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    return 0
