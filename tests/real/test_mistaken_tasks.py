"""A mistake in an own task is the same UserError under every strategy, wherever it is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from tests.support import mistaken_tasks

pytestmark = pytest.mark.real

CASES = {
    mistaken_tasks.not_scalar: "the loss returned a tensor of shape [32]: return one number, the mean over the batch "
    "(reduction='mean')",
    mistaken_tasks.uneven: "train data: 64 inputs but 9 targets; give one target per input",
    mistaken_tasks.nothing: "task 'tests.support.mistaken_tasks:nothing': nothing() returned NoneType, not a "
    "paceline.Task",
}


@pytest.mark.parametrize("strategy", ["classic", "sync", "async", "allreduce", "local:4"])
def test_every_strategy_says_the_same(strategy: str, tmp_path: Path) -> None:
    cases: Any = (
        CASES if strategy in ("classic", "async") else {mistaken_tasks.not_scalar: CASES[mistaken_tasks.not_scalar]}
    )
    for build, message in cases.items():
        with pytest.raises(paceline.UserError) as caught:
            paceline.train(build, strategy=strategy, runs=tmp_path, quiet=True)
        assert str(caught.value) == message
