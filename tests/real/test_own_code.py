"""One's own model and one's own loop, from the examples and from scripts with mistakes in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import result_of, run

EXAMPLES = Path(__file__).parents[2] / "examples"


def python(script: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would."""
    command = [sys.executable, str(script)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other are slow beside other tests
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False, env=alone)


def only_run(cwd: Path) -> Path:
    """The one run in the folder."""
    (folder,) = (cwd / "runs").iterdir()
    return folder


def test_the_example_of_an_own_model_learns(tmp_path: Path) -> None:
    done = python(EXAMPLES / "own_model.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert result_of(only_run(tmp_path))["test_accuracy"] > 95.0
    assert "rule auto: foresight (2 workers, data divided evenly)" in done.stdout + done.stderr
    assert result_of(only_run(tmp_path))["rule_applied"] == "foresight (step limited) (averaged)"
    assert "identical to the run" in run("replay", str(only_run(tmp_path)), cwd=tmp_path).out


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_the_example_of_an_own_loop_learns_on_two_workers(tmp_path: Path, strategy: str) -> None:
    script = str(EXAMPLES / "own_loop.py")
    command = run("run", "-n", "2", "--strategy", strategy, "--lr", "0.05", script, cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    result = result_of(only_run(tmp_path))
    assert result["workers"] == 2 and result["reported"]["0"]["test_accuracy"] > 95.0
    assert "worker 0 of 2: test accuracy" in command.out
    announced = "rule auto: foresight (2 workers, data divided evenly)" in command.out + command.err
    applied = "foresight (step limited)" if strategy == "async" else "plain"
    assert announced == (strategy == "async") and result["rule_applied"] == applied


def test_the_same_loop_trains_alone_without_paceline_run(tmp_path: Path) -> None:
    done = python(EXAMPLES / "own_loop.py", tmp_path)
    assert done.returncode == 0 and "worker 0 of 1: test accuracy" in done.stdout


def test_the_tour_shows_what_it_says(tmp_path: Path) -> None:
    """In step it nears the bottom all the way; free it is near first; local steps come to rest beside it."""
    done = python(EXAMPLES / "tour.py", tmp_path)
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 80
    tables = re.split(r"\n(?:sync|async|local:8): ", done.stdout)[1:]
    sync, free, local = ([float(d) for d in re.findall(r" s +(\d\.\d{3}) ", part)] for part in tables)
    assert sync == sorted(sync, reverse=True) and sync[-1] < min(free[-1], local[-1])
    assert free[1] < sync[1] and local[-2] - local[-1] < 0.02 < local[-1]


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    source = (EXAMPLES / "own_model.py").read_text()
    script = tmp_path / "unguarded.py"
    script.write_text(
        source.replace('if __name__ == "__main__":\n    result', "result").replace("\n    print(", "\nprint(")
    )
    done = python(script, tmp_path)
    assert done.returncode == 2
    assert "unguarded.py, line" in done.stderr and "if __name__ == '__main__':" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_lambda_cannot_be_built_by_workers(tmp_path: Path) -> None:
    import paceline

    with pytest.raises(paceline.UserError, match="function at the top of a module"):
        paceline.train(lambda: None, strategy="classic")  # type: ignore[arg-type,return-value]


def test_a_script_that_never_joins_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import paceline\n\nprint('nothing to do')\n")
    command = run("run", "-n", "2", "idle.py", cwd=tmp_path)
    assert command.process.returncode == 2
    assert "without calling paceline.join()" in command.err and "Traceback" not in command.err


def test_an_error_after_the_training_shows_one_traceback_and_the_run_is_complete(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "own_loop.py", tmp_path / "broken.py")
    with (tmp_path / "broken.py").open("a") as file:
        file.write("\nraise ValueError('my own mistake')\n")
    command = run("run", "-n", "2", "--lr", "0.05", "broken.py", cwd=tmp_path)
    assert command.process.returncode == 1 and command.err.count("Traceback") == 1, command.err
    assert " of 2: ValueError: my own mistake (broken.py, line " in command.err
    assert "training had finished" in command.err and result_of(only_run(tmp_path))["status"] == "finished"


def test_a_workers_exception_ends_the_run_unless_it_is_to_keep_going(tmp_path: Path) -> None:
    source = (EXAMPLES / "own_loop.py").read_text()
    early = "with paceline.join() as session:\n    if session.worker == 1:\n        raise ValueError('no')\n"
    (tmp_path / "early.py").write_text(source.replace("with paceline.join() as session:\n", early))
    flags = ("-n", "2", "--strategy", "sync", "--lr", "0.05")
    command = run("run", *flags, "early.py", cwd=tmp_path)
    assert command.process.returncode == 1 and command.err.count("Traceback") == 1, command.err
    assert re.search(
        r"paceline: worker 1 of 2: ValueError: no \(early.py, line \d+\): nothing was trained", command.err
    )
    assert "runpy" not in command.err and "resume" not in command.err and not (tmp_path / "runs").exists()
    command = run("run", *flags, "--keep-going", "early.py", cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    assert result_of(only_run(tmp_path))["status"] == "finished"
    assert "worker 1 was lost (exit code 1, ValueError: no (early.py, line" in command.err


LOOP = """
import sys, torch, paceline
torch.manual_seed(0)
x = torch.randn(640, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = paceline.join()
loader = torch.utils.data.DataLoader(data, batch_size=16)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for number, (a, b) in enumerate(loader):
    if number == 3 and sys.argv[1] == "raise" and session.worker == 1:
        raise RuntimeError("bad batch")
    if number == 3 and sys.argv[1] == "break":
        break
    if number == 3 and sys.argv[1] == "exit" and session.worker == 1:
        sys.exit(0)
    optimizer.zero_grad()
    (model(a) - b).pow(2).mean().backward()
    optimizer.step()
print("the end of", end=" ")
print("worker", session.worker, "x" * 70_000, end="")
"""


def test_a_run_that_an_exception_ended_goes_on_with_the_mended_script(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    command = run("run", "-n", "2", "--strategy", "sync", "loop.py", "raise", cwd=tmp_path)
    folder = only_run(tmp_path)
    assert command.process.returncode == 1 and command.err.count("Traceback") == 1
    said = r"worker 1 of 2: RuntimeError: bad batch \(loop\.py, line 13\): the run stopped at update \d+"
    assert re.search(said, command.err), "on a busy machine, worker 0 goes on until the server hears of it"
    assert result_of(folder)["reason"].startswith("exception in worker 1 of 2: RuntimeError: bad batch")
    assert "the end of" not in command.out
    (tmp_path / "loop.py").write_text(LOOP.replace('"raise"', '"never"'))
    assert run("resume", str(folder), cwd=tmp_path).process.returncode == 0
    assert result_of(folder)["status"] == "finished" and result_of(folder)["updates"] >= 20


def test_loops_that_are_left_early_are_a_normal_end_and_printed_lines_are_whole(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    command = run("run", "-n", "2", "--strategy", "sync", "loop.py", "break", cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    printed = sorted(line for line in command.out.splitlines() if line.startswith("["))
    assert [line[:37].rstrip("x") for line in printed if "end" in line] == [
        "[worker 0] the end of worker 0 ",
        "[worker 1] the end of worker 1 ",
    ]
    assert sum(line.count("x") for line in printed) == 140_000
    assert "one update averages 2 batches (32 samples) at the lr of one" in command.err
    command = run("run", "-n", "2", "--strategy", "sync", "--json", "loop.py", "exit", cwd=tmp_path)
    assert "worker 1 left its loop at update 3, before the others" in command.err
    assert json.loads(command.out)["status"] == "finished"


def test_a_result_says_which_settings_the_script_decided(tmp_path: Path) -> None:
    flags = ("-n", "2", "--strategy", "sync")
    assert run("run", *flags, str(EXAMPLES / "plain_script_joined.py"), cwd=tmp_path).process.returncode == 0
    result = result_of(only_run(tmp_path))
    assert {"epochs", "betas", "weight_decay", "schedule"} < set(result["decided_by_script"])
    assert (result["epochs"], result["device"], result["lr"], result["momentum"]) == (None, None, 0.02, 0.9)
    assert result["weights_sha256"]
    compared = run("compare", str(only_run(tmp_path)), str(only_run(tmp_path)), cwd=tmp_path)
    assert compared.process.returncode == 0 and "epochs" not in compared.out
