"""`paceline bench scaling` on real processes: a table of both counts."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.support.commands import Command


def test_one_and_two_workers(tmp_path: Path) -> None:
    flags = ["--dataset", "fashion-mnist-sample", "--strategy", "sync", "--workers", "1,2", "--steps", "15", "--json"]
    with Command("bench", "scaling", *flags, cwd=tmp_path) as command:
        assert command.finish() == 0, command.err
        found = json.loads(command.out)
    assert [row["workers"] for row in found["counts"]] == [1, 2]
    for row in found["counts"]:
        assert row["samples_per_second"] > 0
        assert row["compute"] + row["exchange"] + row["wait"] == pytest.approx(1.0, abs=0.01)
    folder = tmp_path / "runs/scaling-weak-sync-lenet5"
    assert len(list(csv.DictReader((folder / "table.csv").read_text().splitlines()))) == 2
    assert 'strategy = "sync"' in (folder / "2-workers-1/config.toml").read_text()
