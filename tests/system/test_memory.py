"""Limits of the machine: what happens when no more files can be opened."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.runs.folder import RunFolder
from paceline.runtimes.local.process_plan import ProcessPlan
from paceline.runtimes.local.run import run_local
from paceline.runtimes.server.runtime import SupervisorChannel

MESSAGE = r"the workers need more open files than the limit of \d+ per process: start fewer, or raise .*ulimit -n"


def test_a_connection_that_did_not_fit_is_one_line() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, theirs:
        socket.send_fds(theirs, [b"{}"], [theirs.fileno()])
        free = os.dup(0)  # the lowest descriptor that is free
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            with pytest.raises(UserError, match=MESSAGE):
                SupervisorChannel(ours).receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(("first_worker", "most"), [(0, 41), (1, 71)])
def test_too_many_workers_are_refused_before_any_process_is_started(
    first_worker: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (20, most))
    nobody: Any = None
    plan = ProcessPlan({}, [], first_worker=first_worker)
    with pytest.raises(UserError, match=MESSAGE):
        run_local(RunConfig(workers=30), RunFolder(tmp_path), nobody, plan, print)
