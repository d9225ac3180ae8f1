"""Scripts, loops and notebooks that people have already, on Paceline."""

from __future__ import annotations

import difflib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.runs.events import read_events
from tests.support.commands import Command, result_of, run, wait_for_records

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 6

RUN_CELLS = """
import json, sys
from pathlib import Path
for number, cell in enumerate(json.loads(Path({path!r}).read_text())["cells"]):
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        continue
    if source.startswith("%%writefile "):
        first, _, rest = source.partition("\\n")
        Path(first.split()[1]).write_text(rest)
    else:
        exec(compile(source, f"<cell {{number}}>", "exec"), globals())
"""


def python(source: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code as a notebook's kernel does: in `__main__`, which is no file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-"]
    return subprocess.run(
        command, input=source, cwd=cwd, capture_output=True, text=True, timeout=100, check=False, env=environment
    )


PLAIN, JOINED = EXAMPLES / "plain_script.py", EXAMPLES / "plain_script_joined.py"


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain script on two workers: its run folder."""
    cwd = tmp_path_factory.mktemp("joined")
    command = run("run", "-n", "2", "--strategy", "sync", "--name", "joined", str(JOINED), cwd=cwd)
    assert command.process.returncode == 0, command.err
    return cwd / "runs" / "joined"


def test_a_plain_script_is_distributed_by_six_lines(joined: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = difflib.ndiff(PLAIN.read_text().splitlines(), JOINED.read_text().splitlines())
    changed = [line for line in changes if line.startswith("+ ") and line[2:].strip() and not line.startswith('+ """')]
    assert len(changed) <= MOST_LINES, changed
    runpy.run_path(str(PLAIN), run_name="__main__")
    assert re.search(r"test accuracy (9\d|100)", capsys.readouterr().out)
    result = result_of(joined)
    assert (result["status"], result["optimizer"], result["lr"]) == ("finished", "sgd", 0.02)
    assert result["samples"] == 6 * 2500 and result["reported"]["0"]["test_accuracy"] > 90.0
    events = list(read_events(joined / "events.jsonl"))
    rates = [row["lr"] for row in events if row["kind"] == "progress"]
    assert rates == sorted(rates, reverse=True) and all(0 < lr <= 0.02 for lr in rates), "the script's own schedule"
    assert not [row for row in events if row["kind"] == "settings_disagreement"], "all workers have the same"


def test_a_script_that_was_interrupted_and_resumed_comes_to_the_same_weights(tmp_path: Path, joined: Path) -> None:
    flags = ("run", "-n", "2", "--strategy", "sync", "--delay", "5ms", "--name", "cut")
    with Command(*flags, str(JOINED), cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs" / "cut", 100)  # in the second epoch: the schedule has moved on
        os.kill(command.process.pid, signal.SIGINT)
        assert command.finish() == 130, command.err
    assert 40 < result_of(tmp_path / "runs" / "cut")["updates"] < 240
    resumed = run("resume", "runs/cut", cwd=tmp_path)
    assert resumed.process.returncode == 0 and "UserWarning" not in resumed.err, resumed.err
    assert result_of(tmp_path / "runs" / "cut")["weights_sha256"] == result_of(joined)["weights_sha256"]


def test_a_hugging_face_style_loop_learns_on_two_workers(tmp_path: Path) -> None:
    script = str(EXAMPLES / "huggingface_style.py")
    command = run("run", "-n", "2", "--strategy", "sync", "--name", "run", script, cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    assert result_of(tmp_path / "runs" / "run")["reported"]["0"]["perplexity"] < 2.0
    assert "reported by worker 0: test_loss" in command.out


def test_a_fabric_style_loop_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "fabric_style.py"), run_name="__main__")
    (error,) = re.findall(r"mean absolute error (0\.\d+)", capsys.readouterr().out)
    assert float(error) < 0.25


SAVED = """
import torch
import paceline
from tests.support.odd_models import Buffered, Frozen, token_data

class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Buffered(), Frozen()
    def forward(self, ids):
        return self.one(ids) + self.two(ids)

if __name__ == "__main__":
    model = Both()
    with paceline.join() as session:
        model, batches = session.prepare(model, token_data(), batch_size=8)
        for x, y in batches:
            session.backward(torch.nn.functional.cross_entropy(model(x), y))
            session.step()
        session.report(error=0.5)
    torch.save(model.state_dict(), "final.pt")
"""


def test_the_weights_of_a_script_are_saved_whole(tmp_path: Path) -> None:
    """Tied under both names, frozen ones and whole numbers too, what is not kept not: `load_state_dict` is strict."""
    script = tmp_path / "script.py"
    script.write_text(SAVED)
    flags = ["--strategy", "sync", "--lr", "0.1", "--max-seconds", "60", "--target", "error<=1", "--name", "run"]
    paths = [str(EXAMPLES.parent), str(Path(paceline.__file__).parents[1])]
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    command = run("run", "-n", "1", *flags, str(script), cwd=tmp_path, environment=environment)
    assert command.process.returncode == 0, command.err
    saved = load_file(tmp_path / "runs" / "run" / "weights.safetensors")
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    assert saved.keys() == final.keys()
    for name, tensor in final.items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(saved[name], tensor), name


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    done = python(RUN_CELLS.format(path=str(EXAMPLES / "notebook.ipynb")), tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"finished: test accuracy (9\d|100)", done.stdout) and "mean absolute error 0.0" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "kept without outputs"
