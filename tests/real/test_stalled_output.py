"""A reader of the messages that stops reading: the run goes on to its end."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cluster_commands import RUN, workers
from tests.support.commands import Command, result_of
from tests.support.pipes import open_full_pipe

pytestmark = pytest.mark.real

SETTINGS = (*RUN, "--strategy", "sync", "--workers", "2", "--steps", "20")


@pytest.mark.parametrize("verb", ["train", "server"])
def test_a_full_pipe_does_not_stop_a_run(verb: str, tmp_path: Path) -> None:
    reader, writer = open_full_pipe()
    with ExitStack() as stack:
        command = stack.enter_context(Command(verb, *SETTINGS, cwd=tmp_path, stderr=writer))
        os.close(writer)
        stack.callback(os.close, reader)
        there = workers(stack, tmp_path, 1, "--overlap", "1") if verb == "server" else []
        assert command.finish() == 0
        assert [worker.finish() for worker in there] == [0] * len(there)
    assert result_of(tmp_path / "runs/it")["updates"] == 20
    assert "finished: " in command.out
