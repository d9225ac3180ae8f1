"""Every file and every `--json` of a run is strict JSON, even if a figure of the run is a NaN or infinity."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.reports.watch.sources import encode
from paceline.runs.events import EventLog
from paceline.system.strict_json import seal

TASK = """
import torch
import torch.nn.functional as F
import paceline

def build():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    bad = torch.full((8, 4), torch.inf)
    test = bad, torch.zeros(8, dtype=torch.int64)
    metrics = {"ratio": lambda outputs, targets: outputs.sum()}
    return paceline.Task(
        torch.nn.Linear(4, 2), F.cross_entropy, train=(x, (x[:, 0] > 0).long()), test=test, metrics=metrics
    )
"""


def strict(text: str) -> Any:
    """Parse JSON; fail for a NaN or infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_run_with_figures_that_are_not_finite_writes_and_prints_strict_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TASK)
    flags = ["--batch-size", "4", "--epochs", "1", "--eval-every", "0.5", "--threads", "1", "--lr", "0.01"]
    command = ["simulate", "--task", "own.py:build", "--strategy", "async", "--workers", "2", *flags, "--name", "run"]
    assert main([*command, "--json"]) == 0
    result = strict(capsys.readouterr().out)
    assert result["test_loss"] is None and result["test_metrics"] == {"ratio": None} and result["train_loss"] > 0
    assert strict(Path("runs/run/result.json").read_text()) == seal(result)
    rows = [strict(line) for line in Path("runs/run/events.jsonl").read_text().splitlines()]
    assert [row["test_loss"] for row in rows if row["kind"] == "evaluation"] == [None]
    for verb in (["list", "runs", "--json"], ["compare", "runs/run", "--json"], ["status", "runs/run", "--json"]):
        main(verb)
        assert strict(capsys.readouterr().out), verb
    for verb in (["list", "runs"], ["compare", "runs/run"], ["status", "runs/run"]):
        main(verb)
        assert "run" in capsys.readouterr().out, verb
    assert main(["report", "runs/run", "--output", "page.html"]) == 0
    (data,) = re.findall(
        r'<script type="application/json"[^>]*>(.*?)</script>', Path("page.html").read_text(), re.DOTALL
    )
    assert strict(data)


def test_an_event_and_the_feed_of_a_page_hold_null_for_what_is_not_finite(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("reported", 0.0, figures={"loss": float("nan"), "most": [float("inf"), 1.0]})
    log.close()
    assert strict((tmp_path / "events.jsonl").read_text())["figures"] == {"loss": None, "most": [None, 1.0]}
    assert strict(encode({"a": float("-inf")}).decode()) == {"a": None}
