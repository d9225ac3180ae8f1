"""A server that keeps itself going: children that are killed, that complain, and that end well."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline.errors import RunFailed, ServerLost, UserError
from paceline.runtimes.local.restart import keep_going


def lost(what: str) -> ServerLost:
    return ServerLost(what, "start it again")


def lives(file: Path, killed: int) -> list[bool]:
    """Whether each life was told to go on; the first `killed` of them end by SIGKILL."""

    def live(again: bool) -> None:
        with file.open("a") as told:
            told.write("again\n" if again else "first\n")
        if len(file.read_text().splitlines()) <= killed:
            os.kill(os.getpid(), signal.SIGKILL)

    for what in keep_going(live, 2, lost):
        assert what == "the server process ended (killed by SIGKILL)"
    return [line == "again" for line in file.read_text().splitlines()]


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_each_life_after_the_first_goes_on(tmp_path: Path, killed: int) -> None:
    assert lives(tmp_path / "lives", killed) == [False, *[True] * killed]


def test_one_kill_too_many_is_the_end(tmp_path: Path) -> None:
    with pytest.raises(ServerLost, match=r"killed by SIGKILL\): nothing acknowledged is lost, start it again"):
        lives(tmp_path / "lives", 3)
    assert len((tmp_path / "lives").read_text().splitlines()) == 3


def test_who_complains_is_heard_and_not_started_again() -> None:
    def live(again: bool) -> None:
        assert not again
        raise UserError("no space is left")

    with pytest.raises(UserError, match="no space is left") as caught:
        list(keep_going(live, 5, lost))
    assert caught.value.exit_code == 2


def test_a_server_that_was_killed_before_it_had_a_log_is_not_started_again() -> None:
    def live(again: bool) -> None:
        assert not again
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RunFailed, match="before training began"):
        list(keep_going(live, 5, lambda what: None))


def test_signals_are_the_parents_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    list(keep_going(lambda again: None, 1, lost))
    assert signal.getsignal(signal.SIGTERM) is before
