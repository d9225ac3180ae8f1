"""What somebody asks of a run that is going on: small files in its folder, which its host takes up and answers.

A folder needs no port and no token: whoever may write there may ask, on any machine that sees it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed
from paceline.runs.folder import RunFolder, write_atomically

PATIENCE = 15.0
_LOOK_AGAIN = 0.05
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Request:
    """Workers to be drained, and where the answer is looked for."""

    drain: tuple[int, ...]
    answer_file: Path

    def answer(self, refused: dict[int, str]) -> None:
        """All who are not refused are being drained; an asker that has gone away is no trouble of ours."""
        content = json.dumps({"refused": {str(worker): why for worker, why in refused.items()}})
        with contextlib.suppress(OSError):
            write_atomically(self.answer_file, content.encode())


def take_requests(folder: RunFolder) -> Iterator[Request]:
    """Every request that lies there, taken away; what is none is taken away too, and not answered."""
    try:
        waiting = sorted(path for path in folder.requests.iterdir() if path.suffix == ".ask")
    except OSError:
        return
    for path in waiting:
        content = b""
        with contextlib.suppress(OSError):
            content = path.read_bytes()[:_LARGEST]
            path.unlink()
        workers = _workers(content)
        if workers:
            yield Request(workers, path.with_suffix(".answer"))


def _workers(content: bytes) -> tuple[int, ...]:
    try:
        asked: Any = json.loads(content)["drain"]
        return tuple(int(worker) for worker in asked)
    except (ValueError, TypeError, KeyError):
        return ()


def ask_to_drain(folder: RunFolder, workers: tuple[int, ...], patience: float = PATIENCE) -> dict[int, str]:
    """Ask, wait for the answer, and return why a worker is not drained, for each that is not."""
    folder.requests.mkdir(exist_ok=True)
    asked = folder.requests / f"{os.getpid()}-{time.time_ns()}.ask"
    answer_file = asked.with_suffix(".answer")
    write_atomically(asked, json.dumps({"drain": workers}).encode())
    until = time.monotonic() + patience
    try:
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                refused = json.loads(answer_file.read_bytes())["refused"]
                return {int(worker): why for worker, why in refused.items()}
            if not folder.is_locked():
                raise RunFailed(f"{folder.path} ended before it took the request up")
            time.sleep(_LOOK_AGAIN)
    finally:
        asked.unlink(missing_ok=True)
        answer_file.unlink(missing_ok=True)
    raise RunFailed(f"{folder.path} did not take the request up within {patience:g} s: are its workers at work?")
