"""Ranks find each other, or say who is missing and who is not alike."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UserError
from paceline.launch import resume
from paceline.reports.console import Console
from paceline.runtimes.ring.process_group import ProcessGroup
from paceline.settings.ranks import VARIABLES, Rank, rank_here


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank(number: int, size: int, port: int) -> Rank:
    return Rank(number, size, number, size, "127.0.0.1", port, store_is_there=False)


def test_a_rank_that_never_comes_is_named() -> None:
    meeting = ProcessGroup(rank(0, 3, free_port()), patience=2)
    with pytest.raises(UserError, match=r"ranks 1, 2 of 0 to 2 did not come within 2 s: start as many"):
        meeting.open({}, "cpu")


def test_ranks_that_are_not_alike_are_told_in_what() -> None:
    port, complaints = free_port(), {}

    def come(number: int, identity: dict[str, Any]) -> None:
        try:
            ProcessGroup(rank(number, 2, port), patience=20).open(identity, "cpu")
        except UserError as error:
            complaints[number] = str(error)

    first = threading.Thread(target=come, args=(0, {"layout": 1, "targets": 5}))
    first.start()
    come(1, {"layout": 1, "targets": 6})
    first.join()
    assert complaints[0].startswith("rank 1 differs from rank 0 in targets: give all ranks the same")
    assert complaints[1].startswith("rank 0 differs from rank 1 in targets")


def test_what_one_rank_tells_the_others_hear() -> None:
    port = free_port()
    first = ProcessGroup(rank(0, 2, port), patience=20)
    first.tell("result", {"status": "finished"})
    assert ProcessGroup(rank(1, 2, port), patience=20).hear("result") == {"status": "finished"}


def test_without_a_launcher_there_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert rank_here() is None


@pytest.mark.parametrize(
    ("number", "size", "complaint"),
    [
        ("x", "2", "must be numbers, found RANK=x"),
        ("2", "2", "RANK=2 with WORLD_SIZE=2: ranks are counted from 0 to 1"),
    ],
)
def test_bad_variables_of_a_launcher_are_one_line(
    monkeypatch: pytest.MonkeyPatch, number: str, size: str, complaint: str
) -> None:
    for name, value in zip(VARIABLES, (number, size, "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=complaint):
        rank_here()


def test_a_launcher_resumes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("0", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="leave the launcher out"):
        resume(Path("runs/it"), Console(quiet=True), rank=rank_here())


def test_what_never_comes_is_not_waited_for_for_ever() -> None:
    first = ProcessGroup(rank(0, 2, free_port()), patience=20)
    assert first.wait_for("server", 0.1) is None
    first.tell("server", {"address": "here"})
    assert first.wait_for("server", 0.1) == {"address": "here"}
