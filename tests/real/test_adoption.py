"""Scripts, loops and notebooks that people have already, on Paceline."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import result_of, run
from safetensors.torch import load_file

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


def test_a_plain_script_is_distributed_by_six_lines(tmp_path: Path) -> None:
    plain, joined = EXAMPLES / "plain_script.py", EXAMPLES / "plain_script_joined.py"
    changes = difflib.ndiff(plain.read_text().splitlines(), joined.read_text().splitlines())
    changed = [line for line in changes if line.startswith("+ ") and line[2:].strip() and not line.startswith('+ """')]
    assert len(changed) <= MOST_LINES, changed
    alone = python(plain.read_text(), tmp_path)
    assert alone.returncode == 0 and "test accuracy 9" in alone.stdout, alone.stderr
    command = run("run", "-n", "2", "--strategy", "sync", "--name", "joined", str(joined), cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    result = result_of(tmp_path / "runs" / "joined")
    assert (result["status"], result["optimizer"], result["lr"]) == ("finished", "sgd", 0.02)
    assert result["samples"] == 6 * 2500 and result["reported"]["0"]["test_accuracy"] > 90.0
    assert "identical to the run" in run("replay", "runs/joined", cwd=tmp_path).out, "with the script's own schedule"


@pytest.mark.parametrize(
    ("example", "figure", "most"), [("huggingface_style", "perplexity", 2.0), ("fabric_style", "mae", 0.4)]
)
def test_loops_written_for_others_learn_on_two_workers(example: str, figure: str, most: float, tmp_path: Path) -> None:
    command = run(
        "run", "-n", "2", "--strategy", "sync", "--name", "run", str(EXAMPLES / f"{example}.py"), cwd=tmp_path
    )
    assert command.process.returncode == 0, command.err
    assert result_of(tmp_path / "runs" / "run")["reported"]["0"][figure] < most
    assert "reported by worker 0: " in command.out and figure in command.out


SAVED = """
import sys
import torch
import paceline
sys.path.insert(0, {tests!r})
from odd_models import Buffered, Frozen, token_data

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
    script.write_text(SAVED.format(tests=str(EXAMPLES.parent / "tests")))
    flags = ["--strategy", "sync", "--lr", "0.1", "--max-seconds", "60", "--target", "error<=1", "--name", "run"]
    command = run("run", "-n", "1", *flags, str(script), cwd=tmp_path)
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
