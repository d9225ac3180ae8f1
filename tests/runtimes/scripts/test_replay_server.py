"""What a replay's server does when a script does not do what the log says: one clear line, never a wait without end."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.core.messages import Disposition
from paceline.errors import RunFailed
from paceline.runs.arrival_log import Record
from paceline.runtimes.scripts.serving.replay_server import SILENCE_SECONDS, last_leaves, patience, receive
from paceline.transports.shared_memory import SharedMemoryPeer, channel

PUSH = Record("push", 0, 0, 0, 0, 4, 0.5, 0.0, Disposition.TAKEN)


def test_a_worker_that_is_silent_is_given_up() -> None:
    ours, theirs = channel()
    with ours, theirs:
        with pytest.raises(RunFailed, match=r"worker 3 was silent for 50 ms, but the log has a push of it"):
            receive(SharedMemoryPeer(ours, 3, 0), 0.05, "a push")


def test_a_worker_that_is_gone_is_seen_at_once_and_nonsense_is_one_line() -> None:
    ours, theirs = channel()
    with ours:
        theirs.send(b"rubbish")
        with pytest.raises(RunFailed, match="7 bytes that are not a hello"):
            receive(SharedMemoryPeer(ours, 3, 0), 5.0, "a push")
        theirs.close()
        assert receive(SharedMemoryPeer(ours, 3, 0), 5.0, "a push") is None


def test_a_slow_run_is_waited_for_longer() -> None:
    quick = [dataclasses.replace(PUSH, worker=number % 2, now=0.1 * number) for number in range(9)]
    assert patience(quick) == SILENCE_SECONDS
    slow = [dataclasses.replace(PUSH, worker=number % 2, now=20.0 * number) for number in range(9)]
    assert patience(slow) == 200.0


def test_a_script_is_hung_up_when_its_incarnation_has_nothing_more_to_say() -> None:
    told = "join 0, join 1, push 1, leave 1, join 1, push 0, push 1, leave 1, read 1, stop 0, leave 1, leave 0, stop 0"
    words = [word.split() for word in told.split(", ")]
    records = [dataclasses.replace(PUSH, kind=kind, worker=int(worker)) for kind, worker in words]
    assert sorted(last_leaves(records)) == [3, 10, 11]
