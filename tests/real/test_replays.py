"""Real runs executed again: whatever befell them, the same bits; scripts are started again and held to the log."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.support.commands import Command, result_of, run, wait_for_more_records, wait_for_records

LOOP = """
import random, sys, time, numpy, torch, paceline
x = torch.randn(1600, 4); y = (x[:, 0] > 0).long()
with paceline.join() as session:
    layers = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 2)
    net = torch.nn.Sequential(*layers)
    net, batches = session.prepare(net, (x, y), batch_size=16)
    for a, b in batches:
        noise = random.random() + numpy.random.rand()
        loss = torch.nn.functional.cross_entropy(net(a + 0.1 * noise), b)
        loss.backward()
        time.sleep(float(sys.argv[1]))
        session.step(loss)
    session.report(last=float(loss))
"""


def start(cwd: Path, *arguments: str, source: str = LOOP, pause: str = "0.002") -> Command:
    """`paceline run` of the loop, in a folder of its own."""
    (cwd / "loop.py").write_text(source)
    return Command("run", "--name", "it", "--lr", "0.05", *arguments, "loop.py", pause, cwd=cwd)


def replay(cwd: Path, *arguments: str, folder: str = "runs/it") -> tuple[int, str, str]:
    command = run("replay", folder, *arguments, cwd=cwd)
    assert "Traceback" not in command.err, command.err
    return command.process.returncode, command.out, command.err


def test_a_script_replays_identically_from_another_folder_and_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    with start(tmp_path, "-n", "2", "--strategy", "async", "--epochs", "2", pause="0") as command:
        assert command.finish() == 0, command.err
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "runs/it").iterdir()}
    (tmp_path / "elsewhere").mkdir()
    code, out, err = replay(tmp_path / "elsewhere", "--json", folder="../runs/it")
    assert code == 0, err
    outcome = json.loads(out)
    assert outcome["identical"] is True and outcome["first_departure"] is None
    assert outcome["weights_sha256"] == result_of(tmp_path / "runs/it")["weights_sha256"]
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "runs/it").iterdir()} == before


SAVES = """
    if session.is_main:
        with open("best.txt", "w") as file:
            file.write(sys.argv[1])
"""


def test_a_replay_says_that_the_script_writes_again_and_can_do_it_elsewhere(tmp_path: Path) -> None:
    with start(tmp_path, "-n", "2", "--epochs", "1", source=LOOP + SAVES, pause="0") as command:
        assert command.finish() == 0, command.err
    kept, again = tmp_path / "best.txt", tmp_path / "again"
    kept.write_text("of a later run")
    again.mkdir()
    code, out, err = replay(tmp_path, "--in", "again")
    assert code == 0 and "identical to the run" in out and kept.read_text() == "of a later run", err
    assert (again / "best.txt").read_text() == "0" and f"replay runs loop.py again in {again}: it writes there" in err
    code, _, err = replay(tmp_path)
    assert code == 0 and kept.read_text() == "0"
    assert err.startswith(f"replay runs loop.py again in {tmp_path}: it overwrites the files that it writes"), err


def test_a_script_whose_worker_was_killed_replays_identically_and_until_an_update(tmp_path: Path) -> None:
    with start(tmp_path, "-n", "3", "--epochs", "3", pause="0.001") as command:
        wait_for_records(tmp_path / "runs/it", 60)
        os.kill(command.forked()[2], signal.SIGKILL)
        assert command.finish() == 0, command.err
    assert result_of(tmp_path / "runs/it")["lost_workers"] == [1]
    code, out, err = replay(tmp_path)
    assert code == 0 and "identical to the run" in out, out + err
    code, out, err = replay(tmp_path, "--until", "40")
    assert code == 0 and "weights of update 40 are in runs/it/replay-40.safetensors" in out, out + err
    code, out, err = replay(tmp_path, "--until", "40")
    assert code == 2 and "exists already" in err


def test_a_script_stopped_by_ctrl_c_replays_identically(tmp_path: Path) -> None:
    with start(tmp_path, "-n", "2", "--strategy", "sync", "--epochs", "100") as command:
        wait_for_records(tmp_path / "runs/it", 60)
        os.killpg(command.process.pid, signal.SIGINT)
        assert command.finish() == 130
    code, out, err = replay(tmp_path)
    assert code == 0 and "identical to the run" in out, out + err


def test_a_script_killed_with_everything_replays_to_the_end_of_its_log(tmp_path: Path) -> None:
    with start(tmp_path, "-n", "2", "--epochs", "100") as command:
        wait_for_records(tmp_path / "runs/it", 60)
        os.kill(command.process.pid, signal.SIGKILL)
        command.finish()
    code, out, err = replay(tmp_path)
    assert code == 0 and "the run has no result to compare; every push equals its log" in out, out + err


BACKWARD = "        loss.backward()\n"
CHANGES = {
    "other numbers": ("0.1 * noise", "9.0 * noise", "first at update 0, worker "),
    "an early end": (
        BACKWARD,
        f"{BACKWARD}        if session.iteration == 9: break\n",
        "ended before its push 9",
    ),
    "a mistake": ("session.step(loss)", "session.step(loss); session.step(loss, weight=-1)", "ended before its push 1"),
}


def test_a_changed_script_departs_and_nothing_hangs(tmp_path: Path) -> None:
    with start(tmp_path, "-n", "2", "--steps", "60", pause="0") as command:
        assert command.finish() == 0, command.err
    for name, (old, new, words) in CHANGES.items():
        assert old in LOOP
        (tmp_path / "loop.py").write_text(LOOP.replace(old, new))
        command = run("replay", "runs/it", cwd=tmp_path)
        assert command.process.returncode == 1, (name, command.out, command.err)
        assert "was changed since the run" in command.err and "Traceback" not in command.err
        assert "DIFFERENT from the run" in command.out and words in command.out, (name, command.out, command.err)
    (tmp_path / "loop.py").unlink()
    code, _, err = replay(tmp_path)
    assert code == 2 and "loop.py of this run no longer exists" in err
    assert result_of(tmp_path / "runs/it")["status"] == "finished"


def test_a_run_with_a_worker_that_is_stopped_and_woken_replays_identically(tmp_path: Path) -> None:
    sample = ("--dataset", "fashion-mnist-sample", "--name", "it")
    with Command("train", *sample, "--strategy", "async", "--workers", "3", "--steps", "900", cwd=tmp_path) as command:
        for pause in range(3):
            wait_for_records(tmp_path / "runs/it", 40 + 100 * pause)
            victim = command.forked()[1 + pause]
            os.kill(victim, signal.SIGSTOP)
            wait_for_more_records(tmp_path / "runs/it", 40)
            os.kill(victim, signal.SIGCONT)
        assert command.finish() == 0, command.err
    assert result_of(tmp_path / "runs/it")["staleness"]["max"] > 20
    code, out, err = replay(tmp_path)
    assert code == 0 and "identical to the run" in out, out + err
