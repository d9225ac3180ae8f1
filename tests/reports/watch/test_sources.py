"""Runs that are followed: what is new is told once, folders come and go, and nobody looks while nobody watches."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.status import RunSnapshot
from paceline.errors import UserError
from paceline.reports.watch import sources as watched
from paceline.reports.watch.prometheus import exposition
from paceline.reports.watch.sources import FOLDER_REMOVED, FolderSource, RunFollower
from tests.support.made_up_runs import log_events, make_folder, progress, result_of, started, whole_run
from tests.support.waiting import until

PATIENCE = 30.0


class Counting:
    """A source whose look number N brings a digest that says N."""

    title, one = "counting", True

    def __init__(self) -> None:
        self.looks = 0

    def poll(self) -> dict[str, dict[str, Any] | None]:
        self.looks += 1
        return {"runs/a": {"look": self.looks}}

    def run_snapshots(self) -> list[RunSnapshot]:
        return []


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look looks everywhere."""
    monkeypatch.setattr(watched, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(watched, "SCAN_SECONDS", 0.0)


def test_a_growing_run_is_told_of_when_it_grows(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    source = FolderSource(folder.path)
    (first,) = source.poll().values()
    assert first is not None and first["status"] == "killed"
    assert source.poll() == {}
    with folder.locked():
        log_events(folder, started(), progress(1.0, 320, 0.25))
        (running,) = source.poll().values()
        assert running is not None and running["going_on"] and running["figures"]["samples"] == 320
        with folder.events_file.open("ab") as file:
            file.write(b'{"kind": "progress", "now": 2.0, "upd')
        assert [digest["figures"]["samples"] for digest in source.poll().values() if digest] == [320]
    folder.write_result(result_of(folder))
    (ended,) = source.poll().values()
    assert ended is not None and ended["status"] == "finished" and not ended["going_on"]
    assert source.poll() == {}


def test_a_removed_run_is_kept_as_last_seen_and_one_that_comes_back_is_read_anew(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    source = FolderSource(folder.path)
    source.poll()
    shutil.rmtree(folder.path)
    (gone,) = source.poll().values()
    assert gone is not None and gone["notes"] == [FOLDER_REMOVED] and gone["figures"]["samples"] == 1280
    assert source.poll() == {} and source.run_snapshots() == []
    make_folder(tmp_path)
    (back,) = source.poll().values()
    assert back is not None and back["figures"]["samples"] is None


def test_a_run_removed_while_it_went_on_is_not_going_on(tmp_path: Path) -> None:
    folder = whole_run(tmp_path, end=False)
    source = FolderSource(folder.path)
    with folder.locked():
        source.poll()
        shutil.rmtree(folder.path)
        (gone,) = source.poll().values()
    assert gone is not None and (gone["status"], gone["going_on"]) == ("removed", False)


def test_new_runs_of_a_folder_are_found_and_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "MAX_RUNS", 2)
    for number, name in enumerate(("old", "middle")):
        folder = whole_run(tmp_path, name)
        os.utime(folder.config_file, (number, number))
        os.utime(folder.events_file, (number, number))
    source = FolderSource(tmp_path)
    assert [Path(run).name for run in source.poll()] == ["middle", "old"]
    whole_run(tmp_path / "sweep", "new")
    found = source.poll()
    assert {Path(run).name: digest is not None for run, digest in found.items()} == {"new": True, "old": False}
    assert [Path(snapshot.status.run).name for snapshot in source.run_snapshots()] == ["new", "middle"]


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    whole_run(tmp_path, "good")
    whole_run(tmp_path, "bad").config_file.write_text("schema = [")
    source = FolderSource(tmp_path)
    assert {Path(run).name for run in source.poll()} == {"good", "bad"}
    found = {Path(status.run).name: status for status, _ in source.run_snapshots()}
    assert {name: status.status for name, status in found.items()} == {"good": "finished", "bad": "damaged"}
    assert "cannot be read as TOML" in str(found["bad"].reason)
    assert 'status="damaged"} 1.0' in exposition(list(found.values()))


@pytest.mark.parametrize("make", [False, True])
def test_what_is_no_run_is_refused(tmp_path: Path, make: bool) -> None:
    path = tmp_path / "somewhere"
    if make:
        path.mkdir()
    with pytest.raises(UserError, match="is not a run folder and contains none" if make else "does not exist"):
        FolderSource(path)


def test_nobody_looks_while_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "MAX_POLL_SECONDS", 0.001)
    source, threads = Counting(), threading.active_count()
    follower = RunFollower(source)
    assert follower.after(0, 0.02) is None and source.looks == 0
    with follower.watched():
        number, found = follower.after(0, PATIENCE) or (0, b"[]")
        assert json.loads(found) == [{"look": number}]
        later = follower.after(number, PATIENCE)
        assert later is not None and later[0] > number
    follower.close()
    until(lambda: threading.active_count() == threads, "the end of the thread that looks")
    assert follower.after(0, PATIENCE) is None


def test_only_what_changed_since_is_handed_out() -> None:
    class Two(Counting):
        def poll(self) -> dict[str, dict[str, Any] | None]:
            self.looks += 1
            return [{"a": {"a": 1}, "b": {"b": 1}}, {"b": {"b": 2}}, {"a": None}][self.looks - 1]

    follower = RunFollower(Two())
    follower.poll()
    assert follower.now() == (1, b'[{"a":1},{"b":1}]')
    follower.poll()
    assert follower.after(1, 0.0) == (2, b'[{"b":2}]')
    follower.poll()
    assert follower.now() == (3, b'[{"b":2}]')
    follower.close()
