"""The server of `paceline run` chooses its rule by what the scripts' first messages say of the labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.assembly.own_loop import announce_loop
from paceline.config import RunConfig
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Join
from paceline.core.own_loop.settings import LoopLayout
from paceline.interfaces import pack
from paceline.runs.folder import RunFolder
from paceline.runtimes.scripts.optimizer import AdoptedOptimizer, settings_of
from paceline.runtimes.scripts.serving.server import learn
from paceline.settings.resolve import resolve
from paceline.transports.protocol import Hello
from tests.support.own_loops import first_facts

LAYOUT = pack([("a", (3,), True)])


def hello(skew: float, **facts: Any) -> Hello:
    memory = WorkerBuffers.private(BufferSizes(LAYOUT.size))
    return Hello(Join(0, 0, None), memory, first_facts(LAYOUT, skew=skew, **facts))


@pytest.mark.parametrize(
    ("split", "skew", "rule"),
    [("iid", 0.0, "foresight"), ("full", 0.0, "foresight"), ("labels", 0.8, "foresight-fair")],
)
def test_the_rule_of_an_own_loop_depends_on_how_its_labels_are_split(
    split: str, skew: float, rule: str, tmp_path: Path
) -> None:
    config = resolve(RunConfig(strategy="async", workers=2, split=split, task="script:own"))
    _, _, server = learn(config, [hello(skew)] * 2, RunFolder(tmp_path))
    limited = "step limited" if rule.startswith("foresight") else "lr scaled"
    assert server.rule.name == f"{rule} ({limited})"


@pytest.mark.parametrize(
    ("kind", "options", "skew", "rule"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, 0.0, "foresight"),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, 0.8, "foresight-fair"),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 0.0, "ahead"),
        (torch.optim.SGD, {"dampening": 0.1}, 0.0, "ahead"),
        (torch.optim.AdamW, {}, 0.0, "ahead"),
        (torch.optim.AdamW, {}, 0.8, "cached"),
    ],
)
def test_only_sgd_with_classical_momentum_is_replaced(
    kind: Any, options: dict[str, Any], skew: float, rule: str, tmp_path: Path
) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(3))], lr=0.1, **options)
    adopted = AdoptedOptimizer(optimizer, 0)
    one = {
        "class": adopted.description,
        "settings": settings_of(optimizer),
        "loop": LoopLayout(0, tuple(adopted.numbers), ((0,),)).to_facts(),
    }
    facts = {"optimizers": [json.loads(json.dumps(one))], "settings": settings_of(optimizer)}
    split = "labels" if skew else "iid"
    config = resolve(RunConfig(strategy="async", workers=2, split=split, task="script:own"))
    resolved, _, server = learn(config, [hello(skew, **facts)] * 2, RunFolder(tmp_path))
    limited = "step limited" if rule.startswith("foresight") else "lr scaled"
    assert server.rule.name == f"{rule} ({limited})" and resolved.lr == 0.1
    assert server.own_loops.targets and server.training.lr(0, 0) == 1.0, "the loops bring the learning rate"
    notes: list[str] = []
    announce_loop(resolved, {**first_facts(LAYOUT, skew=skew), **facts}, lambda row: notes.append(row["text"]))
    assert len(notes) == 1 and notes[0].startswith(f"rule auto: {rule} (")


def test_a_strategy_that_needs_no_server_elsewhere_says_that_it_has_one_in_own_loops() -> None:
    notes: list[str] = []
    for strategy in ("allreduce", "local:2", "sync"):
        config = resolve(RunConfig(strategy=strategy, workers=2, task="script:own"))
        announce_loop(config, first_facts(LAYOUT), lambda row: notes.append(row["text"]))
    served = [note for note in notes if "a server" in note]
    assert [note.split()[0] for note in served] == ["allreduce", "local:2"]
    assert not any("samples" in note for note in notes), "a loop without a loader knows none"
