"""A loss that was told and is not finite ends the run, even if the gradient is finite; a loss not told is no defect."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline
from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.core.messages import Push
from paceline.errors import Diverged
from paceline.reports.console import Console
from paceline.runs.arrival_log import scan_log
from paceline.runs.folder import RunFolder
from paceline.runtimes.sharded.orders import EMPTY, from_words, to_words
from paceline.simulation.run import simulate
from paceline.studies.batch_runs import resolve_for_simulation

pytestmark = pytest.mark.long  # left to `make test`

TASK = """
import torch
import torch.nn.functional as F
import paceline

calls = 0

def with_logarithm(outputs, targets):
    global calls
    calls += 1
    zero = torch.zeros(()) if calls > 8 else torch.ones(())
    return F.cross_entropy(outputs, targets) + WORST * zero.log()

def build():
    global calls
    calls = 0
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    return paceline.Task(torch.nn.Linear(4, 2), with_logarithm, train=(x, (x[:, 0] > 0).long()))
"""


@pytest.mark.parametrize("worst", ["0.0", "-1.0", "1.0"], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("strategy", ["classic", "sync", "async", "bounded:1", "allreduce", "local:2"])
def test_a_loss_that_is_not_finite_ends_the_run_like_a_gradient_that_is_not(
    strategy: str, worst: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TASK.replace("WORST", worst))
    settings: dict[str, Any] = {"strategy": strategy, "workers": 1 if strategy == "classic" else 2, "threads": 1}
    settings |= {"task": "own.py:build", "batch_size": 4, "epochs": 2.0, "runs": "runs", "name": "run"}
    _, result = simulate(resolve_for_simulation(RunConfig(**settings)), Console(quiet=True))
    assert result["status"] == "diverged" and 0 < result["updates"] < 9
    assert "was a NaN or infinity, though its push was finite: check the loss function" in result["reason"]
    log = scan_log(RunFolder(Path("runs/run")).arrivals_file, RunFolder(Path("runs/run")).config())
    pushes = [record.loss for record in log.records if record.kind == "push"]
    assert math.inf in pushes[-2:] and all(map(math.isfinite, pushes[:-2]))
    assert main(["replay", "runs/run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True


def training(batch_loss: Any, tell: str) -> int:
    """A loop of ten batches; returns how many updates were made."""
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    model, made = torch.nn.Linear(4, 2), 0
    with paceline.join(RunConfig(strategy="classic", lr=0.1, epochs=1.0)) as session:
        _, data = session.prepare(model, torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4)
        for inputs, targets in data:
            loss = F.cross_entropy(model(inputs), targets)
            told = loss + batch_loss(made)
            if tell == "backward":
                session.backward(told)
                session.step()
            else:
                loss.backward()
                session.step(told if tell == "step" else None)
            made += 1
    return made


@pytest.mark.parametrize("tell", ["step", "backward"])
def test_a_loop_that_tells_a_nan_diverges(tell: str) -> None:
    with pytest.raises(Diverged, match="at update 3: the loss is a NaN or infinity"):
        training(lambda made: math.nan if made == 3 else 0.0, tell)


def test_a_loop_that_tells_no_loss_trains_to_the_end() -> None:
    assert training(lambda made: math.nan, "nothing") == 10


@pytest.mark.parametrize("loss", [0.1, math.nan, math.inf])
def test_other_servers_are_sent_the_loss_as_it_is(loss: float) -> None:
    push = Push(1, 0, 7, 7, 32, loss, EMPTY, EMPTY)
    again = from_words(json.loads(json.dumps(to_words(push), allow_nan=False)))
    assert isinstance(again, Push) and repr(again.loss) == repr(loss)
