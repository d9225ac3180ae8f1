"""A run that learned nothing is marked; one that learned a little, or cannot be judged, is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.collapse import LossCourse
from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.reports.console import Console
from paceline.runs.folder import RunFolder
from paceline.simulation.run import simulate
from paceline.studies.batch_runs import resolve_for_simulation
from tests.support.rings import long_but

pytestmark = pytest.mark.long  # left to `make test`

SMALL = {
    "dataset": "fashion-mnist-sample",
    "strategy": "async",
    "workers": 4,
    "batch_size": 4,
    "epochs": 1.0,
    "threads": 1,
}
TOO_HIGH = 0.5

TASK = """
import torch
import torch.nn.functional as F
import paceline

def smoothed(outputs, targets):
    return 3.0 * F.cross_entropy(outputs, targets, label_smoothing=0.1)

def of(inputs, targets, loss=F.cross_entropy, outputs=2, model=None):
    torch.manual_seed(0)
    model = model or torch.nn.Linear(inputs.shape[1], outputs)
    cut = len(inputs) * 3 // 4
    return paceline.Task(model, loss, train=(inputs[:cut], targets[:cut]), test=(inputs[cut:], targets[cut:]))

def points(count=4000, features=4):
    return torch.randn(count, features, generator=torch.Generator().manual_seed(1))

def rare():
    x = points()
    return of(x, (x[:, 0] > 1.9).long())

def noisy():
    x = points()
    coin = torch.rand(len(x), generator=torch.Generator().manual_seed(2))
    return of(x, (x[:, 0] > 0).long() ^ (coin < 0.45).long())

def many():
    x = points(8000)
    return of(x, (x[:, 0] > 0).long())

def random_labels():
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
    return of(points(200, 16), torch.randint(0, 2, (200,), generator=generator), model=model)

def dead(loss=F.cross_entropy):
    x = points()
    return of(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), loss, model=Dead())

def dead_smoothed():
    return dead(smoothed)

def regression():
    x = points()
    return of(x, torch.zeros(len(x), 1), F.mse_loss, outputs=1, model=torch.nn.Linear(4, 1))

def steep():
    x = 3.0 * points(4000, 16)
    return of(x, x.sum(1, keepdim=True), F.mse_loss, model=torch.nn.Linear(16, 1))

def outliers():
    x = points()
    return of(x, x[:, :1] + 300.0 * (x[:, 1:2] > 3.0), F.mse_loss, model=torch.nn.Linear(4, 1))

class Dead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 3)
        torch.nn.init.zeros_(self.out.weight)

    def forward(self, inputs):
        return self.out(inputs * 0.0)
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_tasks.py").write_text(TASK)


def run(**settings: Any) -> dict[str, Any]:
    config = resolve_for_simulation(RunConfig(**{"runs": "runs", "name": "run", **settings}))
    return simulate(config, Console(quiet=True))[1]


def own(name: str, **settings: Any) -> dict[str, Any]:
    fixed = {
        "task": f"own_tasks.py:{name}",
        "strategy": "async",
        "workers": 2,
        "batch_size": 16,
        "lr": 0.05,
        "threads": 1,
    }
    return run(**{**fixed, "epochs": 2.0, **settings})


def test_a_run_at_a_far_too_high_lr_collapses_and_says_so_everywhere(
    small_sample: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["simulate", *flags, "--lr", str(TOO_HIGH), "--name", "high", "--json"]) == 3
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["status"] == "collapsed" and result["train_accuracy"] < 12.0
    line = next(line for line in said.err.splitlines() if line.startswith("paceline: training collapsed"))
    assert result["reason"] in " ".join(said.err.split()) and line
    assert f"--lr {TOO_HIGH / 10:g} (now {TOO_HIGH:g}) or fewer --workers (now 4," in result["reason"]
    for verb in (["list", "runs"], ["compare", "runs/high"], ["status", "runs/high"]):
        main(verb)
        assert "collapsed" in capsys.readouterr().out, verb
    assert main(["report", "runs/high", "--output", "page.html"]) == 0
    assert "Training collapsed: after" in Path("page.html").read_text()
    with pytest.raises(Exception, match="collapsed after 60 updates: there is nothing to resume"):
        RunFolder(Path("runs/high")).require_unfinished()


def test_only_the_test_data_was_scored_and_the_collapse_is_found_all_the_same(small_sample: None) -> None:
    assert run(**SMALL, lr=TOO_HIGH, score="test")["status"] == "collapsed"


@pytest.mark.parametrize("name", long_but(["dead"], ["dead", "dead_smoothed"]))
def test_a_model_that_ignores_its_inputs_learned_nothing_under_any_loss(name: str) -> None:
    result = own(name)
    assert result["status"] == "collapsed" and "never left" in result["reason"]


@pytest.mark.long
def test_a_run_whose_weights_hardly_moved_is_told_to_raise_the_lr() -> None:
    result = own("many", lr=1e-9, strategy="classic", workers=1)
    assert result["status"] == "collapsed" and "try --lr 1e-08 (now 1e-09)" in result["reason"]
    assert own("many", strategy="classic", workers=1, runs="usual")["status"] == "finished"


@pytest.mark.parametrize(
    "strategy",
    long_but(
        ["sync", "async"],
        ["classic", "sync", "backup:1", "async", "bounded:2", "allreduce", "local:4", "diloco:4", "async-local:4"],
    ),
)
def test_ordinary_short_runs_are_not_accused(strategy: str, small_sample: None) -> None:
    workers = 1 if strategy == "classic" else 4
    assert run(**{**SMALL, "strategy": strategy, "workers": workers})["status"] == "finished"


@pytest.mark.long
def test_a_slow_start_close_to_chance_is_not_accused() -> None:
    """Eight workers in rounds make 47 updates: the loss is 0.6 % below that of the class frequencies."""
    settings = {**SMALL, "strategy": "sync", "workers": 8, "batch_size": 32}
    result = run(**settings)
    assert result["train_loss"] > 2.28 and result["status"] == "finished"


@pytest.mark.parametrize("score", ["all", "test"])
@pytest.mark.parametrize(
    ("name", "epochs"), [("rare", 2.0), ("noisy", 2.0), ("random_labels", 60.0), ("regression", 1.0)]
)
def test_a_task_that_is_hard_unbalanced_overfitted_or_no_classification_is_not_accused(
    name: str, epochs: float, score: str
) -> None:
    result = own(name, epochs=epochs, score=score)
    assert result["status"] == "finished", result["reason"]
    if name == "random_labels" and score == "all":
        assert result["train_accuracy"] > 95.0 and result["test_loss"] > 0.7 and result["test_accuracy"] < 62.0
    if name == "rare" and score == "all":
        assert result["train_accuracy"] < 99.0, "hardly better than never predicting the rare class"


@pytest.mark.parametrize("strategy", ["async", "bounded:2"])
def test_a_regression_whose_loss_exploded_without_a_nan_has_collapsed(strategy: str) -> None:
    """The rule clips its pushes, so that the weights stay finite."""
    result = own("steep", lr=0.4, strategy=strategy)
    assert result["status"] == "collapsed" and result["train_loss"] > 100 * 144
    assert "a loss of" in result["reason"] and "try --lr 0.04 (now 0.4)" in result["reason"]
    assert own("steep", lr=0.001, strategy=strategy, runs="usual")["status"] == "finished"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_regression_with_rare_outliers_is_not_accused(seed: int) -> None:
    """The mean loss is about 100 times that of most batches."""
    result = own("outliers", lr=0.001, seed=seed)
    assert result["status"] == "finished", result["reason"]


@pytest.mark.parametrize("settings", [{"epochs": 0.9, "lr": 1e-9}, {"score": "none"}, {"steps": 15, "batch_size": 240}])
def test_what_is_too_short_or_not_scored_is_not_judged(settings: dict[str, Any], small_sample: None) -> None:
    assert run(**{**SMALL, "workers": 1, "lr": TOO_HIGH, **settings})["status"] == "finished"


def test_a_course_knows_its_lowest_and_its_last_level() -> None:
    assert LossCourse.of([]) is None and LossCourse.of([float("nan")]) is None
    course = LossCourse.of([2.0, float("nan"), 1.0])
    assert course is not None and (course.lowest, course.last) == (1.0, 1.0)


def test_a_loss_that_rose_far_above_the_first_one_has_exploded_and_one_that_comes_from_above_has_not() -> None:
    exploded, from_above = LossCourse.of([2.3, 8e12, 70.0]), LossCourse.of([70.0, 9.0, 2.4])
    assert exploded is not None and exploded.has_exploded(2.3)
    assert from_above is not None and not from_above.has_exploded(2.3)


def test_a_sync_run_that_exploded_is_told_to_lower_its_lr(small_sample: None) -> None:
    reason = run(**{**SMALL, "strategy": "sync", "workers": 2, "lr": 50.0, "epochs": 4.0})["reason"]
    assert "The training loss rose from 2.2" in reason and "try --lr 0.005 (the default, now 50)" in reason


def test_an_explosion_shorter_than_a_window_is_seen() -> None:
    """With local steps the first loss is a mean over steps too, and the explosion is over within the first window."""
    course = LossCourse.of([4.4, 2.4, 3.5, 2.8, 18.9, 41.2, 5.9, 5.5, *[2.8, 2.6] * 150])
    assert course is not None and course.has_exploded(2.3)


def test_one_hard_batch_is_no_explosion() -> None:
    course = LossCourse.of([2.3, 2.4, 15.0, 2.2, 2.1])
    assert course is not None and not course.has_exploded(2.3)


@pytest.mark.parametrize("strategy", long_but(["sync"], ["classic", "sync", "allreduce", "local:4", "diloco:4"]))
def test_a_run_that_exploded_is_judged_before_its_first_epoch_ends(strategy: str, small_sample: None) -> None:
    workers = 1 if strategy == "classic" else 2
    result = run(**{**SMALL, "strategy": strategy, "workers": workers, "lr": 5.0, "epochs": 0.8})
    assert result["status"] in ("collapsed", "diverged") and "--lr 0.005 (the default, now 5)" in result["reason"]
