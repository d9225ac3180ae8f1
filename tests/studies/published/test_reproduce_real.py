"""Published tables that are run for real: their rows, our settings, what cannot run, and the tables made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.scored_weights import kind_of
from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.data.datasets import DATASETS, Location
from paceline.errors import UserError
from paceline.runs.result import describe
from paceline.settings.resolve import resolve
from paceline.studies.published import distml, distml_table, mxnet, mxnet_table, reproduce_real
from paceline.studies.published.rows import MachineSpec, RowOptions, RowResult, choose
from paceline.studies.published.throughput import epochs_of, rates_by_step

PUBLISHED = RowOptions(None, None, "cpu", None, "runs", {})


def test_the_tables_have_all_their_rows() -> None:
    rows, runs = distml.published_rows(), mxnet.published_rows()
    assert len(rows) == 34 and len({row.name for row in rows}) == 34
    assert sum(row.test_accuracy is None for row in rows) == 7, "no accuracy of the transformer was ever printed"
    assert len(runs) == 14 and sum(len(run.epochs) for run in runs) == 24
    empty = [run for run in runs if not run.epochs]
    assert [(run.dataset, run.mode, run.batch, run.lr) for run in empty] == [
        ("cifar10", "async", batch, lr) for batch in (512, 256) for lr in (0.1, 0.4)
    ]


def test_speed_ups_are_of_the_baseline_beside_them() -> None:
    for row in distml.published_rows():
        assert row.samples_per_second / row.baseline == pytest.approx(row.speedup, abs=0.021), row.name


@pytest.mark.parametrize("settings", [{}, {"strategy": "async"}], ids=["as published", "async"])
def test_every_row_is_scored_on_live_weights_as_the_published_ones(settings: dict[str, object]) -> None:
    asked = RowOptions(None, None, "cpu", None, "runs", settings)
    rows = (*distml.published_rows(), *mxnet.published_rows())
    assert {kind_of({}, row.config(asked)) for row in rows} == {"live"}


@pytest.mark.parametrize("steps", [None, 5])
def test_every_row_whose_data_is_known_is_a_setting_of_ours(steps: int | None) -> None:
    asked = RowOptions(None, steps, "cpu", None, "runs", {})
    configs = [row.config(asked) for row in (*distml.published_rows(), *mxnet.published_rows())]
    known = [resolve(config) for config in configs if config.dataset in DATASETS]
    assert len(known) >= 37
    for config in known:
        assert not config.warmup, "theirs had none"


def test_distml_as_published() -> None:
    (row,) = choose(distml.published_rows(), "10")
    config = resolve(row.config(PUBLISHED))
    assert (row.workers, config.workers, config.batch_size, config.epochs) == (4, 4, 128, 4.0)
    assert (config.optimizer, config.lr, config.scale_lr, config.split) == ("adam", 0.01, "4.0", "full")
    assert config.epoch_mode == "own" and config.eval_every == 4.0, "an epoch is one pass of each worker"
    assert config.strategy == "allreduce"


def test_mxnet_as_published() -> None:
    (row,) = choose(mxnet.published_rows(), "3")
    config = resolve(row.config(PUBLISHED))
    assert (config.strategy, config.workers, config.batch_size, config.lr) == ("sync", 5, 512, 0.1)
    assert (config.momentum, config.weight_decay, config.split, config.epochs) == (0.9, 1e-5, "iid", 40.0)
    assert config.eval_every == 1.0 and config.eval_train


def test_flags_are_handed_on_and_one_worker_keeps_no_pace() -> None:
    asked = RowOptions(1.0, None, "cpu", None, "runs", {"precision": "bf16", "strategy": "async"})
    alone, two = (row.config(asked) for row in choose(distml.published_rows(), "1,8"))
    assert (alone.strategy, two.strategy) == ("classic", "async")
    assert alone.precision == two.precision == "bf16" and two.epochs == 1.0


def test_rows_that_need_more_than_there_is_say_what() -> None:
    reasons = {row.number: row.why_not(MachineSpec("cuda", 2)) for row in distml.published_rows()}
    assert reasons[1] is None and reasons[8] is None
    assert reasons[10] == "needs 4 devices, and this machine has 2 GPUs"
    assert reasons[19] == "needs 2 machines (lm1+lm6), and this is one"
    assert all(row.why_not(MachineSpec("cpu", 1)) is None for row in mxnet.published_rows())


def test_rows_that_do_not_exist_are_named() -> None:
    with pytest.raises(UserError, match="rows 1 to 34"):
        choose(distml.published_rows(), "35")
    with pytest.raises(UserError, match="did you mean"):
        choose(mxnet.published_rows(), "cifar")


def event(now: float, updates: int, accuracy: float | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": "progress", "now": now, "updates": updates, "samples": 128 * updates}
    if accuracy is None:
        return row
    return {**row, "kind": "evaluation", "test_accuracy": accuracy, "train_accuracy": accuracy + 1, "test_seconds": 0.5}


EVENTS = [event(50.0, 150), event(100.0, 250), event(150.0, 469), event(150.0, 469, 90.0), event(280.0, 938, 95.0)]


def test_rates_are_since_the_start_and_read_between_the_rows() -> None:
    rates = rates_by_step(EVENTS)
    assert [step for step, _ in rates] == [200, 400]
    assert rates[0][1] == pytest.approx(200 * 128 / 75.0)


def test_epochs_are_what_lies_between_evaluations() -> None:
    first, second = epochs_of(EVENTS)
    assert (first.number, first.seconds, first.test_seconds, first.test_accuracy) == (1, 150.0, 0.5, 90.0)
    assert (second.number, second.seconds, second.train_accuracy) == (2, 130.0, 96.0)


def made_folder(path: Path) -> Path:
    path.mkdir()
    (path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVENTS))
    return path


def result(workers: int, rate: float) -> dict[str, Any]:
    named = {"strategy": "sync", "workers": workers, "device": "cpu", "status": "finished", "updates": 938}
    scores = {**describe(None, "train"), **describe(None, "test"), "test_accuracy": 95.0}
    return {**named, **scores, "samples_per_second": rate, "samples": 120_064, "train_seconds": 280.0}


def test_the_all_reduce_table_has_theirs_ours_and_the_reason(tmp_path: Path) -> None:
    alone, two, four = choose(distml.published_rows(), "2,8,10")
    folder = made_folder(tmp_path / "run")
    made = [
        RowResult(alone, folder, result(1, 400.0)),
        RowResult(two, folder, result(2, 700.0)),
        RowResult(four, why_not="no GPUs"),
    ]
    text = distml_table.markdown(made)
    assert "| 160.70 | 700.00 | 1.96 | 81.84 | 1.75 | 95.19 | 95.00 | 140.0 | 0.50 | sync, 2 on cpu" in text
    assert "| 320.29 |  | 3.91 | 81.84 |  | 93.58 |  |  |  | no GPUs |" in text
    log = distml_table.log(made)
    assert "- Step200: 341.33 data/sec" in log
    assert "- Epoch 1 in 130.00 sec, test time 0.50 sec, test accuracy: 0.9500" in log


def test_the_key_value_table_is_by_epoch_and_shows_the_rows_left_empty(tmp_path: Path) -> None:
    rows = mxnet.published_rows()
    first, epochs = rows[2], ((1, mxnet.EpochFigures(80.0, 70.0, 7.0)), (40, mxnet.EpochFigures(99.0, 88.0, 7.0)))
    full = mxnet.MxnetRow(*(getattr(first, name) for name in list(first.__dataclass_fields__)[:-1]), epochs)
    folder = made_folder(tmp_path / "run")
    empty = next(row for row in rows if not row.epochs)
    text = mxnet_table.markdown([RowResult(full, folder, result(5, 9.0)), RowResult(empty, why_not="no data")])
    assert "| 1 | 80.00 | 91.00 | 70.00 | 90.00 | 7 | 150.0 | sync, 5 on cpu, 938 updates in all |" in text
    assert "| 40 | 99.00 |  | 88.00 |  | 7 |  | sync, 5 on cpu: not run so far |" in text
    assert f"| {empty.name} |  |  |  |  |  |  |  | no data |" in text


def test_a_quick_look_shows_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    row = next(row for row in mxnet.published_rows() if not row.epochs)
    (line,) = mxnet_table.rows_of([RowResult(row, tmp_path, result(5, 9.0))])
    assert line["epoch"] is None and line["valid_accuracy"] == 95.0 and "120,064 samples" in line["here"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["distml", "--rows", "99"], "rows 1 to 34"),
        (["distml", "--epochs", "0"], "must be above zero"),
        (["mxnet", "--epochs", "1", "--steps", "3"], "leave out one"),
        (["mxnet", "--strategy", "sync"], "--strategy is for distml"),
        (["distml", "--device", "cuda"], "no CUDA device"),
        (["distml", "--seeds", "3"], "unknown flag '--seeds'"),
        (["dismtl"], "unknown table 'dismtl': did you mean 'distml'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["reproduce", *arguments]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert words in errors[-1] and errors[-1].startswith("paceline: ")
    assert not (tmp_path / "runs").exists()


def test_rows_without_their_data_are_listed_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SYSTEM_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    assert main(["reproduce", "mxnet", "--rows", "cifar10", "--runs", str(tmp_path / "table")]) == 0
    out = capsys.readouterr().out
    assert out.count("cifar10") >= 19 and "paceline data get cifar10" in out
    assert (tmp_path / "table/table.csv").is_file()


def test_what_is_scored_at_the_end_can_be_less() -> None:
    with pytest.raises(UserError, match="score"):
        resolve(RunConfig(score="some"))
    with pytest.raises(UserError, match="add --eval-every"):
        resolve(RunConfig(eval_train=True))


def test_a_folder_of_other_images_is_not_taken_for_the_published_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Location("imagenet", "folder", tmp_path, "data-dir", False)
    (tmp_path / "train/n01440764").mkdir(parents=True)
    monkeypatch.setattr(reproduce_real, "locate_data", lambda config: place)
    assert main(["reproduce", "mxnet", "--rows", "ilsvrc12", "--runs", str(tmp_path / "table")]) == 0
    assert "holds 1 classes of images, and ILSVRC12 has 1,000" in capsys.readouterr().out
