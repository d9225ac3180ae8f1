"""Instrument of adoption.py, copied beside a program: writes its prints and the end of each backward to files.

Plain and adopted copies import it alike, so its cost (one write of 8 bytes a step) is on both sides.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch

PRINTED, STEPS = "printed", "steps"


def start() -> None:
    """Send the prints of this process to a file of its own, and record the time of each backward."""
    folder, process = Path(__file__).parent, os.getpid()
    sys.stdout = (folder / f"{PRINTED}-{process}.txt").open("w", buffering=1)
    steps = (folder / f"{STEPS}-{process}.bin").open("wb", buffering=0)
    backward = torch.Tensor.backward

    def timed(self: torch.Tensor, *args: Any, **settings: Any) -> None:
        backward(self, *args, **settings)
        steps.write(struct.pack("d", time.monotonic()))

    torch.Tensor.backward = timed


def times_of(folder: Path) -> dict[int, list[float]]:
    """Return the times of the backwards of each process that ran in `folder`, by process id."""
    read = {process: file.read_bytes() for process, file in _files(folder, STEPS).items()}
    return {process: [time for (time,) in struct.iter_unpack("d", data)] for process, data in read.items()}


def texts_of(folder: Path) -> dict[int, str]:
    """Return what each process that ran in `folder` printed, by process id."""
    return {process: file.read_text() for process, file in _files(folder, PRINTED).items()}


def _files(folder: Path, kind: str) -> dict[int, Path]:
    files = {int(file.stem.removeprefix(f"{kind}-")): file for file in folder.glob(f"{kind}-*")}
    return dict(sorted(files.items()))
