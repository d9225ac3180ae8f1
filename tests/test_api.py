"""`paceline.train` as an editor, a type checker and a notebook see it, and what it says of wrong arguments."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from typing import Any

import generate_stub
import pytest
import torch
from torch import nn

import paceline
from paceline.api import importable_name
from paceline.config import FIELDS, SIMULATED_ONLY

SNIPPET = """
import paceline

def build() -> paceline.Task: ...

paceline.train(build, strategy="sync", workers=2, lr=1, runs="here", track="csv", betas=(0.9, 0.99), scale_lr=2)
paceline.train(build, epochs=None, strategy=None, betas=None)
paceline.train(build, strategi="async")
paceline.train(build, workers="2")
paceline.train(3)
reveal_type(paceline.Task)
"""


def test_the_stub_is_that_of_the_settings() -> None:
    assert generate_stub.STUB.read_text(encoding="utf-8") == generate_stub.stub(), "make pages"


def test_a_notebook_is_shown_every_setting_of_a_real_run() -> None:
    shown = inspect.signature(paceline.train).parameters
    assert [*shown] == ["build", "quiet", *(name for name in FIELDS if name not in SIMULATED_ONLY)]
    assert shown["strategy"].default == "async" and shown["workers"].annotation == "int | None"


@pytest.mark.long
def test_a_type_checker_refuses_wrong_names_and_types(tmp_path: Path) -> None:
    from mypy import api

    (tmp_path / "snippet.py").write_text(SNIPPET)
    config = str(Path(__file__).parents[1] / "pyproject.toml")
    arguments = ["--config-file", config, "--follow-imports", "silent", "--cache-dir", str(tmp_path / "cache")]
    found, _, _ = api.run([*arguments, str(tmp_path / "snippet.py")])
    errors = [line for line in found.splitlines() if ": error:" in line]
    assert [line.split(":")[1] for line in errors if "empty-body" not in line] == ["8", "9", "10"], found
    assert 'Unexpected keyword argument "strategi"' in found and "supervised.SupervisedTask" in found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategi": "async"}, "unknown setting 'strategi': did you mean 'strategy'"),
        ({"workers": "2"}, r'workers = "2": write a whole number without quotes, as in 2'),
        ({"build": 3}, "build is int: give the function that returns the task"),
        ({"build": lambda: None}, "make it a function at the top of a module"),
        ({"build": functools.partial(nn.Linear, 8)}, r"build 'partial\(...\)' cannot be imported by workers"),
        ({"build": nn.Linear(8, 2)}, "build is the model Linear: give the function that returns a paceline.Task"),
        ({"build": nn.Linear}, "build is the model Linear: give the function that returns a paceline.Task"),
        ({"build": "m:f", "task": "m:f"}, "build and task = m:f both name the task"),
        ({"build": "m:f", "model": "cnn"}, "--model cnn: your own task brings its model and its data; leave it out"),
        ({"optimizer": "adam", "momentum": 0.5}, "--momentum 0.5 is a setting of sgd, rmsprop, lars, muon, and the"),
        ({"optimizer": torch.optim.Adam}, 'optimizer is torch\'s Adam: .*, as in optimizer="adam"'),
        ({"optimizer": torch.optim.Adagrad}, "optimizer is torch's Adagrad: .*; known are: sgd, adam"),
        ({"workers": 2.5}, "workers = 2.5: write a whole number, as in 2"),
        ({"device": torch.device("meta")}, "unknown device 'meta'"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(paceline.UserError, match=message):
        paceline.train(**settings)


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in SIMULATED_ONLY])
def test_none_is_the_default_of_every_setting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[paceline.RunConfig] = []

    def launch(config: paceline.RunConfig, *others: object) -> None:
        started.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.api.launch", launch)
    settings: Any = {name: None}
    with pytest.raises(KeyboardInterrupt):
        paceline.train(**settings)
    assert started == [paceline.RunConfig()]


def needy(size: int, depth: int = 2) -> None:
    """A build function that cannot be called without arguments."""


def test_a_build_function_with_arguments_is_refused_before_a_process_starts() -> None:
    with pytest.raises(paceline.UserError, match="build 'needy' needs size, but is called without"):
        importable_name(needy)
    assert sys.modules[__name__].needy is needy


def test_a_device_of_torch_is_taken_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[paceline.RunConfig] = []

    def launch(config: paceline.RunConfig, *others: object) -> None:
        started.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.api.launch", launch)
    with pytest.raises(KeyboardInterrupt):
        paceline.train(device=torch.device("cpu"))
    assert started[0].device == "cpu"


@pytest.mark.parametrize("settings", [{"strategy": "asyncx"}, {"strategy": "classic", "target": "loss=3"}])
def test_the_traceback_of_a_mistake_is_not_that_of_paceline(settings: dict[str, Any]) -> None:
    with pytest.raises(paceline.UserError) as caught:
        paceline.train(**settings)
    assert len(caught.traceback) == 2 and str(caught.traceback[1].path).endswith("api.py")


def test_a_run_that_diverges_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind: dict[str, Any] = {"strategy": "classic", "model": "cnn", "dataset": "fashion-mnist-sample", "threads": 1}
    result = paceline.train(**kind, lr=1e30, steps=5, runs=tmp_path)
    assert result["status"] == "diverged"
    assert f"paceline: {result['reason']}" in " ".join(capsys.readouterr().err.split())


def test_an_interrupt_ends_a_script_without_a_traceback_and_can_be_caught(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.api._train", interrupted)
    with pytest.raises(SystemExit) as stop:
        paceline.train(workers=2)
    assert stop.value.code == 130 and isinstance(stop.value, KeyboardInterrupt)
    assert capsys.readouterr().err == "paceline: interrupted\n"
