"""Recorded runs whose files are closed when the test ends, however it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that recorded_runs is found in any import mode

from recorded_runs import Record, RecordedRun, small_config

from paceline.runtimes.server.runtime import Runtime


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    runs: list[RecordedRun] = []

    def make(seed: int = 0, runtime: Runtime | None = None, **settings: Any) -> RecordedRun:
        runs.append(RecordedRun(small_config(tmp_path, **settings), seed, runtime=runtime))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
