"""A tracker is told of a whole run, in order, whoever is slow, late or broken."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import RunFailed, UserError
from paceline.runs.events import EventLog, EventReader, read_events
from paceline.runs.folder import RunFolder
from paceline.settings.imports import TRACKERS, check_tracker
from paceline.tracking import feed as feeding
from paceline.tracking.feed import feed
from paceline.tracking.registry import make_tracker
from paceline.tracking.tracker import scalars

ROWS: list[dict[str, Any]] = [
    {"kind": "run_started", "now": 0.0, "workers": 2, "strategy": "async", "updates": 0},
    {"kind": "worker_joined", "now": 0.0, "worker": 1, "incarnation": 0, "threads": 1},
    {"kind": "progress", "now": 1.0, "updates": 10, "samples": 320, "loss": 2.25, "rate": 320.0, "staleness": 1.0},
    {"kind": "workers", "now": 1.5, "computing": [3.0, 1.0], "waiting": [0.0, 4.0], "state": ["live", "held"]},
    {"kind": "evaluation", "now": 2.0, "updates": 20, "samples": 640, "test_accuracy": 50.0, "test_loss": 1.5},
    {"kind": "worker_lost", "now": 2.5, "worker": 0, "pushes": 12, "live": 1},
]
RESULT = {"status": "finished", "updates": 24, "samples": 768, "train_seconds": 3.0, "test_accuracy": 55.0, "lr": 0.1}


class Kept:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def started(self, settings: dict[str, Any], folder: Path) -> None:
        self.heard.append(("started", settings["strategy"], folder.name))

    def row(self, kind: str, fields: dict[str, Any]) -> None:
        self.heard.append((kind, fields))

    def finished(self, result: dict[str, Any] | None) -> None:
        self.heard.append(("finished", result))


def write(folder: RunFolder, rows: list[dict[str, Any]]) -> None:
    with EventLog(folder.events_file) as events:
        for row in rows:
            events.write(**row)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(RunConfig(runs=str(tmp_path), name="run", workers=2))
    write(made, ROWS)
    made.write_result(RESULT)
    return made


def test_all_rows_come_in_order_and_say_when_they_were(folder: RunFolder) -> None:
    kept = Kept()
    assert feed(folder, "kept", kept) == len(ROWS)
    assert kept.heard[0] == ("started", "async", "run")
    assert [kind for kind, _ in kept.heard[1:-1]] == [row["kind"] for row in ROWS]
    for (_, fields), row in zip(kept.heard[1:-1], ROWS, strict=True):
        assert {**fields, "kind": row["kind"]} == {**fields, **row}
    lost = kept.heard[-2][1]
    assert (lost["updates"], lost["samples"], lost["now"]) == (20, 640, 2.5)
    assert kept.heard[-1] == ("finished", RESULT)


def test_a_run_that_goes_on_is_followed_to_its_end(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come while it looks, one of them in two halves, are told once each, and the result after them all."""
    late: dict[str, Any] = {"kind": "progress", "now": 3.0, "updates": 24, "samples": 768, "loss": 1.0}
    with EventLog(folder.path / "late.jsonl") as log:
        log.write(**late)
    halves = [(line := (folder.path / "late.jsonl").read_text())[:9], line[9:]]
    monkeypatch.setattr(feeding, "POLL_SECONDS", 0.0)
    kept = Kept()

    def goes_on() -> bool:
        if halves:
            with folder.events_file.open("a") as file:
                file.write(halves.pop(0))
            return True
        return False

    assert feed(folder, "kept", kept, goes_on) == len(ROWS) + 1
    assert kept.heard[-2] == ("progress", {name: value for name, value in late.items() if name != "kind"})
    assert kept.heard[-1][0] == "finished"


def test_a_run_that_was_killed_has_no_result_and_its_torn_row_is_passed_over(folder: RunFolder) -> None:
    folder.result_file.unlink()
    with folder.events_file.open("a") as file:
        file.write('{"kind": "prog')
    kept = Kept()
    assert feed(folder, "kept", kept) == len(ROWS)
    assert kept.heard[-1] == ("finished", None)


def test_a_run_without_events_is_told_by_its_result(folder: RunFolder) -> None:
    folder.events_file.unlink()
    kept = Kept()
    assert feed(folder, "kept", kept) == 0
    assert [what for what, *_ in kept.heard] == ["started", "finished"]


def test_the_reader_gives_what_the_file_holds_whatever_the_size_of_its_bites(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(read_events(folder.events_file))
    for nbytes in (1, 7, 64, 10_000):
        monkeypatch.setattr("paceline.runs.events.CHUNK_BYTES", nbytes)
        assert list(EventReader(folder.events_file).read()) == whole


def test_what_a_tracker_raises_is_one_line_with_its_place(folder: RunFolder) -> None:
    class Broken(Kept):
        def row(self, kind: str, fields: dict[str, Any]) -> None:
            if kind == "evaluation":
                raise ValueError("two\nlines")

    with pytest.raises(RunFailed, match=r"tracker x failed after 4 rows of .*run: ValueError: two lines \(test_feed"):
        feed(folder, "x", Broken())


def test_numbers_are_what_was_measured() -> None:
    by_kind = {row["kind"]: scalars(row["kind"], {name: row[name] for name in row if name != "kind"}) for row in ROWS}
    assert by_kind["progress"] == {"progress/loss": 2.25, "progress/rate": 320.0, "progress/staleness": 1.0}
    assert by_kind["workers"] == {"workers/computing": 0.5, "workers/waiting": 0.5}
    assert by_kind["worker_lost"] == by_kind["run_started"] == {}


def test_csv_has_a_line_for_each_figure(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # told again, it is written anew
        assert main(["export", str(folder.path), "--to", "csv"]) == 0
    assert f"{folder.path}: {len(ROWS)} rows to csv" in capsys.readouterr().out
    with (folder.path / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["kind"] for line in lines] == ["progress", "evaluation"]
    assert (lines[0]["loss"], lines[0]["test_loss"], lines[1]["test_accuracy"]) == ("2.25", "", "50.0")


OWN = """
class Mine:
    def started(self, settings, folder):
        self.file = open(folder / "mine.txt", "w")
    def row(self, kind, fields):
        print(kind, fields["updates"], file=self.file)
    def finished(self, result):
        print(result["status"], file=self.file)
        self.file.close()
class Half:
    def started(self, settings, folder): ...
def broken():
    raise KeyError("gone")
"""


def test_a_tracker_of_ones_own_in_ten_lines(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tracker_of_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    assert main(["export", str(folder.path), "--to", "own_tracker_of_test:Mine"]) == 0
    *lines, last = (folder.path / "mine.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == [row["kind"] for row in ROWS]
    assert (lines[2], lines[3], last) == ("progress 10", "workers 10", "finished")
    with pytest.raises(UserError, match="creates a Half without row and finished: define started"):
        make_tracker("own_tracker_of_test:Half")
    with pytest.raises(UserError, match=r"tracker 'own_tracker_of_test:broken' cannot be built: KeyError: 'gone'"):
        make_tracker("own_tracker_of_test:broken")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("tensorbord", "unknown tracker 'tensorbord': did you mean 'tensorboard'"),
        ("nowhere_at_all:Mine", "tracker 'nowhere_at_all:Mine': no module 'nowhere_at_all'; run from its folder"),
        ("missing.py:Mine", "tracker file missing.py does not exist"),
        ("missing.py:", "tracker 'missing.py:': write MODULE:CLASS or FILE.py:CLASS"),
    ],
)
def test_a_tracker_that_is_not_there_is_said_before_anything_starts(
    name: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--timing-only", "--track", name, "--runs", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", [name for name, found in TRACKERS.items() if found.needs is not None])
def test_a_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.settings.imports.is_installed", lambda module: False)
    with pytest.raises(
        UserError, match=f"tracker {name} needs the package {TRACKERS[name].needs}, which is not installed: pip "
    ):
        check_tracker(name)


def test_export_of_several_runs_and_bad_requests(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    other = RunFolder.create(RunConfig(runs=str(folder.path.parent), name="other"))
    assert main(["export", str(folder.path.parent), "--to", "csv"]) == 0
    assert (folder.path / "metrics.csv").is_file() and (other.path / "metrics.csv").is_file()
    assert main(["export", str(folder.path), str(other.path), "--to", "csv", "--follow"]) == 2
    assert "--follow takes one run at a time, got 2" in capsys.readouterr().err
    assert main(["export", "nowhere", "--to", "csv"]) == 2
    assert "nowhere is not a run folder: it does not exist" in capsys.readouterr().err
    other.result_file.write_text("{")
    other.config_file.write_text("{")
    assert main(["export", str(other.path), "--to", "csv"]) == 2
    assert capsys.readouterr().err.count(str(other.path)) == 1
    assert main(["export", str(folder.path)]) == 2
    assert "--to" in capsys.readouterr().err
