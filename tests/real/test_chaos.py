"""Workers and server killed, stopped and restarted at random, the link cut and healed: nothing is lost or doubled.

A minute of it, in two halves that run beside each other.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import is_good, live_through

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

STEPS = 400
SETTINGS = ["--dataset", "fashion-mnist-sample", "--split", "iid", "--steps", str(STEPS), "--batch-size", "64",
            "--threads", "1", "--delay", "70ms", "--checkpoint-every", "2", "--score", "test"]  # fmt: skip
STATES = ["--strategy", "async", "--rule", "foresight", "--average", "on", "--codec", "int8", "--durable"]
ELASTIC = ["--strategy", "async", "--max-workers", "5", "--restart", "100", "--codec", "topk:0.05"]


@pytest.mark.parametrize(("words", "overlap", "seed"), [(STATES, 0, 3), (ELASTIC, 1, 4)], ids=["states", "elastic"])
def test_training_survives_misfortune_and_every_push_counts_once(
    tmp_path: Path, words: list[str], overlap: int, seed: int
) -> None:
    found = live_through(tmp_path, 30.0, 2, seed, [*SETTINGS, *words], overlap)
    assert is_good(found, accuracy=60.0), f"{found} {(tmp_path / 'output.log').read_text()[-2000:]}"
    assert (found["updates"], found["lost_pushes"]) == (STEPS, 0)
    assert found["happened"]
    assert set(found["workers_exit_codes"]) <= {0, 1, 2, None}
