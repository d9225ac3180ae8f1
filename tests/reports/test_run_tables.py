"""Runs as rows and tables: chosen, ordered, as wide as the terminal, and no damage ends the listing."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.analysis.listing import KEYS, choose, runs_in, runs_of
from paceline.assembly.own_loop import decided_by_script
from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.reports.report_data import RunReader
from paceline.reports.run_tables import compare, run_list
from paceline.reports.tables import Column, fit_table
from paceline.runs.events import EventLog
from paceline.runs.folder import RunFolder


def finished(accuracy: float | None, **more: Any) -> dict[str, Any]:
    figures = {"train_seconds": 10.0, "samples_per_second": 1000.0, "train_accuracy": 80.0, "test_loss": 0.5}
    return {
        "status": "finished",
        "staleness": {"mean": 1.0, "max": 3},
        "test_accuracy": accuracy,
        "average": "none",
        **figures,
        **more,
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four runs that differ in strategy and lr, one that goes on, and four that are broken, each in its way."""
    for number, (strategy, lr, accuracy) in enumerate(
        [("sync", 0.1, 80.0), ("async", 0.1, 90.0), ("bounded:3", 0.01, 70.0), ("async", 0.01, None)]
    ):
        config = RunConfig(runs=str(tmp_path), name=f"run{number}", strategy=strategy, lr=lr, workers=2)
        folder = RunFolder.create(config)
        folder.write_result(finished(accuracy, dropped_pushes=number))
        os.utime(folder.config_file, (0, 1000 - number))
    going = RunFolder.create(RunConfig(runs=str(tmp_path), name="going", workers=3))
    with EventLog(going.events_file) as events:
        events.write("progress", 2.0, updates=5, samples=160, fraction=0.25)
    for name, file, text in [
        ("no-toml", "config.toml", "= nonsense"),
        ("a-setting", "config.toml", "lrr = 1\n"),
        ("no-json", "result.json", "{"),
        ("a-list", "result.json", "[]"),
    ]:
        RunFolder.create(RunConfig(runs=str(tmp_path), name=name))
        (tmp_path / name / file).write_text(text)
    return tmp_path


BROKEN = {"no-toml", "a-setting", "no-json", "a-list"}


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["run"] for row in rows if row["run"] not in BROKEN]


def test_every_run_is_listed_and_of_damaged_ones_what_is_wrong(runs: Path) -> None:
    rows = {row["run"]: row for row in runs_in(runs)}
    assert rows.keys() == {"run0", "run1", "run2", "run3", "going", *BROKEN}
    assert {name for name, row in rows.items() if row["status"] == "damaged"} == BROKEN
    problems = {name: rows[name]["problem"] for name in BROKEN}
    assert problems["no-toml"].startswith("config.toml cannot be read as TOML")
    assert "unknown setting 'lrr': did you mean 'lr'" in problems["a-setting"]
    assert problems["no-json"].startswith("result.json cannot be read")
    damage = "result.json cannot be read (it is not an object): the run folder is damaged; remove this file, then "
    assert problems["a-list"].startswith(damage)
    assert rows["run0"]["problem"] is None and rows["run0"]["staleness_max"] == 3
    assert (rows["going"]["status"], rows["going"]["fraction"], rows["going"]["updates"]) == ("killed", 0.25, 5)
    with RunFolder(runs / "going").locked():
        assert {row["run"]: row["status"] for row in runs_in(runs)}["going"] == "running"
    text = run_list(list(rows.values()), 200)
    assert "killed 25 %" in text
    assert all(f"{name}: {problem}" in text.replace("\n", " ") for name, problem in problems.items())


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (["strategy=async"], ["run1", "run3", "going"]),
        (["strategy=bounded:*"], ["run2"]),
        (["strategy!=async", "status=finished"], ["run0", "run2"]),
        (["lr>=0.1"], ["run0", "run1"]),
        (["lr=.10"], ["run0", "run1"]),
        (["lr=none"], ["going"]),
        (["test-accuracy<=80"], ["run0", "run2"]),
        (["shard=iid", "lr=0.01"], ["run2", "run3"]),
        (["nesterov=true"], []),
        (["betas=0.9,0.999", "workers=3"], ["going"]),
    ],
)
def test_runs_are_chosen_by_settings_and_figures(runs: Path, where: list[str], found: list[str]) -> None:
    assert sorted(names(choose(runs_in(runs), where))) == sorted(found)


@pytest.mark.parametrize(
    ("sort", "reverse", "order"),
    [
        ("test_accuracy", False, ["run1", "run0", "run2"]),
        ("test-accuracy", True, ["run2", "run0", "run1"]),
        ("dropped_pushes", False, ["run0", "run1", "run2", "run3"]),
        ("run", False, ["going", "run0", "run1", "run2", "run3"]),
    ],
)
def test_the_best_come_first_and_who_lacks_the_figure_last(
    runs: Path, sort: str, reverse: bool, order: list[str]
) -> None:
    rows = choose(runs_in(runs), [], sort, reverse)
    assert names(rows)[: len(order)] == order
    assert len(rows) == 9


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--where", "strateg=a"], "--where 'strateg=a': unknown field 'strateg': did you mean 'strategy'"),
        (["--where", "strategy"], "--where 'strategy': write FIELD=VALUE, as in strategy=async"),
        (["--where", "lr>much"], "--where 'lr>much': > takes a number, got 'much'"),
        (["--sort", "accuracy"], "--sort: unknown field 'accuracy': did you mean"),
        (["--where", "workers=77"], "none of 9 runs fits --where workers=77: ask for less"),
        (["--json", "--csv"], "not allowed with argument"),
    ],
)
def test_a_wrong_question_is_one_line(
    runs: Path, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(runs), *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_compare_shows_what_differs_and_all_there_is_as_csv_and_json(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(runs / f"run{number}") for number in (1, 0)]
    (runs / "notes.md").write_text("")
    assert main(["compare", *paths, str(runs / "notes.md")]) == 0
    out, error = capsys.readouterr()
    head, first, second, *_ = (line.split() for line in out.splitlines())
    assert head[:2] == ["run", "strategy"] and "lr" not in head and "workers" not in head
    assert "same for all: workers 2, model lenet5, data fashion-mnist," in " ".join(out.split())
    assert (first[0], second[0]) == ("run1", "run0")
    assert f"{runs / 'notes.md'} is not a run folder and contains none: ignored" in error
    assert main(["compare", str(runs), "--csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(lines) == 9 and set(lines[0]) == set(KEYS)
    assert {line["run"]: line["path"] for line in lines}["run0"] == str(runs / "run0")
    assert main(["compare", str(runs), "--json", "--where", "status=damaged"]) == 0
    assert {row["run"] for row in json.loads(capsys.readouterr().out)} == BROKEN


def test_a_folder_is_its_runs_and_none_is_shown_twice(runs: Path) -> None:
    rows, others = runs_of([runs / "run1", runs])
    assert rows[0]["run"] == "run1" and len(rows) == 9 and not others
    with pytest.raises(UserError, match="is not a run folder: it does not exist"):
        runs_of([runs / "run1", runs / "nowhere"])
    (runs / "empty").mkdir()
    with pytest.raises(UserError, match="is not a run folder and contains none"):
        runs_of([runs / "empty"])


def test_runs_that_are_called_alike_are_told_apart_by_their_folders(runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "run0"
    shutil.copytree(runs / "run0", other)
    rows, _ = runs_of([runs / "run0", runs / "run1", other])
    assert [row["run"] for row in rows] == [str(runs / "run0"), "run1", str(other)]


def test_a_folder_of_runs_is_said_to_be_one(runs: Path) -> None:
    with pytest.raises(UserError, match=f"'paceline list {runs}' shows what is there"):
        RunFolder.open(runs)
    with pytest.raises(UserError, match=f"'paceline list {runs}' shows what is there"):
        RunFolder.open(runs / "nowhere")


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_no_line_is_longer_than_the_terminal(runs: Path, width: int) -> None:
    RunFolder.create(RunConfig(runs=str(runs), name="diloco100-inception-28-small-16w-20260101-000000"))
    rows = runs_in(runs)
    for row in rows:
        row["problem"] = "it is broken in a way that takes many words to say" if row["problem"] else None
    for text in (run_list(rows, width), compare(rows, width)):
        assert max(map(len, text.splitlines())) <= width
        assert all(word in text for word in ("status", "finished", "run0"))


def own_run(runs: Path, name: str, metrics: dict[str, float], **settings: Any) -> RunFolder:
    folder = RunFolder.create(RunConfig(runs=str(runs), name=name, workers=2, task="script:train", **settings))
    names = {"task": "script:train", "model": "Net", "dataset": None}
    folder.write_result({"status": "finished", **names, "reported": {"0": metrics}, "weights": "live"})
    return folder


def test_own_runs_show_their_names_and_what_they_reported(tmp_path: Path) -> None:
    own_run(tmp_path, "low", {"accuracy": 80.5, "reward": 3.0}, lr=0.1)
    own_run(tmp_path, "high", {"accuracy": 90.5, "reward": 2.0}, lr=0.2)
    rows = choose(runs_in(tmp_path), [], "accuracy")
    assert [row["run"] for row in rows] == ["high", "low"]
    assert [row["run"] for row in choose(rows, ["accuracy<90"])] == ["low"]
    for text in (run_list(rows, 100), compare(rows, 60)):
        words = " ".join(text.split())
        assert "Net" in words and "own data" in words and "accuracy" in words and "90.5" in words
        assert "fashion-mnist" not in text and "lenet5" not in text
        assert max(map(len, text.splitlines())) <= 100
    assert "highest accuracy: high (90.5)" in compare(rows, 60)


def test_settings_that_a_script_decides_are_not_shown_as_if_they_were_used(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        folder = own_run(tmp_path, name, {"accuracy": 80.5}, lr=0.1, seed=seed)
        facts = {"settings": {"optimizer": "sgd", "lr": 0.1}, "epochs": None}
        decided = decided_by_script(folder.config(), facts)
        assert {"epochs", "momentum", "betas", "schedule"} < set(decided) and "lr" not in decided
        folder.write_result({**(folder.result() or {}), "decided_by_script": decided})
    text = compare(runs_in(tmp_path), 200)
    assert "epochs" not in text and "lr 0.1" in text
    reader = RunReader(folder.path)
    reader.refresh()
    settings = reader.digest()["settings"]
    assert [settings[name] for name in ("epochs", "betas", "device", "optimizer")] == [None, None, None, "sgd"]
    folder.result_file.unlink()
    with EventLog(folder.events_file) as events:
        events.write("run_started", 0.0, workers=2, model="Net", decided_by_script=decided)
    assert runs_in(tmp_path)[0]["epochs"] is None


def test_a_script_that_leaves_the_optimizer_and_the_epochs_to_the_flags_has_them(tmp_path: Path) -> None:
    decided = decided_by_script(own_run(tmp_path, "a", {}).config(), {"settings": {}, "epochs": 2.0})
    assert not {"epochs", "momentum", "schedule", "lr"} & set(decided)


def test_a_metric_is_ordered_by_its_name_or_by_what_is_said_and_never_by_a_guess(tmp_path: Path) -> None:
    own_run(tmp_path, "a", {"val_loss": 1.0, "reward": 3.0})
    own_run(tmp_path, "b", {"val_loss": 2.0, "reward": 5.0})
    rows = runs_in(tmp_path)
    orders = {sort: names(choose(rows, [], sort)) for sort in ("val_loss", "max:reward", "min:reward", "max:val_loss")}
    assert orders == {
        "val_loss": ["a", "b"],
        "max:reward": ["b", "a"],
        "min:reward": ["a", "b"],
        "max:val_loss": ["b", "a"],
    }
    with pytest.raises(UserError, match=r"is a higher or a lower reward better.*write max:reward or min:reward"):
        choose(rows, [], "reward")
    with pytest.raises(UserError, match="write FIELD, min:FIELD or max:FIELD"):
        choose(rows, [], "most:reward")
    text = compare(rows, 100)
    assert "lowest val_loss: a (1)" in text and "est reward" not in text


def test_a_folder_of_an_own_run_from_before_names_were_recorded_is_named_by_its_script(tmp_path: Path) -> None:
    folder = own_run(tmp_path, "old", {})
    folder.write_result({"status": "finished", "task": "script:train", "model": None, "dataset": None})
    (row,) = runs_in(tmp_path)
    assert (row["model"], row["dataset"]) == ("train.py", "own data")
    folder.result_file.unlink()
    assert runs_in(tmp_path)[0]["model"] == "train.py"
    with EventLog(folder.events_file) as events:
        events.write("run_started", 0.0, workers=2, model="Net", dataset="CIFAR10")
        events.write("reported", 1.0, worker=0, figures={"accuracy": 70.0})
    (row,) = runs_in(tmp_path)
    assert (row["model"], row["dataset"], row["metrics"]) == ("Net", "CIFAR10", {"accuracy": 70.0})


def test_runs_of_different_tasks_are_in_separate_tables(runs: Path) -> None:
    own_run(runs, "own", {"accuracy": 90.0})
    rows = [row for row in runs_in(runs) if row["run"] not in BROKEN]
    first, second = compare(rows, 100).split("\n\n")
    assert {first.splitlines()[0], second.splitlines()[0]} == {"fashion-mnist:", "train.py:"}
    tables = {text.splitlines()[0]: text for text in (first, second)}
    assert "run0" not in tables["train.py:"] and "own" not in tables["fashion-mnist:"]


def test_a_task_by_its_file_and_by_its_module_is_one_experiment(tmp_path: Path) -> None:
    """As `python cnn.py` records it, and a program that imports it."""
    for name, task in (("a", "/home/me/cnn.py:build"), ("b", "cnn:build")):
        RunFolder.create(RunConfig(runs=str(tmp_path), name=name, task=task)).write_result(finished(80.0, task=task))
    assert "\n\n" not in compare(runs_in(tmp_path), 200) and "cnn:build" in run_list(runs_in(tmp_path), 200)


def test_a_long_table_is_cut_and_says_how_to_see_the_rest(runs: Path) -> None:
    rows = runs_in(runs)
    for text in (run_list(rows, 80, 4), compare(rows, 80, 4)):
        assert "5 more: --all shows them, --where and --sort choose" in text
    assert "more: --all" not in run_list(rows, 80) + compare(rows, 80)


def test_long_names_are_shortened_as_far_as_they_stay_different(tmp_path: Path) -> None:
    ends = ("0.1_momentum=0.9_nesterov=false_seed=1", "0.2_momentum=0.9_nesterov=false_seed=1")
    for end in ends:
        RunFolder.create(RunConfig(runs=str(tmp_path), name=f"strategy=async_batch_size=32_lr={end}"))
    cells = [line.split()[0] for line in run_list(runs_in(tmp_path), 80).splitlines()[1:3]]
    assert len(set(cells)) == 2 and max(map(len, cells)) <= 32
    assert f"lr={ends[0]} " in run_list(runs_in(tmp_path), 200), "with room, the whole name"


def test_columns_without_room_are_named_and_no_line_is_about_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = RunFolder.create(RunConfig(runs=str(tmp_path), name=name, lr=0.1 if name == "one" else 0.2))
        folder.write_result(finished(80.0, live_train_accuracy=80.0, train_total=100, epoch_samples=200))
    rows = runs_in(tmp_path)
    wide, narrow = compare(rows, 200), compare(rows, 40)
    assert "train % live" in wide and "train %: on 100 of 200 samples" in wide and "left out" not in wide
    assert "train % live" not in narrow.splitlines()[0] and "train %: on" not in narrow
    assert "train % live" in " ".join(narrow[narrow.index("left out: ") :].split())
    assert "left out: changed (a wider terminal shows it)" in run_list(rows, 70)


def test_a_narrow_comparison_keeps_what_was_varied_and_how_fast_it_was(tmp_path: Path) -> None:
    """Of runs that averaged their weights, too: the rule's name is the widest cell."""
    applied = "foresight (step limited) (averaged)"
    for name, lr, threads, rule in (("a", 0.1, 1, "auto"), ("b", 0.2, 2, "auto"), ("c", 0.2, 2, "plain")):
        folder = RunFolder.create(RunConfig(runs=str(tmp_path), name=name, lr=lr, threads=threads, rule=rule))
        more = {"rule_applied": applied if rule == "auto" else rule, "live_test_accuracy": 79.0, "weights": "averaged"}
        folder.write_result(finished(80.0, **more))
    head = compare(choose(runs_in(tmp_path), [], "run"), 80).splitlines()[0].split()
    assert {"lr", "threads", "seconds", "samples/s"} <= set(head)
    assert "auto: foresight " in compare(runs_in(tmp_path), 200) and "step limited" not in compare(
        runs_in(tmp_path), 200
    )


def test_a_narrow_table_keeps_the_scores_of_the_weights_that_were_saved(tmp_path: Path) -> None:
    """Of runs that average and of one that does not: each would have no score without its column."""
    for name, strategy in (("classic-live", "classic"), ("async-averaged", "async"), ("bounded-averaged", "bounded:3")):
        more = {"live_test_accuracy": 73.4, "weights": "averaged"} if strategy != "classic" else {"weights": "live"}
        settings = {"strategy": strategy, "average": "on" if strategy != "classic" else "none"}
        folder = RunFolder.create(RunConfig(runs=str(tmp_path), name=name, **settings))
        folder.write_result(finished(74.9, rule_applied="foresight (step limited)", **more))
    rows = choose(runs_in(tmp_path), [], "run")
    for text in (compare(rows, 60), run_list(rows, 60)):
        head = " ".join(text.splitlines()[0].split())
        assert "test % live" in head and "test % avg" in head and "left out: " in text
    assert "rule auto: foresight," in " ".join(compare(rows[:2], 400).split())


def test_runs_without_an_accuracy_keep_their_loss(tmp_path: Path) -> None:
    for name in ("one", "two"):
        own_run(tmp_path, name, {f"metric{number}": 1.0 for number in range(4)}).write_result(
            {"status": "finished", "task": "script:train", "weights": "live", "test_loss": 0.5, "train_seconds": 1.0}
        )
    assert "test loss live" in compare(runs_in(tmp_path), 44).splitlines()[0]


def test_all_runs_with_the_highest_score_are_named_or_counted(runs: Path) -> None:
    for number in (0, 2):
        RunFolder(runs / f"run{number}").write_result(finished(90.0))
    assert "highest test accuracy, live weights: run0, run1, run2 (90.00)" in compare(runs_in(runs), 200)
    RunFolder(runs / "run3").write_result(finished(90.0))
    assert "run0, run1, run2 and 1 more (90.00)" in compare(runs_in(runs), 200)


def test_only_a_run_that_a_score_has_ended_is_said_to_be_chosen_by_the_test_set(tmp_path: Path) -> None:
    """The best weights of the others are in a file of their own."""
    for name, reason in (("one", None), ("two", "test accuracy reached 90")):
        RunFolder.create(RunConfig(runs=str(tmp_path), name=name)).write_result(
            finished(80.0, chosen_on="test", reason=reason)
        )
    assert "on the test set, which is therefore too good: two" in compare(runs_in(tmp_path), 200)


def test_a_folder_without_runs_advises_another_command_than_the_one_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed(*words: str) -> str:
        assert main(["list", str(tmp_path), *words]) == 0
        return capsys.readouterr().out

    assert listed() == f"there are no runs in {tmp_path}: 'paceline train --runs {tmp_path}' creates one\n"
    RunFolder.create(RunConfig(runs=str(tmp_path), name="one"))
    said = f"none of the runs in {tmp_path} fits --where lr>5: 'paceline list {tmp_path}' shows all\n"
    assert listed("--where", "lr>5") == said


def test_runs_that_were_not_trained_for_real_are_marked(tmp_path: Path) -> None:
    RunFolder.create(RunConfig(runs=str(tmp_path), name="trained"))
    assert "kind" not in run_list(runs_in(tmp_path), 200)
    RunFolder.create(RunConfig(runs=str(tmp_path), name="virtual", speeds="30ms"))
    timed = RunConfig(runs=str(tmp_path), name="timed", speeds="30ms", timing_only=True, parameters="62k")
    RunFolder.create(timed)
    lines = {line.split()[0]: line for line in run_list(runs_in(tmp_path), 200).splitlines()}
    assert "simulated" in lines["virtual"] and "times only" in lines["timed"] and "simulated" not in lines["trained"]
    assert "62k parameters" in lines["timed"] and "lenet5" not in lines["timed"]


def test_a_list_has_the_runs_that_a_report_finds_in_its_subfolders(tmp_path: Path) -> None:
    for below in ("", "sweep", "demo/runs"):
        RunFolder.create(RunConfig(runs=str(tmp_path / below), name="one"))
    subfolders = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert len(runs_in(tmp_path)) == len(runs_of(subfolders)[0]) == 3


def test_the_rule_that_auto_chose_is_shown(tmp_path: Path) -> None:
    for name, rule, applied in (("a", "auto", "foresight"), ("b", "plain", "plain"), ("c", "auto", None)):
        folder = RunFolder.create(RunConfig(runs=str(tmp_path), name=name, rule=rule))
        folder.write_result(finished(80.0, rule_applied=applied))
    text = compare(choose(runs_in(tmp_path), [], "run"), 120)
    assert "auto: foresight" in text and "scored weights live" in text


def test_a_narrow_column_takes_the_room_that_a_wider_one_leaves() -> None:
    columns = [Column("run", 0), Column("a very wide heading", 3), Column("loss", 2), Column("%", 1)]
    assert fit_table(columns, [["a", "-1", "0.5", "9"]], 14).splitlines()[0].split() == ["run", "loss", "%"]


CELLS = st.text("abc", max_size=12)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4), st.integers(20, 60))
def test_a_table_fits_and_keeps_its_lines(rows: list[tuple[str, str, str]], width: int) -> None:
    text = fit_table([Column("name", 0), Column("one", 1), Column("two", 2)], rows, width)
    assert len(text.split("\n")) == len(rows) + 1
    assert max(map(len, text.split("\n"))) <= width


def test_the_tables_of_other_verbs_lose_columns_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.data.download import status
    from paceline.reports.tables import data_table
    from paceline.studies.scaling_table import DROP_ORDER, HEAD

    monkeypatch.delenv("PACELINE_DATA", raising=False)
    whole, narrow = (data_table(status(None), width) for width in (200, 40))
    assert whole.split("\n")[0].split() == ["data", "set", "train", "test", "found"]
    assert narrow.split("\n")[0].split() == ["data", "set", "found"]
    assert set(DROP_ORDER) < set(HEAD)


def test_regressions_have_their_loss_in_every_table_and_the_lowest_is_named(tmp_path: Path) -> None:
    """All three average their weights: the score of the saved ones is kept on a narrow terminal."""
    for name, loss, live in (("a", 0.5, 0.4), ("b", 0.25, 0.3), ("c", 0.75, 0.8)):
        scores = {"test_loss": loss, "live_test_loss": live, "weights": "averaged", "train_accuracy": None}
        settings = {"task": "fit.py:build", "lr": 0.1 if name == "a" else 0.2, "average": "on"}
        RunFolder.create(RunConfig(runs=str(tmp_path), name=name, **settings)).write_result(finished(None, **scores))
    rows = choose(runs_in(tmp_path), [], "run")
    assert "lowest test loss, averaged weights: b (0.2500)" in compare(rows, 200)
    assert "test loss avg" in compare(rows, 60).splitlines()[0]
    listed = run_list(rows, 80).splitlines()
    assert "test loss avg" in listed[0] and "test %" not in listed[0] and "0.2500" in listed[2]
