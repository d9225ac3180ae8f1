"""Names to objects, and every combination that makes no sense refused before anything starts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline.assembly.core import make_policy, make_rule, make_training
from paceline.assembly.work import divide_work
from paceline.config import RunConfig
from paceline.core.optimizers import Adam, Sgd
from paceline.core.policies import Async, Barrier, DropStale, StaleSynchronous
from paceline.core.rules.averaged import Averaged
from paceline.core.rules.buffered import Delayed, OuterMomentum
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule
from paceline.errors import UserError
from paceline.interfaces import Arrival, pack
from paceline.settings.features import Feature
from paceline.settings.resolve import AUTO_WARMUP, lr_scale, resolve, schedule_of
from paceline.settings.rules import RULES, average_in_words, rows_nbytes
from paceline.settings.strategies import STRATEGIES, PushContent, Topology, Waiting, strategy_of, why_not

LABELS = np.arange(100) % 10


def refused(**settings: Any) -> str:
    """The message a config is refused with, by its names alone or when the data is divided."""
    with pytest.raises(UserError) as error:
        divide_work(LABELS, resolve(RunConfig(**settings)))
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"workers": 0}, ["--workers", "at least 1"]),
        ({"workers": 11, "batch_size": 10}, ["--workers 11", "10 batches", "at most 10"]),
        ({"lr": 0.0}, ["--lr", "positive"]),
        ({"lr": -1.0}, ["--lr", "positive"]),
        ({"lr": float("nan")}, ["--lr", "positive"]),
        ({"workers": 2, "batch_size": 51, "split": "iid"}, ["batch", "51", "50 samples"]),
        ({"workers": 8, "batch_size": 1, "split": "dirichlet:0.00001"}, ["dirichlet", "leaves worker", "with none"]),
        ({"strategy": "bounded:-1"}, ["bounded:-1", "at least 0"]),
        ({"strategy": "bounded"}, ["bounded:S"]),
        ({"strategy": "bounded:"}, ["bounded:", "whole number"]),
        ({"strategy": "bounded:x"}, ["bounded:x", "whole number"]),
        ({"strategy": "backup"}, ["backup:B"]),
        ({"strategy": "backup:0", "workers": 2}, ["backup:0", "at least 1"]),
        ({"strategy": "backup:2", "workers": 2}, ["backup:2", "no worker to wait for"]),
        ({"strategy": "sync:2"}, ["sync:2", "write sync"]),
        ({"strategy": "classic", "workers": 2}, ["strategy classic is one worker", "--workers 2"]),
        ({"target_accuracy": 90.0}, ["--target-accuracy", "--eval-every"]),
        ({"steps": 5, "epoch_mode": "own"}, ["--steps", "--epoch-mode own"]),
        ({"nesterov": True, "momentum": 0.0}, ["--nesterov", "momentum"]),
        ({"scale_lr": "much"}, ["--scale-lr 'much'"]),
        ({"scale_lr": "-1"}, ["--scale-lr '-1'"]),
        ({"scale_lr": "nan"}, ["--scale-lr 'nan'"]),
        ({"schedule": "cosine:2"}, ["cosine:2", "only exponential"]),
        ({"schedule": "exponential:0"}, ["exponential:0"]),
        ({"schedule": "exponential:nan"}, ["exponential:nan"]),
        ({"delay": ["30"]}, ["--delay '30'"]),
        ({"split": "dirichlet:0"}, ["dirichlet:0", "positive number"]),
        ({"split": "iid:2"}, ["iid:2"]),
        ({"shard_weights": [1.0], "workers": 2}, ["1 weights", "2 workers"]),
        ({"rule": "buffered:0"}, ["buffered:0", "at least 1"]),
        ({"rule": "buffered"}, ["buffered:K"]),
        ({"rule": "buffered:two"}, ["buffered:two", "whole number"]),
        ({"rule": "ringmaster:0"}, ["ringmaster:0", "at least 1"]),
        ({"rule": "ringmaster:-1"}, ["ringmaster:-1", "at least 1"]),
        ({"rule": "dana:2"}, ["dana:2", "write dana"]),
        ({"rule": "foresight-cached", "strategy": "sync"}, ["rule foresight-cached", "strategy sync", "--rule plain"]),
        ({"rule": "cached", "strategy": "backup:1", "workers": 3}, ["rule cached", "strategy backup:1"]),
        ({"rule": "dana", "strategy": "allreduce"}, ["rule dana", "strategy allreduce"]),
        ({"rule": "buffered:2", "strategy": "local:4"}, ["strategy local:4", "buffered:2"]),
        ({"rule": "delayed", "strategy": "diloco:4"}, ["strategy diloco:4", "outer momentum", "--rule delayed"]),
        ({"rule": "delayed"}, ["rule delayed", "strategy async", "gradients"]),
        ({"rule": "foresight", "strategy": "async-local:4"}, ["rule foresight", "async-local:4", "--rule delayed"]),
        ({"rule": "buffered:5", "strategy": "async-local:4"}, ["rule buffered:5", "async-local:4"]),
        ({"strategy": "local"}, ["local:H"]),
        ({"strategy": "diloco:0"}, ["diloco:0", "at least 1"]),
        ({"strategy": "sync", "local_steps": "speed"}, ["--local-steps speed", "strategy sync"]),
        ({"strategy": "local:4", "local_steps": "fast"}, ["local steps 'fast'", "even"]),
        ({"strategy": "local:4", "outer_lr": 0.5}, ["--outer-lr 0.5", "strategy local:4", "diloco:H"]),
        ({"outer_momentum": 0.5}, ["--outer-momentum 0.5", "strategy async", "diloco:H"]),
        ({"strategy": "diloco:4", "outer_momentum": 1.0}, ["--outer-momentum", "below 1"]),
        ({"strategy": "diloco:4", "outer_lr": 0.0}, ["--outer-lr", "positive"]),
        ({"strategy": "local:4", "outer_warmup": 5}, ["--outer-warmup 5", "strategy local:4", "diloco:H"]),
        ({"strategy": "diloco:4", "outer_warmup": -1}, ["--outer-warmup", "zero or more"]),
        ({"strategy": "async-local:4", "path": "ring"}, ["--path ring", "async-local:4"]),
        ({"strategy": "allreduce", "path": "star"}, ["--path star", "--strategy sync"]),
        ({"strategy": "diloco:4", "local_steps": "speed"}, ["--local-steps speed", "--path star"]),
        ({"strategy": "sync", "path": "tree"}, ["path 'tree'", "star"]),
        ({"rule": "ringmaster:4", "strategy": "sync"}, ["rule ringmaster:4", "strategy sync"]),
        ({"rule": "ringmaster:4", "strategy": "bounded:2"}, ["rule ringmaster:4", "bounded:2", "async"]),
        (
            {"rule": "foresight-cached", "optimizer": "adam"},
            ["rule foresight-cached", "optimizer adam", "--rule foresight with adam"],
        ),
        ({"rule": "buffered:3", "optimizer": "lars"}, ["rule buffered:3", "optimizer lars"]),
        ({"rule": "dana", "nesterov": True}, ["rule dana", "--nesterov"]),
        ({"average": "often"}, ["--average 'often'", "auto, none, on"]),
        ({"average": "0"}, ["--average '0'", "at least 1"]),
        ({"average": "inf"}, ["--average 'inf'"]),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_that_says_what_was_asked(settings: dict[str, Any], parts: list[str]) -> None:
    message = refused(**settings)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"strategy": "asink"}, "async"),
        ({"strategy": "bound:3"}, "bounded"),
        ({"model": "lenet"}, "lenet5"),
        ({"dataset": "fashion_mnist"}, "fashion-mnist"),
        ({"rule": "plane"}, "plain"),
        ({"rule": "forsight"}, "foresight"),
        ({"rule": "bufered:2"}, "buffered"),
        ({"optimizer": "adams"}, "adam"),
        ({"schedule": "cosin"}, "cosine"),
        ({"epoch_mode": "share"}, "shared"),
        ({"device": "cud"}, "cuda"),
        ({"split": "label"}, "labels"),
    ],
    ids=str,
)
def test_an_unknown_name_is_answered_with_the_nearest(settings: dict[str, Any], nearest: str) -> None:
    assert f"did you mean '{nearest}'" in refused(**settings)


def test_what_is_left_open_is_filled_in() -> None:
    config = resolve(RunConfig(strategy="async"))
    assert (config.workers, config.lr) == (2, 0.005)
    assert config.threads is not None
    assert config.threads >= 1
    assert resolve(RunConfig(strategy="classic", optimizer="adam")).lr == 0.001
    assert resolve(RunConfig(strategy="classic")).workers == 1


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(RunConfig(strategy="sync", workers=3, scale_lr="auto"))
    assert resolve(once) == once


def test_a_strategy_is_a_point_on_four_axes() -> None:
    found = {text: strategy_of(text) for text in ("sync", "backup:2", "bounded:0", "local:8", "async-local:4")}
    assert [one.waiting for one in found.values()] == [
        Waiting.BARRIER, Waiting.BARRIER, Waiting.BOUNDED, Waiting.BARRIER, Waiting.ASYNC,
    ]  # fmt: skip
    assert [one.is_local for one in found.values()] == [False, False, False, True, True]
    assert [one.local_steps for one in found.values()] == [1, 1, 1, 8, 4]
    assert (found["backup:2"].num_backup, found["bounded:0"].max_lead) == (2, 0)
    assert [one.pushes_per_update(4) for one in found.values()] == [4, 2, 1, 4, 1]
    assert [one.pushes_per_step(4) for one in found.values()] == [4, 2, 1, 4, 4]
    assert strategy_of(RunConfig(strategy="backup:2")) is found["backup:2"], "a text is parsed once"


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_table_agrees_with_the_axes(name: str) -> None:
    kind = STRATEGIES[name]
    config = RunConfig(strategy=f"{name}:3" if kind.letter else name)
    drifts, in_rounds = kind.axes.pushed is PushContent.DRIFT, kind.axes.waiting is Waiting.BARRIER
    assert (why_not(config, Feature.LOCAL_STEPS) is not None) == (not drifts)
    assert (why_not(config, Feature.OUTER_OPTIMIZER) is None) == (kind.outer is not None)
    assert (why_not(config, Feature.RING_PATH) is None) == (Topology.RING in kind.axes.topologies)
    assert (why_not(config, Feature.SERVER) is None) == (kind.axes.topologies[0] is Topology.STAR)
    assert (why_not(config, Feature.WORKER_RULE) is not None) == (in_rounds and not drifts)
    for why in (*kind.refuses.values(), *kind.on_ring.values()):
        assert ";" in why or ":" in why, f"'{why}' does not say what to do"


LITERAL = re.compile(r'"(classic|sync|async|backup|bounded|allreduce|local|diloco|async-local)"')
NAMED_ELSEWHERE = {
    "config.py": "the default of --strategy",
    "api.py": "an example in a docstring",
    "studies/published": "names of the published tables",
}


def test_only_the_table_knows_strategies_by_name() -> None:
    root = Path(paceline.__file__).parent
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name == "settings/strategies.py" or name.startswith(tuple(NAMED_ELSEWHERE)):
            continue
        text = path.read_text(encoding="utf-8")
        assert not LITERAL.search(text), f"{name} names a strategy: read its axes or its features instead"
        assert not re.search(r"strategy\.(partition|startswith|split)\(", text), f"{name} takes a strategy apart"


def test_strategies_become_policies() -> None:
    policies = {name: make_policy(RunConfig(strategy=name)) for name in ("classic", "async", "sync", "backup:2")}
    assert isinstance(policies["classic"], Async)
    assert isinstance(policies["async"], Async)
    assert isinstance(policies["sync"], Barrier)
    assert policies["sync"].spare == 0
    assert isinstance(policies["backup:2"], Barrier)
    assert policies["backup:2"].spare == 2
    bounded = make_policy(RunConfig(strategy="bounded:0"))
    assert isinstance(bounded, StaleSynchronous)
    assert bounded.bound == 0


def test_schedules_are_parsed() -> None:
    assert schedule_of(RunConfig(schedule="constant")) == ("constant", 1.0, ())
    assert schedule_of(RunConfig(schedule="exponential")) == ("exponential", 0.9, ())
    assert schedule_of(RunConfig(schedule="exponential:0.5")) == ("exponential", 0.5, ())
    assert schedule_of(RunConfig(schedule="steps:80,120.5")) == ("steps", 0.1, (80.0, 120.5))
    cosine = RunConfig(lr=0.25, schedule="cosine", warmup=0.1)
    assert make_training(cosine, Budget(100, 100)).schedule == Schedule(0.25, "cosine", 1.0, 0.1)


@pytest.mark.parametrize(
    ("strategy", "workers", "scale", "factor"),
    [
        ("sync", 4, "none", 1.0),
        ("sync", 4, "auto", 4.0),
        ("backup:1", 4, "auto", 3.0),
        ("async", 4, "auto", 1.0),
        ("bounded:2", 4, "auto", 1.0),
        ("async", 4, "0.5", 0.5),
    ],
)
def test_the_learning_rate_is_scaled_by_the_pushes_of_an_update(
    strategy: str, workers: int, scale: str, factor: float
) -> None:
    config = resolve(RunConfig(strategy=strategy, workers=workers, scale_lr=scale, lr=0.1))
    assert lr_scale(config) == factor
    assert make_training(config, Budget(100, 100)).schedule.base == pytest.approx(0.1 * factor)
    measured = 0.1 if config.rule == "auto" else None  # the share over which measured steps warm up
    assert config.warmup == (AUTO_WARMUP if scale == "auto" and factor > 1 else measured)
    assert resolve(RunConfig(strategy=strategy, workers=workers, scale_lr=scale, lr=0.1, warmup=0.0)).warmup == 0.0


def test_the_rule_gets_the_optimizer_that_was_asked_for() -> None:
    layout = pack([("a", (3,), True), ("b", (3,), False)])
    sgd = make_rule(RunConfig(rule="plain", momentum=0.5, nesterov=True, clip=2.0), layout)
    assert isinstance(sgd, Plain)
    assert isinstance(sgd.optimizer, Sgd)
    assert (sgd.optimizer.momentum.item(), sgd.optimizer.nesterov, sgd.optimizer.clip) == (0.5, True, 2.0)
    adam = make_rule(RunConfig(rule="plain", optimizer="adam", betas=[0.99, 0.9]), layout)
    assert isinstance(adam, Plain)
    assert isinstance(adam.optimizer, Adam)
    assert adam.optimizer.betas == (0.99, 0.9)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_built_with_a_row_for_each_worker(name: str) -> None:
    strategy = "async-local:2" if RULES[name].for_drifts else "async"
    rule_text = f"{name}:4" if RULES[name].letter else name
    config = resolve(RunConfig(rule=rule_text, workers=3, average="none", strategy=strategy))
    rule, weights = make_rule(config, pack([("a", (3,), True)])), torch.zeros(16)
    rows = [tensor for tensor in rule.start(weights).values() if tensor.dim() > 1]
    assert bool(rows) == RULES[name].knows_workers
    assert all(len(tensor) == 3 for tensor in rows)
    assert isinstance(make_policy(config), DropStale) == (name == "ringmaster")
    called = {"ringmaster": "plain", "auto": "foresight (step limited)", "auto-counted": "foresight (lr scaled)"}
    assert rule.name == called.get(name, config.rule)
    assert rows_nbytes(config, 100) == (1200 if RULES[name].knows_workers else 0)


@pytest.mark.parametrize(
    ("settings", "average"),
    [
        ({"rule": "plain"}, "none"),
        ({"rule": "foresight-cached"}, "on"),
        ({"rule": "foresight-cached", "average": "auto"}, "on"),
        ({"rule": "damped", "strategy": "bounded:2"}, "on"),
        ({"rule": "damped", "strategy": "sync"}, "none"),
        ({"rule": "buffered:2", "strategy": "classic"}, "none"),
        ({"rule": "plain", "average": "on"}, "on"),
        ({"rule": "auto", "strategy": "async"}, "on"),
        ({"rule": "auto", "strategy": "async", "task": "script:loop"}, "none"),
        ({"rule": "auto", "strategy": "async", "task": "script:loop", "average": "on"}, "on"),
        ({"rule": "auto", "strategy": "classic"}, "none"),
        ({"rule": "plain", "average": 500, "strategy": "sync"}, "500"),
        ({"rule": "dana", "average": "none"}, "none"),
        ({"strategy": "local:2", "average": "20"}, "20"),
        ({"strategy": "diloco:2"}, "none"),
        ({"strategy": "async-local:2"}, "on"),
    ],
    ids=str,
)
def test_weights_are_averaged_where_pushes_come_one_by_one_unless_the_rule_is_plain(
    settings: dict[str, Any], average: str
) -> None:
    config = resolve(RunConfig(**settings))
    assert average_in_words(config) == average
    rule = make_rule(config, pack([("a", (3,), True)]))
    assert isinstance(rule, Averaged) == (average != "none")
    if isinstance(rule, Averaged):
        assert rule.horizon == (None if average == "on" else float(average))


def test_the_outer_optimizer_is_warmed_up_unless_the_config_is_older_or_asks_for_the_published_one() -> None:
    config, layout = resolve(RunConfig(strategy="diloco:4", workers=2)), pack([("a", (3,), True)])
    assert (config.outer_lr, config.outer_momentum, config.outer_warmup) == (0.7, 0.65, 10)
    warmed = make_rule(config, layout)
    assert isinstance(warmed, OuterMomentum) and warmed.warmup == 10
    for rounds in (None, 0):  # None: of a run folder that was made before there was a warm-up
        published = make_rule(replace(config, outer_momentum=0.9, outer_warmup=rounds), layout)
        assert isinstance(published, Plain) and isinstance(published.optimizer, Sgd) and published.optimizer.nesterov
    older = make_rule(replace(resolve(RunConfig(strategy="async-local:4")), outer_warmup=None, average="none"), layout)
    assert isinstance(older, Delayed) and "rounds" not in older.start(torch.zeros(3))


def test_weight_decay_spares_what_the_layout_says() -> None:
    layout = pack([("a", (3,), True), ("b", (3,), False)])
    rule = make_rule(RunConfig(weight_decay=0.5, momentum=0.0), layout)
    weights = torch.ones(layout.size)
    rule.apply(weights, rule.start(weights), torch.zeros(layout.size), Arrival(0, 0, torch.tensor(1.0), 1))
    views = layout.views(weights)
    assert views["a"].tolist() == [0.5] * 3
    assert views["b"].tolist() == [1.0] * 3


def test_a_shared_budget_is_epochs_times_the_samples_left_for_training() -> None:
    config = resolve(RunConfig(workers=3, batch_size=10, epochs=2.5, validation=0.2))
    work = divide_work(LABELS, config)
    assert (work.budget.samples, work.budget.epoch_samples) == (200, 80)
    assert work.quotas == [None] * 3
    assert sorted(np.concatenate([*work.shards, work.validation])) == list(range(100))


def test_own_quotas_are_passes_over_the_own_shard() -> None:
    config = resolve(RunConfig(workers=2, batch_size=8, epochs=3.0, epoch_mode="own", shard_weights=[1.0, 3.0]))
    work = divide_work(LABELS, config)
    assert [len(shard) for shard in work.shards] == [25, 75]
    assert work.quotas == [3 * 4, 3 * 10]
    assert work.budget.per_worker
    assert work.budget.samples == 300


@pytest.mark.parametrize("split", ["full", "iid", "dirichlet:1"])
@pytest.mark.parametrize(("passes", "expected"), [(0.99, 1.0), (1.0, 0.9), (5.99, 0.9**5), (6.0, 0.9**6)])
def test_exponential_decays_once_a_pass_of_every_worker(split: str, passes: float, expected: float) -> None:
    """As published; on the full split a pass of ten workers is ten epochs of samples."""
    own = {"split": split, "epoch_mode": "own", "epochs": 6.0, "schedule": "exponential:.9", "lr": 1.0}
    config = resolve(RunConfig(workers=10, batch_size=1, **own))
    budget = divide_work(LABELS, config).budget
    assert budget.samples == 6 * (1000 if split == "full" else 100)
    lr = make_training(config, budget).lr(round(passes / 6 * budget.samples), version=0)
    assert lr == pytest.approx(expected)


def test_the_full_split_gives_everybody_all_data_and_still_one_shared_budget() -> None:
    work = divide_work(LABELS, resolve(RunConfig(workers=3, batch_size=10, epochs=1.0, split="full")))
    assert [len(shard) for shard in work.shards] == [100] * 3
    assert work.budget.samples == 100
