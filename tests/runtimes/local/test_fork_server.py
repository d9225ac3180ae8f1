"""Messages between the supervisor, its fork server and their children."""

from __future__ import annotations

import socket

import pytest

from paceline.runtimes.local.fork_server import receive_row


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
