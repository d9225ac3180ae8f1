"""Requests to a running run: small files in its folder, which its host reads and answers; no port, no token."""

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
from paceline.system.strict_json import to_json

ANSWER_SECONDS = 15.0
_POLL_SECONDS = 0.05
_MAX_NBYTES = 1 << 20


@dataclass(frozen=True)
class DrainRequest:
    """Workers to drain, and the file for the answer."""

    drain: tuple[int, ...]
    answer_file: Path

    def answer(self, refused: dict[int, str]) -> None:
        """Write which workers are refused and why; all others are drained. Ignore a requester that is gone."""
        content = to_json({"refused": {str(worker): why for worker, why in refused.items()}})
        with contextlib.suppress(OSError):
            write_atomically(self.answer_file, content.encode())


def pop_requests(folder: RunFolder) -> Iterator[DrainRequest]:
    """Yield and delete every pending request; delete malformed ones without an answer."""
    try:
        waiting = sorted(path for path in folder.requests.iterdir() if path.suffix == ".ask")
    except OSError:
        return
    for path in waiting:
        content = b""
        with contextlib.suppress(OSError):
            content = path.read_bytes()[:_MAX_NBYTES]
            path.unlink()
        workers = _workers(content)
        if workers:
            yield DrainRequest(workers, path.with_suffix(".answer"))


def _workers(content: bytes) -> tuple[int, ...]:
    try:
        wanted: Any = json.loads(content)["drain"]
        return tuple(int(worker) for worker in wanted)
    except (ValueError, TypeError, KeyError):
        return ()


def request_drain(folder: RunFolder, workers: tuple[int, ...], timeout: float = ANSWER_SECONDS) -> dict[int, str]:
    """Ask the run to drain these workers, wait for the answer, and return the reason for each refused one."""
    folder.requests.mkdir(exist_ok=True)
    request_file = folder.requests / f"{os.getpid()}-{time.time_ns()}.ask"
    answer_file = request_file.with_suffix(".answer")
    write_atomically(request_file, to_json({"drain": workers}).encode())
    until = time.monotonic() + timeout
    try:
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                refused = json.loads(answer_file.read_bytes())["refused"]
                return {int(worker): why for worker, why in refused.items()}
            if not folder.is_locked():
                raise RunFailed(f"{folder.path} ended before it answered the request")
            time.sleep(_POLL_SECONDS)
    finally:
        request_file.unlink(missing_ok=True)
        answer_file.unlink(missing_ok=True)
    raise RunFailed(f"{folder.path} did not answer the request within {timeout:g} s: are its workers running?")
