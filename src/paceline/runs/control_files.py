"""Requests to a running run: small files in its folder, which its host reads and answers; no port, no token."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed
from paceline.interfaces import MAX_WORKERS
from paceline.runs.durable_files import write_atomically
from paceline.runs.folder import RunFolder
from paceline.system.strict_json import to_json
from paceline.system.terminal import seconds_text

ANSWER_SECONDS, LEAVE_SECONDS = 15.0, 8.0
"""How long a requester waits for the answer, and how long the run waits for the workers before it answers."""
_POLL_SECONDS = 0.05
_MAX_NBYTES = 1 << 20
_MAX_AT_ONCE = 64  # requests that are read at a time


@dataclass(frozen=True)
class DrainAnswer:
    """What became of a request: workers that are refused and that have not left yet, with the reasons."""

    refused: dict[int, str] = field(default_factory=dict)
    staying: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DrainRequest:
    """Workers to drain, or to drop `at_once`, and the file for the answer."""

    drain: tuple[int, ...]
    answer_file: Path
    at_once: bool = False

    def answer(self, answer: DrainAnswer) -> None:
        """Write the answer. Ignore a requester that is gone."""
        with contextlib.suppress(OSError):
            write_atomically(self.answer_file, to_json(vars(answer)).encode())


class DrainRequests:
    """Carries out the requests in a run's folder, and answers once their workers have left or do not answer."""

    def __init__(
        self,
        folder: RunFolder,
        drain: Callable[[int, bool], str | None],
        has_left: Callable[[int], bool],
        why_stalled: Callable[[int], str | None],
    ) -> None:
        """`drain` returns why a worker cannot be drained (or dropped); `why_stalled` what hinders it to answer."""
        self._folder, self._drain, self._has_left, self._why_stalled = folder, drain, has_left, why_stalled
        self._open: list[tuple[float, DrainRequest, dict[int, str]]] = []  # with the time and the refused workers
        self.to_drop: set[int] = set()  # workers that the run is to drop at once

    def look(self, is_ending: bool = False) -> None:
        """Carry out new requests, and answer those that are done; all of them if the run `is_ending`."""
        now = time.monotonic()
        for request in pop_requests(self._folder):
            found = {worker: self._drain(worker, request.at_once) for worker in request.drain}
            self._open.append((now, request, {worker: why for worker, why in found.items() if why is not None}))
            if request.at_once:
                self.to_drop |= {worker for worker, why in found.items() if why is None and not self._has_left(worker)}
        still_open = []
        for since, request, refused in self._open:
            staying = [worker for worker in request.drain if worker not in refused and not self._has_left(worker)]
            stalled = {worker: why for worker in staying if (why := self._why_stalled(worker)) is not None}
            waits = staying and not is_ending and now < since + LEAVE_SECONDS
            if waits and (request.at_once or not stalled):
                still_open.append((since, request, refused))
                continue
            silent = f"it has not left after {seconds_text(now - since)}"
            request.answer(DrainAnswer(refused, {worker: stalled.get(worker, silent) for worker in staying}))
        self._open = still_open


def pop_requests(folder: RunFolder) -> Iterator[DrainRequest]:
    """Yield and delete every pending request; delete malformed ones without an answer."""
    try:
        waiting = sorted(path for path in folder.requests.iterdir() if path.suffix == ".ask")
    except OSError:
        return
    for path in waiting[:_MAX_AT_ONCE]:
        content = _read_regular(path)
        with contextlib.suppress(OSError):
            path.unlink()
        workers, at_once = _parse(content)
        if workers:
            yield DrainRequest(workers, path.with_suffix(".answer"), at_once)


def _read_regular(path: Path) -> bytes:
    """Read a small file; empty if it is anything else, such as a pipe, which would block, or a link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        is_small = os.fstat(descriptor).st_size <= _MAX_NBYTES
        return os.read(descriptor, _MAX_NBYTES) if is_small and stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _parse(content: bytes) -> tuple[tuple[int, ...], bool]:
    """The workers of a request, none if it is malformed, and whether to drop them at once."""
    try:
        row: Any = json.loads(content)
        wanted, at_once = row["drain"], row.get("now", False)
        is_sound = isinstance(wanted, list) and all(type(one) is int and 0 <= one < MAX_WORKERS for one in wanted)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return (), False
    return tuple(dict.fromkeys(wanted)) if is_sound else (), at_once is True


def request_drain(
    folder: RunFolder, workers: tuple[int, ...], at_once: bool = False, timeout: float = ANSWER_SECONDS
) -> DrainAnswer:
    """Ask the run to drain these workers, or to drop them `at_once`, and wait for the answer."""
    folder.requests.mkdir(exist_ok=True)
    request_file = folder.requests / f"{os.getpid()}-{time.time_ns()}.ask"
    answer_file = request_file.with_suffix(".answer")
    write_atomically(request_file, to_json({"drain": workers, "now": at_once}).encode())
    until = time.monotonic() + timeout
    try:
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                answer = json.loads(answer_file.read_bytes())
                known = ("refused", "staying")
                return DrainAnswer(*({int(worker): why for worker, why in answer[name].items()} for name in known))
            if not folder.is_locked():
                raise RunFailed(f"{folder.path} ended before it answered the request")
            time.sleep(_POLL_SECONDS)
    finally:
        request_file.unlink(missing_ok=True)
        answer_file.unlink(missing_ok=True)
    raise RunFailed(f"{folder.path} did not answer the request within {timeout:g} s: are its workers running?")
