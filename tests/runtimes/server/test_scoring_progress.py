"""Progress of scoring: nothing in the first second, then at most four rows a second, with the time left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.runtimes.server.evaluation import REPORT_SECONDS, ScoringPass, ScoringProgress

DATA = torch.zeros(10_000, 1), torch.zeros(10_000)


def rows_of(seconds_per_batch: float, num_batches: int) -> list[dict[str, Any]]:
    """What is reported while this many batches of 100 samples are scored."""
    rows: list[dict[str, Any]] = []
    now = [0.0]
    progress = ScoringProgress(rows.append, 100 * num_batches, lambda: now[0])
    progress.begin(ScoringPass("train", False, DATA, None))
    now[0] += 0.5  # running statistics are estimated before the first batch
    for _ in range(num_batches):
        now[0] += seconds_per_batch
        progress.add(100)
    return rows


def test_quick_scoring_is_silent() -> None:
    assert rows_of(0.004, 100) == []


def test_long_scoring_tells_its_share_and_the_time_left() -> None:
    rows = rows_of(0.1, 100)
    assert rows[0]["kind"] == "scoring" and rows[0]["text"] == "scoring the train data"
    assert len(rows) <= 10.5 / REPORT_SECONDS
    for row in rows:
        assert row["seconds_left"] == pytest.approx(10.0 * (1.0 - row["fraction"]), abs=0.06)


def test_the_weights_of_a_pass_are_named_if_they_are_not_the_published_ones() -> None:
    rows: list[dict[str, Any]] = []
    times = iter([0.0, 1.0, 2.0])
    progress = ScoringProgress(rows.append, 400, lambda: next(times))
    progress.begin(ScoringPass("test", True, DATA, None))
    progress.add(100)
    progress.add(100)
    assert [row["text"] for row in rows] == ["scoring the test data with the live weights"]
