"""A script whose server is killed: with --durable its pushes were kept, and none is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.commands import Command, result_of, run, wait_for_records

SCRIPT = Path(__file__).parents[2] / "examples" / "plain_script_joined.py"
FLAGS = ("run", "-n", "2", "--strategy", "sync", "--durable", "--name", "it")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the script, if nothing happens to it."""
    cwd = tmp_path_factory.mktemp("whole")
    command = run(*FLAGS, str(SCRIPT), cwd=cwd)
    assert command.process.returncode == 0, command.err
    assert not list((cwd / "runs/it").glob("pushes-*")), "a finished run needs them no more"
    digest: str = result_of(cwd / "runs/it")["weights_sha256"]
    return digest


@pytest.mark.parametrize("every", ["0.2", "60"], ids=["with checkpoints", "without"])
def test_a_script_whose_server_was_killed_resumes_without_a_lost_push(
    tmp_path: Path, expected: str, every: str
) -> None:
    folder = tmp_path / "runs/it"
    with Command(*FLAGS, "--delay", "5ms", "--checkpoint-every", every, str(SCRIPT), cwd=tmp_path) as command:
        wait_for_records(folder, 150)
        os.kill(command.forked()[0], signal.SIGKILL)
        assert command.finish() == 1, command.err
    assert bool(list((folder / "checkpoints").glob("[0-9]*"))) is (every == "0.2")
    assert 1 <= len(list(folder.glob("pushes-*.bin"))) <= 4
    resumed = run("resume", "runs/it", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    assert "reading" in resumed.err and "logged pushes since" in resumed.err
    result = result_of(folder)
    assert (result["status"], result["resumes"], result["lost_pushes"]) == ("finished", 1, 0)
    assert result["weights_sha256"] == expected
    replayed = run("replay", "runs/it", cwd=tmp_path)
    assert replayed.process.returncode == 0 and "identical to the run" in replayed.out, replayed.out + replayed.err


def test_a_server_of_a_script_is_started_again_without_a_lost_push(tmp_path: Path, expected: str) -> None:
    with Command(*FLAGS, "--restart", "1", "--delay", "5ms", str(SCRIPT), cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 150)
        os.kill(command.forked()[0], signal.SIGKILL)
        assert command.finish() == 0, command.err
        assert "going on from its newest checkpoint and its log (restart 1 of 1)" in command.err
    result = result_of(tmp_path / "runs/it")
    assert (result["resumes"], result["lost_pushes"], result["weights_sha256"]) == (1, 0, expected)


def test_without_it_a_resume_goes_back_and_names_the_flag_that_was_missing(tmp_path: Path) -> None:
    flags = [flag for flag in FLAGS if flag != "--durable"]
    with Command(*flags, "--delay", "5ms", str(SCRIPT), cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 50)
        os.kill(command.forked()[0], signal.SIGKILL)
        assert command.finish() == 1 and "(--durable keeps them)" in command.err, command.err
    resumed = run("resume", "runs/it", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    assert "are lost (only 'paceline run --durable' keeps the pushes of a script)" in resumed.err
    assert "--recovery" not in resumed.err and "starts again from its top" in resumed.err
    assert result_of(tmp_path / "runs/it")["lost_pushes"] > 10
