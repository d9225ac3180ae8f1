"""What workers print becomes whole lines with the worker's number, whatever pieces it comes in."""

from __future__ import annotations

import os
from typing import Any

import pytest

from paceline.runtimes.local.worker_output import LONGEST, REDRAW_SECONDS, LineSplitter, WorkerOutput


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_are_the_same_in_pieces_of_any_size(size: int) -> None:
    text = "first\n\nsecond, ärger\r\nlast without an end".encode()
    lines = LineSplitter()
    found = [line for at in range(0, len(text), size) for line in lines.feed(text[at : at + size], 0.0)]
    assert [*found, *lines.end()] == ["first", "", "second, ärger", "last without an end"]
    assert lines.end() == []


def test_a_progress_bar_is_shown_now_and_then_and_at_its_end() -> None:
    lines, shown = LineSplitter(), []
    for percent in range(101):
        shown += lines.feed(f"\r{percent} %".encode(), now=percent * REDRAW_SECONDS / 20)
    assert 3 <= len(shown) <= 8
    assert lines.feed(b"\nnext\n", now=100.0) == ["100 %", "next"]


def test_the_last_state_of_a_bar_is_shown_if_its_process_ends() -> None:
    lines = LineSplitter()
    assert lines.feed(b"1 %\r2 %\r3 %\r", now=0.0) == ["1 %"]
    assert lines.end() == ["3 %"]


def test_a_very_long_line_is_shown_in_parts() -> None:
    lines = LineSplitter()
    parts = lines.feed(b"x" * (2 * LONGEST + 5), now=0.0)
    assert [len(part) for part in [*parts, *lines.end()]] == [LONGEST, LONGEST, 5]


def test_lines_of_two_workers_do_not_mix_and_the_last_partial_one_is_shown() -> None:
    rows: list[dict[str, Any]] = []
    output = WorkerOutput(rows.append, lambda: False)
    pipes = {worker: output.open(worker) for worker in (0, 1)}
    os.write(pipes[0][0], b"half of ")
    os.write(pipes[1][0], b"whole\n")
    os.write(pipes[1][1], b"warning\n")
    output.read()
    os.write(pipes[0][0], b"a line\nand a rest")
    output.read()
    assert sorted((row["stream"], row["text"]) for row in rows) == [
        ("stderr", "[worker 1] warning"),
        ("stdout", "[worker 0] half of a line"),
        ("stdout", "[worker 1] whole"),
    ]
    output.read_out(0)  # its process has ended, and a child of it may still hold the pipe
    assert rows[-1]["text"] == "[worker 0] and a rest"
    output.show_only(0)
    os.write(pipes[1][0], b"too late\n")
    for writer in (*pipes[0], *pipes[1]):
        os.close(writer)
    output.close()
    assert len(rows) == 4
