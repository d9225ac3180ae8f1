"""Messages between the supervisor, its fork server and their children."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

import pytest

from paceline.runtimes.local import fork_server
from paceline.runtimes.local.fork_server import _next_request, receive_row, request


@pytest.mark.parametrize("unread", [False, True])
def test_the_last_words_of_a_process_that_did_not_read_ours_are_heard(unread: bool) -> None:
    """A server that ends on a full disk says so, although orders still wait for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        if unread:
            ours.send(b"an order")
        theirs.send(b'{"kind": "failed"}')
        theirs.close()
        assert receive_row(ours) == {"kind": "failed"}
        assert receive_row(ours) is None


@pytest.mark.parametrize("unread", [False, True])
def test_a_supervisor_that_ends_with_unread_notices_ends_its_fork_server_without_a_traceback(unread: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.send(request("worker", {"name": "worker 0"}))
        found, fds = _next_request(theirs)
        assert found is not None and found["spec"] == {"name": "worker 0"} and not fds
        if unread:
            theirs.send(b"a notice")
        ours.close()
        assert _next_request(theirs) == (None, [])


def leaves(spec: dict[str, Any], fds: list[int]) -> int:
    """A process whose user's code calls sys.exit."""
    sys.exit(spec["code"])


@pytest.mark.parametrize(("role", "code", "ends_with"), [("worker", 0, 1), ("worker", 4, 4), ("script", 0, 0)])
def test_a_task_that_exits_well_is_told_as_one_that_fails(
    role: str, code: int, ends_with: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its worker is gone without a word. A script may end by sys.exit(0)."""

    def exit_with(status: int) -> None:
        raise ChildProcessError(status)

    monkeypatch.setattr(os, "_exit", exit_with)
    monkeypatch.setattr(fork_server, "die_with", lambda parent: None)
    monkeypatch.setattr("paceline.system.subnormals.flush_subnormals", lambda: None)
    monkeypatch.setitem(fork_server.ROLES, role, f"{__name__}:leaves")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wakeup, before = signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGCHLD)
    wanted = {"role": role, "spec": {"code": code}, "path": [*sys.path], "has_output": False}
    with ours, theirs:
        with pytest.raises(ChildProcessError, match=f"^{ends_with}$"):
            fork_server._become(theirs, wanted, [], [], 0)
        theirs.close()
        notice = receive_row(ours)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, before)
    assert notice is not None and (notice["kind"] == "returned") == (ends_with == 0)
    assert not ends_with or f"sys.exit({code})" in notice["text"]
