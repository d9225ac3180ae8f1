"""A run served elsewhere, watched: under its own name, said to be out of reach while it is, and back when it is."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.errors import RunFailed
from paceline.reports.watch import sources as served_run
from paceline.reports.watch import sources as watched
from paceline.reports.watch.mirror import Mirror
from paceline.reports.watch.sources import RemoteRun
from paceline.runs.folder import RunFolder
from tests.support.made_up_runs import log_events, progress, result_of, whole_run


class Copy:
    """As a mirror behaves: locked while the server answers."""

    address, run = "10.0.0.1:29500", "runs/far"

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.reachable = folder, True
        self.asked = 0
        self._held = contextlib.ExitStack()

    def refresh(self) -> bool:
        self.asked += 1
        if not self.reachable:
            self._held.close()
            raise RunFailed("10.0.0.1:29500 answers no more")
        if not self.folder.is_locked():
            self._held.enter_context(self.folder.locked())
        return True


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    monkeypatch.setattr(watched, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(served_run, "RETRY_SECONDS", 0.0)
    return Copy(whole_run(tmp_path, "copy", end=False))


def look(run: RemoteRun) -> dict[str, Any]:
    (found,) = run.poll().values()
    assert found is not None
    return found


def test_it_goes_by_its_own_name(copy: Copy, tmp_path: Path) -> None:
    run = RemoteRun(cast(Mirror, copy))
    found = look(run)
    assert (found["id"], found["name"], found["status"]) == ("runs/far at 10.0.0.1:29500", "far", "running")
    assert str(tmp_path / "copy") not in json.dumps(found)
    (snapshot,) = run.run_snapshots()
    assert (snapshot.status.run, snapshot.status.status) == (run.title, "running")


def test_a_server_that_is_gone_and_back(copy: Copy) -> None:
    run = RemoteRun(cast(Mirror, copy))
    look(run)
    copy.reachable = False
    lost = look(run)
    assert (lost["status"], lost["going_on"]) == ("unreachable", False)
    assert lost["notes"] == ["10.0.0.1:29500 answers no more"] and lost["figures"]["samples"] == 1280
    assert run.run_snapshots()[0].status.status == "unreachable"
    copy.reachable = True
    log_events(copy.folder, progress(5.0, 1600, 0.6))
    back = look(run)
    assert (back["status"], back["notes"], back["figures"]["samples"]) == ("running", [], 1600)


def test_a_run_that_has_ended_is_not_missed(copy: Copy) -> None:
    run = RemoteRun(cast(Mirror, copy))
    look(run)
    copy.folder.write_result(result_of(copy.folder))
    copy.reachable = False
    assert (look(run)["status"], run.run_snapshots()[0].status.status) == ("finished", "finished")


def test_a_server_that_is_gone_is_not_asked_all_the_time(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_run, "RETRY_SECONDS", 3600.0)
    run = RemoteRun(cast(Mirror, copy))
    copy.reachable = False
    asked = copy.asked
    for _ in range(5):
        run.poll()
        run.run_snapshots()
    assert copy.asked == asked + 1
