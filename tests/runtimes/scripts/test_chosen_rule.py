"""The server of `paceline run` chooses its rule by what the scripts' first messages say of the labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import RunConfig
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Join
from paceline.interfaces import pack
from paceline.runs.folder import RunFolder
from paceline.runtimes.scripts.server import learn
from paceline.settings.resolve import resolve
from paceline.transports.protocol import Hello

LAYOUT = pack([("a", (3,), True)])


def hello(skew: float) -> Hello:
    facts = {
        "layout": LAYOUT.to_rows(),
        "state_layout": [],
        "num_samples": 100,
        "quota_samples": 50,
        "order": None,
        "skew": skew,
        "batch_size": 10,
        "settings": {},
        "sources": None,
    }
    return Hello(Join(0, 0, None), WorkerBuffers.private(BufferSizes(LAYOUT.size)), facts)


@pytest.mark.parametrize(
    ("split", "skew", "rule"),
    [("iid", 0.0, "foresight"), ("full", 0.0, "foresight"), ("labels", 0.8, "foresight-fair")],
)
def test_the_rule_of_an_own_loop_depends_on_how_its_labels_are_split(
    split: str, skew: float, rule: str, tmp_path: Path
) -> None:
    config = resolve(RunConfig(strategy="async", workers=2, split=split, task="script:own"))
    _, _, server = learn(config, [hello(skew)] * 2, RunFolder(tmp_path))
    assert server.rule.name == f"{rule} (lr scaled)"
