"""The report in a real browser: it draws, and complains about nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from tests.support.made_up_runs import result_of, whole_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: 'apt-get install chromium' brings one")


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page after its script has run, and what it said on the console."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=4000"]
    command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_chromium
@pytest.mark.parametrize("names", [["one"], ["one", "two", "broken"]])
def test_the_page_draws_and_logs_no_error(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        folder = whole_run(tmp_path / "runs", name, end=name != "broken", workers=2 * number + 2)
        if name == "broken":
            folder.events_file.write_bytes(folder.events_file.read_bytes()[:-20])
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(page)]) == 0
    document, console = opened(page, tmp_path / "profile")
    assert console == []
    assert 'data-drawn="true"' in document
    drawn = re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL)
    assert "Finished: 81.50 % test accuracy" in drawn
    titles = re.findall(r"<figcaption><strong>([^<]*)", drawn)
    shown = [
        title
        for title, figure in zip(titles, drawn.split("<figure")[1:], strict=True)
        if "<path" in figure or "<rect" in figure or "<circle" in figure
    ]
    for title in (
        "Loss",
        "Accuracy",
        "Timeline of workers",
        "Throughput",
        "Staleness of pushes",
        "Test accuracy by class",
    ):
        assert title in shown
    if len(names) > 1:
        assert {"Over time", "Over samples", "Scaling"} <= set(shown)
        assert drawn.count('class="badge killed"') == 1
        assert "events.jsonl is cut off after row" in drawn


BOTH = {"weights": "averaged", "live_test_accuracy": 80.0, "live_test_loss": 0.6}


@needs_chromium
@pytest.mark.parametrize(
    ("averaged", "said"),
    [
        (BOTH, "Best is live with 81.50 % test accuracy (live weights, the ones that all runs were scored with) in"),
        (
            {**BOTH, "validation_accuracy": 70.0, "live_validation_accuracy": 79.0},
            "Best is averaged with 79.00 % validation accuracy (live weights, the ones that all runs were scored with)",
        ),
        ({"average": "on"}, "No best run: some were scored on live weights only, others on averaged weights only."),
    ],
    ids=["both", "validation data", "averaged only"],
)
def test_the_best_run_is_chosen_on_one_kind_of_weights(tmp_path: Path, averaged: dict[str, Any], said: str) -> None:
    """The highest figure of all is that of averaged weights."""
    held_out = {"validation_accuracy": 75.0} if "validation_accuracy" in averaged else {}
    for name, more in (("averaged", {"test_accuracy": 85.0, **averaged}), ("live", {"average": "none", **held_out})):
        folder = whole_run(tmp_path / "runs", name)
        folder.write_result(result_of(folder, **more))
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(page)]) == 0
    document, console = opened(page, tmp_path / "profile")
    assert console == []
    drawn = re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL)
    assert said in drawn
    assert drawn.count("test %, live") == 1 and drawn.count("test %, avg") == 1


@needs_chromium
def test_many_runs_have_short_names_a_choice_of_curves_and_one_axis_for_each_data_set(tmp_path: Path) -> None:
    """18 runs on one data set and one on another: four rows are folded away, and most curves are grey."""
    for number in range(18):
        folder = whole_run(tmp_path / "runs", f"study-of-lr-{number:02d}-seed0", lr=0.01 * (number + 1))
        folder.write_result(result_of(folder, test_accuracy=60.0 + number))
    other = whole_run(tmp_path / "runs", "study-of-lr-own-seed0", task="spirals.py:build")
    other.write_result(result_of(other, test_accuracy=99.0))
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(page)]) == 0
    document, console = opened(page, tmp_path / "profile")
    assert console == []
    drawn = re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL)
    assert "Best on fashion-mnist is lr-17 with 77.00 % test accuracy" in drawn
    assert 'title="study-of-lr-17-seed0: async, lenet5 on fashion-mnist"' in drawn
    assert "4 more</button>" in drawn
    headings = re.findall(r'<h3 class="group">([^<]*)', drawn)
    assert headings == ["fashion-mnist: 18 runs", "spirals:build: 1 run"]
    over_time = drawn.split("<strong>Over time</strong>")[1].split("</figure>")[0]
    assert over_time.count('class="line grey"') == 10 and over_time.count('class="line"') == 8
    assert "10 more" in over_time
