"""`make demo`, with short runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.commands import GIVING_WAY, PATIENCE, started_by

DEMO = Path(__file__).parents[2] / "examples/demo.py"


def test_the_demo_tells_its_story_and_leaves_no_process(tmp_path: Path) -> None:
    mark = f"PACELINE_DEMO_TEST={tmp_path.name}"
    environment = {**GIVING_WAY, "COLUMNS": "60", **dict([mark.split("=")])}
    words = [sys.executable, str(DEMO), "--epochs", "0.5"]
    ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    for line in (
        "live page while it trains: http://127.0.0.1:",
        "$ kill -9 -- -",
        "Identical: ",
        "Verdict:\n- sync is ",
    ):
        assert line in ran.stdout
    (page,) = tmp_path.glob("runs/demo-*/report.html")
    assert str(page.relative_to(tmp_path)) in ran.stdout
    assert not started_by(mark)
