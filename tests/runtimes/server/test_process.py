"""The server process of a local run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config import RunConfig
from paceline.runs.folder import RunFolder
from paceline.runtimes.server.process import make_host
from paceline.runtimes.server.service import LocalPeers
from paceline.settings.resolve import resolve
from paceline.tasks.supervised import SupervisedTask


def two_classes() -> SupervisedTask:
    data = torch.arange(200.0).view(200, 1), torch.arange(200) % 2
    return SupervisedTask(nn.Linear(1, 2), nn.functional.cross_entropy, data)


@pytest.mark.parametrize(
    ("split", "rule", "why"), [("iid", "foresight", "data divided evenly"), ("labels", "foresight-fair", "labels ")]
)
def test_the_rule_that_is_announced_for_an_own_task_is_the_one_applied(
    split: str, rule: str, why: str, tmp_path: Path
) -> None:
    task = f"{__name__}:two_classes"
    config = resolve(RunConfig(strategy="async", workers=2, split=split, batch_size=8, task=task, runs=str(tmp_path)))
    rows: list[dict[str, Any]] = []
    host = make_host(config, None, RunFolder.create(config), rows.append, LocalPeers(), {}, resume=False)
    host.close()
    (line,) = (row["text"] for row in rows if row["kind"] == "note" and row["text"].startswith("rule auto: "))
    assert line.startswith(f"rule auto: {rule} (2 workers, {why}")
    assert host.server.rule.name == f"{rule} (step limited) (averaged)"
