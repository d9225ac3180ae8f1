"""Trackers beside a run: each in a process of its own, and none of them can hurt it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.tracking import process as beside

BROKEN = """
import os, time
class Broken:
    def started(self, settings, folder): raise OSError("no network")
    def row(self, kind, fields): ...
    def finished(self, result): ...
class Stuck(Broken):
    def started(self, settings, folder): time.sleep(600)
class Gone(Broken):
    def started(self, settings, folder): os._exit(7)
"""


@pytest.mark.real
def test_trackers_that_fail_or_hang_are_told_of_and_the_run_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "FINISH_SECONDS", 1.5)
    own = tmp_path / "own.py"
    own.write_text(BROKEN)
    names = ["csv", f"{own}:Broken", f"{own}:Stuck", f"{own}:Gone"]
    tracks = [word for name in names for word in ("--track", name)]
    simulated = ["simulate", "--timing-only", "--steps", "400", "--workers", "3", "--runs", str(tmp_path)]
    assert main([*simulated, *tracks, "--name", "it"]) == 0
    said = capsys.readouterr().err
    assert (
        f"tracker {own}:Broken failed after 0 rows of {tmp_path / 'it'}: OSError: no network (own.py, line 4)" in said
    )
    assert f"tracker {own}:Stuck did not finish within 1.5 s of the run's end: killed" in said
    assert f"exited with code 7; the run is not affected; 'paceline export {tmp_path / 'it'} --to {own}" in said
    assert main([*simulated, "--name", "alone"]) == 0
    assert (tmp_path / "it/events.jsonl").read_bytes() == (tmp_path / "alone/events.jsonl").read_bytes()
    live = (tmp_path / "it/metrics.csv").read_bytes()
    assert live.count(b"\n") > 50
    assert main(["export", str(tmp_path / "it"), "--to", "csv"]) == 0
    assert (tmp_path / "it/metrics.csv").read_bytes() == live
    assert not (tmp_path / "it/track-csv.log").exists()
