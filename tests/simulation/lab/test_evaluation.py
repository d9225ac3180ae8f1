"""The lab's figures are the task's own, also where a part of the train set was held out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest
import torch

from paceline.assembly.task import make_task
from paceline.assembly.work import held_out, scored_train
from paceline.config import RunConfig
from paceline.data.datasets import Dataset
from paceline.errors import UserError
from paceline.settings.resolve import resolve
from paceline.simulation.lab.run import LabTimes, check_rows, run_rows

SETTINGS = RunConfig(strategy="async", workers=2, batch_size=4, steps=6, lr=0.05)


def test_a_fold_is_scored_where_it_was_held_out(make_dataset: Callable[..., Dataset]) -> None:
    dataset = make_dataset(num_train=90)
    configs = [
        resolve(dataclasses.replace(SETTINGS, **part)) for part in ({"fold": "2/3"}, {"validation": 0.2}, {"seed": 1})
    ]
    found = list(run_rows(configs, dataset, torch.device("cpu"), lambda text, share: None))
    assert len(found) == 3
    for one in found:
        task = make_task(one.config, dataset)
        parts = dict(zip(("train", "validation"), held_out(dataset.train_labels, one.config), strict=True))
        for name, part in parts.items():
            if not len(part):
                assert one.result[f"{name}_accuracy"] is None
                continue
            expected = task.evaluate(one.weights, None, task.train, torch.from_numpy(part))
            assert one.result[f"{name}_accuracy"] == pytest.approx(expected.accuracy, abs=1e-3)
            assert one.result[f"{name}_loss"] == pytest.approx(expected.loss, rel=1e-4)
            assert one.result[f"{name}_total"] == len(part)
        assert (one.result["test_accuracy"] is None) == (one.config.fold is not None)


def test_runs_are_scored_on_the_sample_of_their_seed(make_dataset: Callable[..., Dataset]) -> None:
    dataset = make_dataset(num_train=90)
    parts = {"train_score": "20"}, {"train_score": "20", "seed": 1}, {"train_score": "20", "fold": "2/3"}
    configs = [resolve(dataclasses.replace(SETTINGS, **part)) for part in (*parts, {"train_score": "none"})]
    *sampled, none = run_rows(configs, dataset, torch.device("cpu"), lambda text, share: None)
    assert none.result["train_total"] is None and none.result["test_total"] is not None
    for one in sampled:
        task, rows = (
            make_task(one.config, dataset),
            scored_train(held_out(dataset.train_labels, one.config)[0], one.config),
        )
        expected = task.evaluate(one.weights, None, task.train, torch.from_numpy(rows))
        assert one.result["train_total"] == 20
        assert one.result["train_correct"] == expected.correct
        assert one.result["train_loss"] == pytest.approx(expected.loss, rel=1e-4)


def test_averaged_and_live_weights_are_both_scored(make_dataset: Callable[..., Dataset]) -> None:
    dataset = make_dataset(num_train=90)
    averaged, live = (
        resolve(dataclasses.replace(SETTINGS, validation=0.2, average=average)) for average in ("on", "none")
    )
    found = {
        one.config.average: one for one in run_rows([averaged, live], dataset, torch.device("cpu"), lambda *_: None)
    }
    one, task = found["on"], make_task(averaged, dataset)
    assert task.test is not None
    rows = torch.from_numpy(held_out(dataset.train_labels, averaged)[1])
    for prefix, weights in (("", one.weights), ("live_", one.live)):
        for part, scores in (
            ("test", task.evaluate(weights, None, task.test)),
            ("validation", task.evaluate(weights, None, task.train, rows)),
        ):
            assert one.result[f"{prefix}{part}_loss"] == pytest.approx(scores.loss, rel=1e-4)
    assert one.result["weights"] == "averaged" and one.result["live_test_loss"] != one.result["test_loss"]
    assert found["none"].result["weights"] == "live" and "live_test_loss" not in found["none"].result


def test_a_diverged_row_has_no_figures(make_dataset: Callable[..., Dataset]) -> None:
    config = resolve(dataclasses.replace(SETTINGS, lr=1e20))
    (one,) = run_rows([config], make_dataset(), torch.device("cpu"), lambda text, share: None)
    assert one.result["status"] == "diverged"
    assert one.result["test_loss"] is None and one.result["train_accuracy"] is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"snapshots": 1.0}, "--snapshots"),
        ({"strategy": "local:4"}, "no local steps"),
    ],
)
def test_what_the_lab_cannot_do_is_said_first(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_rows([resolve(RunConfig(**settings))])


def test_seconds_add_up_over_several_calls(make_dataset: Callable[..., Dataset]) -> None:
    dataset, spent, began = make_dataset(), LabTimes(), time.perf_counter()
    for seed in (0, 1, 2):
        config = resolve(dataclasses.replace(SETTINGS, seed=seed))
        list(run_rows([config], dataset, torch.device("cpu"), lambda text, share: None, spent))
    parts = (spent.tracing, spent.training, spent.scoring)
    assert all(part > 0 for part in parts) and sum(parts) <= time.perf_counter() - began
    assert (spent.num_rows, spent.gradients) == (3, 18)
