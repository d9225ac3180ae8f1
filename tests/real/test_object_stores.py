"""Runs that are copied to a store: killed and resumed on another machine, and with stores that are slow or fail."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import odd_store
import pytest
from object_store import helper_of

from paceline.object_store.ownership import find_run
from paceline.object_store.store import ObjectStore
from paceline.runs.arrival_log import RECORD_BYTES
from paceline.runs.folder import RunFolder
from tests.support.commands import Command, replays, result_of, run, wait_for_records
from tests.support.waiting import until

SMALL = ("--dataset", "fashion-mnist-sample", "--threads", "1", "--name", "it", "--seed", "3", "--score", "none")
TRAIN = ("train", "--strategy", "async", *SMALL)
SCRIPT = Path(__file__).parents[2] / "examples" / "plain_script_joined.py"
LOOP = ("run", "-n", "2", "--strategy", "sync", "--name", "it")


def kill_all(command: Command) -> None:
    """As if the machine lost its power: the helper that copies the run dies too, before it knows of the end."""
    children = Path(f"/proc/{command.process.pid}/task/{command.process.pid}/children").read_text().split()
    for child in map(int, children):
        os.kill(child, signal.SIGKILL)
    os.killpg(command.process.pid, signal.SIGKILL)
    command.process.communicate()


def stored_nbytes(remote: Path) -> int:
    """How many bytes of the log the newest manifest of a file store names."""
    found = sorted(remote.glob("0*/manifests/*.json"))
    if not found:
        return 0
    text = found[-1].read_text().partition('"arrivals.log":[[')[2]
    return int(text.partition(",")[0] or 0)


@pytest.mark.real
@pytest.mark.parametrize("kind", ["train", pytest.param("run", marks=pytest.mark.long)])
def test_a_killed_run_goes_on_elsewhere_from_the_store(kind: str, tmp_path: Path) -> None:
    here, there, remote = tmp_path / "here", tmp_path / "there", tmp_path / "remote/it"
    here.mkdir()
    there.mkdir()
    words = (*TRAIN, "--steps", "500") if kind == "train" else LOOP
    more = ("--runs", f"file://{tmp_path}/remote", "--durable", "--checkpoint-every", "0.5", "--delay", "5ms")
    script = () if kind == "train" else (str(SCRIPT),)
    with Command(*words, *more, *script, cwd=here) as command:
        until(lambda: stored_nbytes(remote) > 1000, "some records in the store")
        kill_all(command)
    assert not (here / "runs/it/result.json").exists()
    stored = stored_nbytes(remote)
    again = run("resume", f"file://{tmp_path}/remote/it", "--take-over", cwd=there)
    assert again.process.returncode == 0, again.err
    folder = RunFolder(there / "runs/it")
    log, before = (path / "runs/it/arrivals.log" for path in (there, here))
    known = stored - RECORD_BYTES  # its last record may have been torn
    assert log.read_bytes()[:known] == before.read_bytes()[:known], "nothing that is in the store is lost"
    assert result_of(folder.path)["lost_pushes"] == 0
    if kind == "train":
        assert replays(folder.path)
    else:
        replayed = run("replay", f"file://{tmp_path}/remote/it", cwd=there)
        assert replayed.process.returncode == 0 and "identical to the run" in replayed.out, replayed.err
    assert (remote / "owners/00000002.json").exists()
    older = run("resume", "runs/it", cwd=here)
    assert older.process.returncode == 2 and "has gone on with file://" in older.err


@pytest.mark.real
def test_a_store_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    environment = odd_store.environment_for(tmp_path)
    words = (*TRAIN, "--steps", "1000000", "--max-seconds", "4", "--mirror", f"odd://{tmp_path}/remote")
    with Command(*words, cwd=tmp_path, environment=environment) as command:
        wait_for_records(tmp_path / "runs/it", 100)
        odd_store.control(tmp_path, fails=True)
        assert command.finish() == 0, command.err
    assert command.err.count("cannot be written") == 1
    assert "PermissionError: [Errno 13] the credentials have expired" in command.err
    (line,) = (line for line in command.err.splitlines() if "does not hold the whole run" in line)
    assert f"'paceline export runs/it --to odd://{tmp_path}/remote' copies the rest" in line
    odd_store.control(tmp_path)
    export = run("export", "runs/it", "--to", f"odd://{tmp_path}/remote", cwd=tmp_path, environment=environment)
    assert export.process.returncode == 0, export.err
    found = find_run(ObjectStore(f"file://{tmp_path}/remote/it"))
    assert found is not None and found.manifest.ended and "result.json" in found.manifest.files


@pytest.mark.real
def test_a_store_that_refuses_at_the_start_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    environment = odd_store.environment_for(tmp_path)
    odd_store.control(tmp_path, fails=True)
    words = (*TRAIN, "--steps", "5", "--mirror", f"odd://{tmp_path}/remote")
    refused = run(*words, cwd=tmp_path, environment=environment)
    assert refused.process.returncode == 2
    (line,) = (line for line in refused.err.splitlines() if line.startswith("paceline: "))
    assert f"odd://{tmp_path}/remote/it cannot be used (write owners/00000001.json: PermissionError: " in line
    assert not (tmp_path / "runs").exists()
    odd_store.control(tmp_path)
    broken = run(*words, "--task", "missing.py:build", cwd=tmp_path, environment=environment)
    assert broken.process.returncode == 2
    assert not list((tmp_path / "remote").rglob("*.json")), "a run that never started leaves nothing in the store"


@pytest.mark.real
@pytest.mark.long
def test_a_copying_process_that_is_killed_is_named_and_the_run_ends_well(tmp_path: Path) -> None:
    words = (*TRAIN, "--steps", "1000000", "--max-seconds", "3", "--mirror", f"file://{tmp_path}/remote")
    with Command(*words, cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 100)
        os.kill(helper_of(command.process.pid), signal.SIGKILL)
        assert command.finish() == 0, command.err
    assert "the process that copies the run ended with code -9: the run goes on" in command.err
    assert "does not hold the whole run" in command.err
    assert not (tmp_path / "runs/it/mirror.log").exists()
