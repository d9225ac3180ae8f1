"""Warnings: said where they help, silent where there is nothing to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.settings.resolve import resolve
from paceline.settings.warnings import _slow_precision, advice


def lines(**settings: Any) -> list[str]:
    found = advice(resolve(RunConfig(**settings)))
    assert all("\n" not in line and "--rule auto" in line for line in found), "one line each, with a way out"
    return found


@pytest.mark.parametrize("rule", ["damped", "gap", "ringmaster:8"])
@pytest.mark.parametrize("split", ["labels", "dirichlet:0.1"])
def test_rules_that_starve_slow_workers_are_named_where_labels_are_skewed(rule: str, split: str) -> None:
    (line,) = lines(rule=rule, split=split, workers=10)
    assert f"rule {rule}" in line and f"--split {split}" in line and "starved" in line
    assert ("drops" in line) == rule.startswith("ringmaster")


@pytest.mark.parametrize("rule", ["damped", "gap", "ringmaster:8"])
@pytest.mark.parametrize("split", ["iid", "full", "dirichlet:10"])
def test_on_even_data_the_same_rules_pass_in_silence(rule: str, split: str) -> None:
    assert lines(rule=rule, split=split, workers=10) == []


@pytest.mark.parametrize(("workers", "momentum"), [(10, 0.9), (30, 0.9), (10, 0.8), (5, 0.9), (64, 0.1)])
def test_momentum_that_adds_to_that_of_asynchrony_is_named_with_a_smaller_one(workers: int, momentum: float) -> None:
    (line,) = lines(rule="plain", workers=workers, momentum=momentum)
    assert f"momentum {momentum:g} with {workers} workers" in line and "diverge" in line
    offered = float(line.partition("--momentum ")[2].split()[0])
    assert offered < momentum
    assert lines(rule="plain", workers=workers, momentum=offered) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 2},
        {"workers": 4},
        {"workers": 10, "momentum": 0.0},
        {"workers": 10, "rule": "foresight-cached", "split": "labels"},
        {"workers": 10, "rule": "dana"},
        {"workers": 10, "strategy": "sync", "split": "labels", "optimizer": "adam"},
        {"workers": 10, "optimizer": "adam"},
        {"workers": 10, "rule": "cached", "optimizer": "adam", "split": "labels"},
        {"workers": 1000, "timing_only": True},
        {"strategy": "classic"},
        {"strategy": "diloco:20", "workers": 5},
        {"strategy": "local:500", "workers": 5, "steps": 3},
    ],
    ids=str,
)
def test_nothing_is_said_where_nothing_is_wrong(settings: dict[str, Any]) -> None:
    assert lines(**settings) == []


def test_adam_on_skewed_labels_is_named() -> None:
    (line,) = lines(rule="plain", optimizer="adam", split="labels", workers=5)
    assert "adam" in line and "--split labels" in line
    both = lines(rule="damped", optimizer="adam", split="labels", workers=5)
    assert len(both) == 2 and "starved" in both[0]
    assert lines(rule="plain", optimizer="adam", split="labels", workers=5, strategy="bounded:2") == [line]


@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("split", ["labels", "dirichlet:0.1"])
@pytest.mark.parametrize(("model", "other"), [("resnet50", "resnet50-gn"), ("inception-bn", "resnet18-gn")])
def test_batch_norm_on_skewed_labels_is_named_with_group_norm(
    model: str, other: str, split: str, strategy: str
) -> None:
    (line,) = advice(resolve(RunConfig(model=model, split=split, strategy=strategy, workers=2)))
    assert f"batch norm in {model} with --split {split}" in line and f"--model {other}" in line and "\n" not in line
    assert advice(resolve(RunConfig(model=other, split=split, strategy=strategy, workers=2))) == []


@pytest.mark.parametrize("settings", [{"split": "iid"}, {"split": "labels", "strategy": "classic"}], ids=str)
def test_batch_norm_on_even_data_or_alone_passes_in_silence(settings: dict[str, Any]) -> None:
    assert advice(resolve(RunConfig(model="resnet18", **settings))) == []


@pytest.mark.parametrize(("flags", "slow"), [("fpu avx2 avx512f", True), ("fpu avx2 avx512_bf16", False)])
def test_bf16_on_a_cpu_that_cannot_multiply_it_is_named(flags: str, slow: bool, tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor : 0\nflags : {flags}\n")
    line = _slow_precision(RunConfig(precision="bf16"), facts)
    assert (line is not None and "fp32 is faster" in line) == slow
    assert _slow_precision(RunConfig(), facts) is None


def test_a_codec_on_one_machine_is_said_to_cost_more_than_it_saves_and_on_a_link_not() -> None:
    (line,) = advice(resolve(RunConfig(workers=2, pull_codec="int8")))
    assert "codec int8 between processes of one machine" in line and "leave it out" in line
    assert advice(resolve(RunConfig(workers=2, codec="int8", speeds="1s", link="1gbit"))) == []
    assert advice(resolve(RunConfig(workers=2, codec="none"))) == []
    assert advice(resolve(RunConfig(strategy="allreduce", workers=2, codec="int8"), launched=True)) == []


@pytest.mark.parametrize("name", ["local", "diloco", "async-local"])
def test_a_run_with_few_exchanges_is_named_with_a_number_that_gives_enough(name: str) -> None:
    (line,) = advice(resolve(RunConfig(strategy=f"{name}:500", workers=5, epochs=3.0)))
    assert f"{name}:500 with 5 workers exchanges only 2 times in 3 epochs" in line and "\n" not in line
    offered = line.partition(f"{name}:500")[2].partition(f"{name}:")[2].split()[0]
    assert advice(resolve(RunConfig(strategy=f"{name}:{offered}", workers=5, epochs=3.0))) == []
    (line,) = advice(resolve(RunConfig(strategy=f"{name}:500", workers=5, epochs=1.0)))
    assert "exchanges only once in 1 epoch:" in line


@pytest.mark.parametrize(("name", "instead"), [("diloco", "sync"), ("async-local", "async")])
def test_one_or_two_local_steps_are_not_advised(name: str, instead: str) -> None:
    """An outer momentum over so few steps is a second one: docs/local-steps.md says to use something else."""
    (line,) = advice(resolve(RunConfig(strategy=f"{name}:50", workers=8, epochs=1.0, dataset="fashion-mnist-sample")))
    every = "which exchanges every" if instead == "async" else "which exchange every"
    assert f"use {instead}" in line and every in line and f"{name}:1" not in line
