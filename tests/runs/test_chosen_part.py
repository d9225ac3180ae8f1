"""Best weights, targets and sweeps choose on held-out data if there is some; otherwise they say that they did not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors import safe_open

from paceline.analysis.listing import runs_of
from paceline.reports.run_tables import compare
from paceline.reports.sentences import closing_lines
from paceline.runs.events import read_events
from paceline.runs.snapshots import read_best
from paceline.settings.stopping import require_measured
from tests.support.recorded_runs import Record, RecordedRun


def trained(run: RecordedRun) -> dict[str, Any]:
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    run.close()
    return result


def rows_of(run: RecordedRun, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_events(run.folder.events_file) if row["kind"] == kind]


@pytest.mark.parametrize("held_out", [{"validation": 0.25}, {"fold": "1/4"}], ids=["validation", "fold"])
def test_with_held_out_data_the_test_set_is_read_once_at_the_end_or_never(
    record: Record, held_out: dict[str, Any]
) -> None:
    run = record(strategy="async", workers=2, eval_every=0.5, **held_out)
    result = trained(run)
    scored = [row["which"] for row in rows_of(run, "scoring")]
    at_the_end = ["test", "test"] if "validation" in held_out else []  # averaged weights, then live ones
    assert [which for which in scored if which == "test"] == at_the_end and scored.count("validation") > 3
    assert "test" not in scored[:-2]
    evaluations = rows_of(run, "evaluation")
    assert evaluations and all("validation_loss" in row and "test_loss" not in row for row in evaluations)
    assert all("validation accuracy" in note for note in run.notes if "epoch" in note)
    assert result["chosen_on"] == "validation" == result["best"]["chosen_on"]
    seen = [*(row["validation_accuracy"] for row in evaluations), result["validation_accuracy"]]
    assert result["best"]["validation_accuracy"] == pytest.approx(max(seen), abs=1e-3)
    with safe_open(run.folder.best_file, "pt") as file:
        assert file.metadata()["chosen_on"] == "validation"
    assert read_best(run.folder) == result["best"]
    (line,) = (line for line in closing_lines(result, None, "here") if "chosen on" in line)
    assert line.startswith("checkpoints/best.safetensors: the best weights (update")
    assert line.endswith("chosen on the validation data")
    assert "chosen on" not in compare(runs_of([run.folder.path])[0], 120)


def test_without_held_out_data_the_result_and_the_tables_say_so(record: Record) -> None:
    run = record(strategy="async", workers=2, eval_every=0.5)
    result = trained(run)
    assert result["chosen_on"] == "test" == result["best"]["chosen_on"]
    (line,) = (line for line in closing_lines(result, None, "here") if "chosen on" in line)
    assert "chosen on the test set" in line
    assert "test set" not in compare(runs_of([run.folder.path])[0], 120)  # these are scores of its end


def test_a_run_that_ended_at_its_score_on_the_test_set_is_named(record: Record) -> None:
    run = record(strategy="async", workers=2, eval_every=0.5, epochs=40.0, target_accuracy=1.0)
    result = trained(run)
    assert result["reason"] == "target accuracy 1 % reached" and result["chosen_on"] == "test"
    line = "ended by their score on the test set, which is therefore too good: run"
    assert line in compare(runs_of([run.folder.path])[0], 120)


def test_a_run_that_chose_nothing_says_nothing(record: Record) -> None:
    run = record(strategy="async", workers=2, validation=0.25)
    result = trained(run)
    assert result["chosen_on"] is None and "chosen on" not in "".join(closing_lines(result, None, "here"))


def test_a_target_is_reached_on_the_validation_data(record: Record) -> None:
    run = record(strategy="async", workers=2, eval_every=0.5, epochs=40.0, validation=0.25, target_accuracy=1.0)
    assert run.task.test is not None
    run.task.test = run.task.test[0], torch.full_like(run.task.test[1], 2)
    with torch.no_grad():
        run.task.model.last.bias[2] = -1e9  # the model never predicts the only class of the test data
        run.server.weights.copy_(run.task.initial())
    result = trained(run)
    assert result["reason"] == "target accuracy 1 % reached" and result["chosen_on"] == "validation"
    assert result["test_accuracy"] == 0.0


def test_a_task_without_test_data_can_choose_on_held_out_data(record: Record) -> None:
    run = record(strategy="async", workers=2, eval_every=0.5, validation=0.25, best="min:loss")
    run.task.test = None
    require_measured(run.config, run.task.metric_names, has_test=False)
    result = trained(run)
    assert rows_of(run, "evaluation") and result["best"]["measure"] == "min:loss" and result["test_loss"] is None
