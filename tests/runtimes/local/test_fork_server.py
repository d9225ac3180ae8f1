"""Messages between the supervisor, its fork server and their children."""

from __future__ import annotations

import socket

import pytest

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
