"""Workers and server killed, stopped and restarted at random, the link cut and healed: nothing is lost or doubled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from chaos import live_through

pytestmark = pytest.mark.real

SETTINGS = ["--dataset", "fashion-mnist-sample", "--steps", "3000", "--threads", "1", "--checkpoint-every", "1"]
EVERYTHING = ["--strategy", "async", "--average", "on", "--codec", "int8", "--score", "test"]


def test_training_survives_misfortune_and_every_push_counts_once(tmp_path: Path) -> None:
    found = live_through(tmp_path, 15.0, workers=2, seed=3, words=[*SETTINGS, *EVERYTHING])
    assert found["exit_code"] == 0, (tmp_path / "output.log").read_text()[-2000:]
    assert (found["status"], found["updates"], found["identical"]) == ("finished", 3000, True)
    assert found["happened"]
    assert set(found["workers_exit_codes"]) <= {0, 1, 2}
    assert found["test_accuracy"] > 75.0
