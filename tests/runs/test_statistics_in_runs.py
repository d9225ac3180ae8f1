"""Running statistics of norm layers in recorded runs: they belong to the weights that are scored and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from paceline.reports.sentences import closing_lines
from paceline.runs.compare_replay import compare
from paceline.runs.recording import open_recording
from paceline.runs.result import shared_state
from paceline.runs.snapshots import read_index
from paceline.tasks.script_model import ScriptModel
from tests.support.recorded_runs import Record, RecordedRun, Small, small_task

pytestmark = pytest.mark.long  # left to `make test`


def finished(run: RecordedRun) -> dict[str, Any]:
    run.push_at_random(10_000)
    result = run.host.finish()
    run.close()
    return result


def statistics(tensors: dict[str, Tensor], rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Those of the whole train set (or of some rows), which is one batch here, by the formula."""
    inputs = small_task().train[0] if rows is None else small_task().train[0][rows]
    hidden = inputs @ tensors["first.weight"].T + tensors["first.bias"]
    return hidden.mean(0), hidden.var(0)


def assert_own_statistics(path: Path, rows: Tensor | None = None) -> None:
    tensors = load_file(path)
    mean, variance = statistics(tensors, rows)
    torch.testing.assert_close(tensors["norm.running_mean"], mean)
    torch.testing.assert_close(tensors["norm.running_var"], variance)


@pytest.mark.parametrize("strategy", ["async", "sync", "local:2"])
def test_workers_that_left_early_leave_no_statistics_behind(record: Record, strategy: str) -> None:
    run = record(strategy=strategy, workers=3, rule="plain" if strategy == "async" else "auto", lr=0.5)
    run.join_all()
    run.push_at_random(6)
    run.leave(1)
    run.leave(2)
    finished(run)
    assert_own_statistics(run.folder.weights_file)


def test_a_newcomer_and_uneven_shards_do_not_bias_them(record: Record) -> None:
    run = record(strategy="async", workers=1, max_workers=3, rule="plain", lr=0.5)
    run.join_all()
    run.push_at_random(20)
    run.incarnations[1] = 0
    run.join(1)
    finished(run)
    assert_own_statistics(run.folder.weights_file)


def test_averaged_and_live_weights_have_their_own(record: Record) -> None:
    run = record(strategy="async", workers=2, average="on", lr=0.5, eval_every=1.0, snapshots=1.0)
    run.join_all()
    finished(run)
    for path in (run.folder.weights_file, run.folder.live_weights_file, run.folder.best_file):
        assert_own_statistics(path)
    entries = read_index(run.folder)
    assert len(entries) == 3
    for entry in entries[1:]:  # the first is of the start
        assert_own_statistics(run.folder.snapshots / entry.file_name)


def test_held_out_samples_are_not_looked_at(record: Record) -> None:
    run = record(strategy="async", workers=2, rule="plain", validation=0.25)
    run.join_all()
    finished(run)
    assert_own_statistics(run.folder.weights_file, torch.from_numpy(run.work.train))


def test_one_worker_with_live_weights_keeps_its_own(record: Record) -> None:
    run = record(strategy="classic")
    run.join_all()
    worker = run.instances[0]
    finished(run)
    saved = load_file(run.folder.weights_file)
    views = run.task.flat.state_layout.views(worker.memory.state)
    assert torch.equal(saved["norm.running_mean"], views["norm.running_mean"])
    assert torch.equal(saved["norm.running_var"], views["norm.running_var"])


def test_one_worker_that_was_resumed_began_its_own_anew_and_they_are_estimated(record: Record) -> None:
    run = record(strategy="classic", lr=0.5)
    run.join_all()
    run.push_at_random(20)
    run.checkpoint()
    run.incarnations[0] = 1
    run.resume()
    run.join(0)
    finished(run)
    assert_own_statistics(run.folder.weights_file)


@pytest.mark.parametrize("strategy", ["async", "sync", "diloco:2"])
def test_a_replay_estimates_the_same_bits(record: Record, strategy: str) -> None:
    run = record(strategy=strategy, workers=3)
    run.join_all()
    run.push_at_random(7)
    run.leave(1)
    run.push_at_random(2)
    run.join(1)
    finished(run)
    task = small_task()
    task.train_on(run.work.train, run.config.seed)
    outcome = compare(run.replay(), open_recording(run.folder.path), task, run.rows.append)
    assert outcome["identical"], outcome["first_departure"]


def test_the_result_has_the_scores_of_both_weights_and_names_its_own(record: Record) -> None:
    run = record(strategy="async", workers=2, average="on", validation=0.25, lr=0.5)
    run.join_all()
    result = finished(run)
    assert result["weights"] == "averaged"
    task = small_task()
    assert task.test is not None
    held_out = tuple(part[torch.from_numpy(run.work.validation)] for part in task.train)
    for prefix, file in (("", run.folder.weights_file), ("live_", run.folder.live_weights_file)):
        model = Small()
        model.load_state_dict(load_file(file))
        for part, (inputs, targets) in (("test", task.test), ("validation", held_out)):
            right = int((model.eval()(inputs).argmax(1) == targets).sum())
            assert result[f"{prefix}{part}_accuracy"] == round(100.0 * right / len(targets), 4)
    assert result["test_loss"] != result["live_test_loss"]
    live = f"test accuracy {result['live_test_accuracy']:.2f} %, test loss {result['live_test_loss']:.4f}"
    assert f"scored and saved: the averaged weights (live weights: {live})" in closing_lines(result, None, "here")
    assert "live_train_loss" not in result


def test_a_run_with_live_weights_alone_says_so(record: Record) -> None:
    run = record(strategy="sync", workers=2)
    run.join_all()
    result = finished(run)
    assert result["weights"] == "live"
    assert "scored and saved: the live weights" in closing_lines(result, None, "here")
    assert not [name for name in result if name.startswith("live_")]


def script_model(run: RecordedRun) -> ScriptModel:
    """What the server knows of a user's own loop: no code of the model."""
    return ScriptModel(run.task.layout.to_rows(), run.task.flat.state_layout.to_rows())


def mixed(run: RecordedRun, workers: tuple[int, ...]) -> dict[str, Tensor]:
    """The pooled statistics of these workers, weighted by the samples they pushed, by the formula."""
    counts = torch.tensor([float(run.server.members[worker].samples) for worker in workers]).unsqueeze(1)
    views = [run.task.flat.state_layout.views(run.server.worker_states[worker]) for worker in workers]
    means = torch.stack([view["norm.running_mean"] for view in views])
    squares = torch.stack([view["norm.running_var"] for view in views]) + means.square()
    mean, square = ((counts * values).sum(0) / counts.sum() for values in (means, squares))
    return {"norm.running_mean": mean, "norm.running_var": square - mean.square()}


def assert_mixed(run: RecordedRun, workers: tuple[int, ...]) -> None:
    state = shared_state(run.server, script_model(run), run.server.weights)
    assert state is not None
    found = run.task.flat.state_layout.views(state)
    for name, expected in mixed(run, workers).items():
        torch.testing.assert_close(found[name], expected)


def test_without_the_models_code_departed_workers_do_not_count_and_others_by_their_samples(record: Record) -> None:
    run = record(strategy="async", workers=3, rule="plain", epochs=4.0)
    run.join_all()
    for worker in (0, 1, 2, 1, 2, 2, 2):
        run.push(worker)
    assert_mixed(run, (0, 1, 2))
    run.leave(0)
    assert_mixed(run, (1, 2))
    run.host.drain(2)
    run.push(2)
    assert_mixed(run, (1,))


def test_without_the_models_code_everybody_counts_who_stayed_to_the_end(record: Record) -> None:
    run = record(strategy="async", workers=3, rule="plain")
    run.join_all()
    run.push_at_random(5)
    run.leave(0)
    run.push_at_random(10_000)
    for worker in (1, 2):
        run.leave(worker)
    assert_mixed(run, (1, 2))


def test_without_the_models_code_the_last_to_leave_still_counts(record: Record) -> None:
    run = record(strategy="async", workers=2, rule="plain", epochs=4.0)
    run.join_all()
    run.push_at_random(8)
    for worker in (0, 1):
        run.leave(worker)
    assert_mixed(run, (0, 1))


def test_a_worker_that_came_back_counts_from_its_first_push_on_and_only_by_those_samples(record: Record) -> None:
    run = record(strategy="async", workers=2, rule="plain", epochs=4.0)
    run.join_all()
    run.push_at_random(8)
    run.leave(1)
    run.join(1)
    assert_mixed(run, (0,))
    run.push(1)
    assert run.server.members[1].samples == run.config.batch_size
    assert_mixed(run, (0, 1))


def test_a_model_without_norm_layers_costs_nothing(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    task = small_task()
    task.model.norm.eval()  # as if frozen by the user: there is nothing to estimate
    monkeypatch.setattr(task._statistics, "_estimate", lambda *_: pytest.fail("estimated"))
    state = torch.rand(task.state_size)
    assert task.estimated(task.initial(), state) is state


def test_scores_are_those_of_the_saved_statistics(record: Record) -> None:
    run = record(strategy="async", workers=3, rule="plain", lr=0.5)
    run.join_all()
    run.push_at_random(6)
    run.leave(1)
    run.leave(2)
    result = finished(run)
    model, data = Small(), small_task().test
    model.load_state_dict(load_file(run.folder.weights_file))
    assert data is not None
    loss = F.cross_entropy(model.eval()(data[0]), data[1])
    assert result["test_loss"] == pytest.approx(loss.item(), rel=1e-5)
