"""Workers that share a machine: told once, and only where there are more threads than cores."""

from __future__ import annotations

import os
from typing import Any

import pytest

from paceline.runtimes.crowds import Crowds, own_place


def place(process: int, machine: str = "m", cores: int = 4, threads: int = 2) -> dict[str, Any]:
    return {"machine": machine, "cores": cores, "process": process, "threads": threads}


def test_a_machine_with_a_core_for_every_thread_is_not_spoken_of() -> None:
    crowds = Crowds()
    assert [crowds.come(number, place(number + 1)) for number in range(2)] == [None, None]
    assert crowds.come(2, place(3, machine="another")) is None


def test_too_many_threads_are_told_once_a_machine() -> None:
    crowds = Crowds()
    lines = [crowds.come(number, place(number + 1)) for number in range(4)]
    assert lines[:2] == [None, None] and lines[3] is None
    told = "workers 0, 1 and 2 share the 4 cores of a machine with 6 threads, and wait for each other"
    assert lines[2] == f"{told}: give each --threads 1"
    assert crowds.come(4, place(5, machine="another", threads=5)) is None  # alone there: its own wish
    assert "workers 4 and 5" in (crowds.come(5, place(6, machine="another", threads=1)) or "")


def test_who_left_takes_no_core() -> None:
    crowds = Crowds()
    assert crowds.come(0, place(1, threads=4)) is None
    crowds.leave(0)
    assert crowds.come(1, place(2, threads=4)) is None


def test_workers_that_take_turns_in_one_process_share_its_threads() -> None:
    crowds = Crowds()
    assert [crowds.come(number, place(7, threads=4)) for number in range(3)] == [None] * 3


@pytest.mark.parametrize("told", [None, "m", [], {}, {**place(1), "cores": "4"}, {**place(1), "threads": True}])
def test_what_an_older_worker_tells_is_nothing(told: object) -> None:
    assert Crowds().come(0, told) is None


def test_a_process_tells_of_itself() -> None:
    told = own_place(3)
    assert (told["process"], told["threads"]) == (os.getpid(), 3)
    assert told == own_place(3) and told["machine"]
