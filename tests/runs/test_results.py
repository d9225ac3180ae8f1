"""What a run comes to: its result, its folder, and the counts in it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from paceline.analysis.listing import runs_of
from paceline.core.messages import Resume
from paceline.errors import UserError
from paceline.reports.run_tables import compare
from paceline.reports.sentences import closing_lines
from paceline.runs.arrival_log import _PUSH, RECORD_BYTES
from paceline.runs.durable_files import write_atomically
from paceline.runs.events import read_events
from paceline.runs.folder import RunFolder
from paceline.runs.result import percentile, staleness_summary, summarise, weights_sha256
from paceline.system.strict_json import seal
from tests.support.made_up_runs import make_folder, result_of
from tests.support.recorded_runs import Record, Small, small_config, small_task


@given(values=st.lists(st.integers(0, 30), min_size=1, max_size=60), share=st.sampled_from([0.5, 0.95]))
def test_a_percentile_is_the_least_value_that_covers_its_share(values: list[int], share: float) -> None:
    found = percentile(Counter(values), share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_staleness_of_nothing_is_zero() -> None:
    assert staleness_summary(Counter()) == {"mean": 0.0, "p50": 0, "p95": 0, "max": 0}
    assert staleness_summary(Counter({0: 3, 4: 1})) == {"mean": 1.0, "p50": 0, "p95": 4, "max": 4}


def test_the_hash_of_weights_depends_on_names_and_values_and_not_on_order() -> None:
    first = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert weights_sha256(first) == weights_sha256(dict(reversed(first.items())))
    assert weights_sha256(first) != weights_sha256({"a": torch.zeros(2), "b": torch.ones(2)})
    assert weights_sha256(first) != weights_sha256({"a": torch.ones(2), "c": torch.zeros(2)})


def test_a_finished_run_leaves_a_result_and_weights_that_score_what_it_says(record: Record) -> None:
    run = record(strategy="async", workers=2, eval_every=1.0)
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    run.close()
    assert seal(result) == json.loads(run.folder.result_file.read_text())
    assert result == run.folder.result()
    assert result["status"] == "finished"
    assert result["updates"] == run.server.version
    assert result["samples"] == run.server.samples
    tensors = load_file(run.folder.weights_file)
    assert weights_sha256(tensors) == result["weights_sha256"]
    model = Small()
    model.load_state_dict(tensors)
    task = small_task()
    assert task.test is not None
    right = model.eval()(task.test[0]).argmax(1) == task.test[1]
    assert int(right.sum()) == result["test_correct"]
    assert result["test_accuracy"] == pytest.approx(100 * right.float().mean().item(), abs=1e-3)
    kinds = [row["kind"] for row in read_events(run.folder.events_file)]
    assert kinds[0] == "run_started"
    assert kinds[-1] == "run_ended"
    assert kinds.count("worker_joined") == 2
    assert kinds.count("evaluation") == 1, "the end is scored by the result, the first epoch by --eval-every"


def test_a_run_stops_at_the_target_accuracy_and_counts_as_finished(record: Record) -> None:
    run = record(strategy="async", workers=2, eval_every=0.5, target_accuracy=1.0, epochs=40.0)
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    assert result["status"] == "finished"
    assert "target accuracy 1 % reached" in result["reason"]
    assert result["updates"] < 40


def half_wrong(outputs: Tensor, targets: Tensor) -> float:
    """Falls, then rises again: the best is in the middle."""
    half_wrong.calls += 1  # type: ignore[attr-defined]
    return abs(3.0 - half_wrong.calls)  # type: ignore[attr-defined]


def test_metrics_of_a_task_are_shown_kept_and_end_a_run(record: Record) -> None:
    half_wrong.calls = 0  # type: ignore[attr-defined]
    run = record(strategy="async", workers=2, eval_every=0.5, best="min:distance", target="distance>=2", epochs=40.0)
    run.task.metrics = {"distance": half_wrong}
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    assert (result["status"], result["reason"]) == ("finished", "target distance >= 2 reached")
    evaluations = [row for row in read_events(run.folder.events_file) if row["kind"] == "evaluation"]
    assert [row["test_metrics"] for row in evaluations] == [{"distance": 2.0}]
    assert result["test_metrics"]["distance"] == 0.0, "train and test data were scored once more at the end"
    assert result["best"]["measure"] == "min:distance" and result["best"]["value"] == 0.0
    assert "test loss" in run.notes[0] and "distance 2" in run.notes[0]
    lines = closing_lines(result, None, "here")
    on_test, on_train = (line for line in lines if line.startswith("Average"))
    assert on_test.endswith(", distance 0") and ", distance 1" in on_train
    assert "distance" in compare(runs_of([run.folder.path])[0], 120).splitlines()[0]


def test_a_diverged_run_says_so_and_what_to_change(record: Record) -> None:
    run = record(strategy="async", workers=2, lr=1e30)
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    assert result["status"] == "diverged"
    assert "--lr" in result["reason"]
    assert run.server.divergence is not None
    assert f"worker {run.server.divergence.worker}" in result["reason"]
    assert result["test_accuracy"] is None


def test_a_lost_worker_is_an_event(record: Record) -> None:
    run = record(strategy="sync", workers=2)
    run.join_all()
    run.push(0)
    run.leave(1)
    assert run.host.lost == [1]
    run.push_at_random(10_000)
    result = run.host.finish()
    assert result["lost_workers"] == [1] and "returned_workers" not in result
    assert "1 of 2 workers was lost: worker 1" in closing_lines(result, None, "here")
    lost = [row for row in read_events(run.folder.events_file) if row["kind"] == "worker_lost"]
    assert [(row["worker"], row["live"]) for row in lost] == [(1, 1)]


def test_bytes_count_every_push_and_every_reply_of_every_incarnation(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    for worker in (0, 1, 0):
        run.push(worker)
    run.leave(0)
    run.join(0)
    run.push(0)
    counts = summarise(run.config, run.server, 1.0, {})
    nbytes = 4 * run.server.weights.numel()
    assert counts["bytes_pushed"] == 4 * nbytes
    assert counts["bytes_pulled"] == (2 + 3 + 1 + 1) * nbytes


def test_classic_moves_no_bytes(record: Record) -> None:
    run = record(strategy="classic", workers=1)
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    assert (result["updates"] > 0, result["bytes_pushed"], result["bytes_pulled"]) == (True, 0, 0)
    rows = [row for row in read_events(run.folder.events_file) if row["kind"] == "progress"]
    assert all(row["bytes_pushed"] == row["bytes_pulled"] == 0 for row in rows)


def test_an_own_task_is_named_by_its_classes_never_by_settings_that_did_not_apply(record: Record) -> None:
    run = record(strategy="async", workers=2, task="tasks.py:build")
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    first = read_events(run.folder.events_file)[0]
    assert (result["model"], result["dataset"]) == (first["model"], None) == (type(run.task.model).__name__, None)


def test_bytes_of_a_resumed_run_do_not_start_again_at_zero(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(6)
    before = summarise(run.config, run.server, 1.0, {})["bytes_pulled"]
    run.host.handle(Resume())
    for worker in (0, 1):
        run.join(worker)
    assert summarise(run.config, run.server, 1.0, {})["bytes_pulled"] > before


def test_a_worker_that_came_back_is_not_lost_at_the_end(record: Record) -> None:
    run = record(strategy="sync", workers=2)
    run.join_all()
    run.leave(1)
    run.join(1)
    run.push_at_random(10_000)
    result = run.host.finish()
    assert (result["lost_workers"], result["returned_workers"]) == ([1], [1])
    assert not any("lost" in line for line in closing_lines(result, None, "here"))


def test_dropped_pushes_and_pushes_of_unknown_size_are_called_what_they_are(tmp_path: Path) -> None:
    result = result_of(make_folder(tmp_path), dropped_pushes=3, unit="pushes", samples=202, samples_per_second=28.0)
    lines = closing_lines(result, None, "here")
    assert any(line.endswith("202 pushes, 28 pushes/s") for line in lines)
    assert any(line.startswith("staleness") and line.endswith(" (of the pushes that count)") for line in lines)


def test_a_folder_is_never_written_over(tmp_path: Path) -> None:
    config = small_config(tmp_path, workers=2)
    folder = RunFolder.create(config)
    with pytest.raises(UserError, match=r"exists already: choose another --name, or remove it$"):  # nothing to resume
        RunFolder.create(config)
    folder.checkpoints.mkdir()
    with pytest.raises(UserError, match="exists already: choose another --name, remove it, or 'paceline resume"):
        RunFolder.create(config)
    folder.write_result(result_of(folder))
    with pytest.raises(UserError, match=r"exists already: choose another --name, or remove it$"):
        RunFolder.create(config)


@pytest.mark.parametrize("name", ["a/b", "..", "."])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="not a folder name"):
        RunFolder.create(small_config(tmp_path, workers=2, name=name))
    assert list(tmp_path.iterdir()) == []


def test_free_names_do_not_collide(tmp_path: Path) -> None:
    config = small_config(tmp_path, workers=2, name=None)
    assert len({RunFolder.create(config).path for _ in range(5)}) == 5


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no config"):
        RunFolder.open(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        RunFolder.open(tmp_path / "nowhere")


def test_an_unstarted_folder_is_discarded_and_a_started_one_is_kept(tmp_path: Path) -> None:
    folder = RunFolder.create(small_config(tmp_path, workers=2))
    folder.events_file.write_text('{"kind": "run_started"}\n')
    folder.arrivals_file.write_bytes(b"{}\n" + bytes([_PUSH]) * RECORD_BYTES)
    folder.discard_unstarted()
    assert folder.config_file.exists()
    folder.arrivals_file.write_bytes(bytes(30))
    (folder.path / "notes of a user").touch()
    folder.discard_unstarted()
    assert folder.config_file.exists()
    (folder.path / "notes of a user").unlink()
    folder.discard_unstarted()
    assert not folder.path.exists()


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(target, b"a folder cannot be replaced by a file")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "result.json"]


def test_a_sample_of_the_train_data_is_scored_and_named(record: Record) -> None:
    run = record(strategy="async", workers=2, train_score="7")
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    assert result["train_total"] == 7 < result["epoch_samples"]
    (line,) = (line for line in closing_lines(result, None, "here") if line.startswith("Average train"))
    assert line.endswith(f"on 7 of {result['epoch_samples']} samples")


def test_a_folder_without_the_setting_scored_all_of_the_train_data(record: Record) -> None:
    folder = record(strategy="async", workers=2).folder
    text = folder.config_file.read_text()
    assert folder.config().train_score == "10000"
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(("# crc32", "train_score"))]
    folder.config_file.write_text("".join(lines))
    assert folder.config().train_score == "all"
