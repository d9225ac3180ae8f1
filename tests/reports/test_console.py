"""The console of a run: a reader that is slow, stopped or gone never holds up the run."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.reports import console as console_module
from paceline.reports.console import MAX_WAITING, Console
from tests.support.pipes import open_full_pipe
from tests.support.waiting import until


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe that takes no more bytes."""
    reader, writer = open_full_pipe()
    try:
        yield reader, writer
    finally:
        os.close(writer)
        with contextlib.suppress(OSError):
            os.close(reader)


def read_until(reader: int, ending: str) -> str:
    """What was written, up to `ending`."""
    found = b""

    def reads() -> bool:
        nonlocal found
        found += os.read(reader, 1 << 16)
        return found.endswith(ending.encode())

    until(reads, f"{ending!r} in the pipe")
    return found.decode().lstrip(".")


def in_time(call: threading.Thread) -> bool:
    call.start()
    call.join(20)
    return not call.is_alive()


def test_notes_wait_for_a_reader_in_order_and_those_that_do_not_fit_are_counted() -> None:
    with full_pipe() as (reader, writer), os.fdopen(writer, "w", closefd=False) as stream:
        console = Console(stream)
        many = MAX_WAITING + 100

        def tell() -> None:
            for number in range(many):
                console.note(f"note {number}")

        told = in_time(threading.Thread(target=tell, daemon=True))
        text = read_until(reader, "\n" if not told else "for a while\n")
        assert told, "a caller waited for the reader"
        *notes, last = text.splitlines()
        assert notes == [f"note {number}" for number in range(len(notes))]
        assert last == f"{many - len(notes)} messages are not shown: nobody read this output for a while"
        console.note("the end")
        console.close()
        assert read_until(reader, "the end\n") == "the end\n"


def test_the_end_waits_for_a_stopped_reader_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "DRAIN_SECONDS", 0.05)
    with full_pipe() as (reader, writer), os.fdopen(writer, "w", closefd=False) as stream:

        def tell() -> None:
            with Console(stream) as console:
                console.note("a note")

        ended = in_time(threading.Thread(target=tell, daemon=True))
        assert read_until(reader, "a note\n") == "a note\n"
        assert ended, "the command never ended"


def test_a_reader_that_is_gone_does_not_end_the_run() -> None:
    with full_pipe() as (reader, writer), os.fdopen(writer, "w", closefd=False) as stream:
        os.close(reader)
        with Console(stream) as console:
            for _ in range(3):
                console.note("a note")


def test_everything_is_shown_in_order_when_the_console_is_closed() -> None:
    stream = io.StringIO()
    with Console(stream) as console:
        for number in range(200):
            console.note(f"note {number}")
    assert stream.getvalue().splitlines() == [f"note {number}" for number in range(200)]


def test_a_forked_process_writes_its_own_notes(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w") as stream, Console(stream) as console:
        console.note("parent")
        console.close()
        child = os.fork()
        if child == 0:
            console.note("child")
            console.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        console.note("parent again")
    assert (tmp_path / "output").read_text().splitlines() == ["parent", "child", "parent again"]


def test_a_stop_after_training_says_that_nothing_is_lost() -> None:
    stream = io.StringIO()
    with Console(stream) as console:
        console.report({"kind": "saved"})
        console.report({"kind": "stopping", "reason": "interrupted"})
    assert stream.getvalue().startswith("training is complete and saved; waiting for the scripts to end")
