"""`paceline server --continue`: one command that starts a run, resumes it, or says how it ended."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.config import RunConfig, is_script
from paceline.core.messages import Join
from paceline.data.datasets import resolve_dataset
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.folder import RunFolder
from paceline.runs.recording import ScriptCall
from paceline.runtimes.cluster import serve as network
from paceline.runtimes.cluster.credentials import ListenOptions
from paceline.runtimes.cluster.serve import serve_or_resume
from paceline.runtimes.scripts.launch import settings_of_script
from paceline.settings.resolve import resolve
from tests.support.made_up_runs import log_inputs

QUIET = Console(quiet=True)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(dataset="fashion-mnist-sample", workers=2, name="it", runs=str(tmp_path / "runs"))


def begun(config: RunConfig) -> RunFolder:
    """The folder of a run whose server was killed after a worker had joined, on a machine with more cores."""
    resolved = config if is_script(config) else resolve_dataset(resolve(config))[0]
    folder = RunFolder.create(dataclasses.replace(resolved, threads=64))
    log_inputs(folder, [(Join(0, 0, 0), 0.0)])
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is called instead of `serve` and `serve_again`."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(network, "serve", lambda *arguments, command: seen.append(("serve", *arguments, command)))
    monkeypatch.setattr(network, "serve_again", lambda *arguments: seen.append(("serve_again", *arguments)))
    return seen


def test_a_run_that_has_not_begun_is_started(config: RunConfig, calls: list[tuple[Any, ...]]) -> None:
    left_over = RunFolder.create(resolve(config))  # killed before its log was made
    serve_or_resume(config, ListenOptions("127.0.0.1:0"), QUIET)
    assert calls == [("serve", config, ListenOptions("127.0.0.1:0", supervised=True), QUIET, None)]
    assert not left_over.path.exists()


@pytest.mark.parametrize(("listen", "expected"), [("127.0.0.1:0", None), ("0.0.0.0:29500", "0.0.0.0:29500")])
def test_one_that_has_begun_is_resumed_where_workers_look_for_it(
    config: RunConfig, calls: list[tuple[Any, ...]], listen: str, expected: str | None
) -> None:
    folder = begun(config)
    serve_or_resume(dataclasses.replace(config, keep=5), ListenOptions(listen), QUIET)
    ((name, path, options, _, upkeep),) = calls
    assert (name, path, options) == ("serve_again", folder.path, ListenOptions(expected, supervised=True))
    assert upkeep["keep"] == 5


def test_one_that_has_ended_gives_its_result(config: RunConfig, calls: list[tuple[Any, ...]]) -> None:
    folder = begun(config)
    folder.write_result({"status": "stopped", "updates": 3})
    serve_or_resume(config, ListenOptions(), QUIET)
    assert len(calls) == 1
    folder.write_result({"status": "finished", "updates": 7})
    _, result = serve_or_resume(config, ListenOptions(), QUIET)
    assert result["updates"] == 7 and len(calls) == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"lr": 0.5}, r"it was started with lr = 0\.005, and 0\.5 is asked: --continue needs the same settings"),
        ({"threads": 1}, "it was started with threads = 64, and 1 is asked"),
        ({"name": None}, "--continue finds a run by its folder: add --name NAME"),
        ({"restart": 2}, "--restart 2 and --continue both start a server again"),
    ],
)
def test_what_would_be_ignored_is_refused(
    config: RunConfig, calls: list[tuple[Any, ...]], change: dict[str, Any], expected: str
) -> None:
    begun(config)
    with pytest.raises(UserError, match=expected):
        serve_or_resume(dataclasses.replace(config, **change), ListenOptions(), QUIET)
    assert not calls


def test_other_arguments_of_a_script_are_refused(
    config: RunConfig, calls: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text("import paceline\n")
    own = RunConfig(name="it", runs=config.runs, strategy="async", workers=2)
    ScriptCall.of(["loop.py", "3"]).save(begun(settings_of_script(own, ["loop.py", "3"])[0]))
    with pytest.raises(
        UserError, match=r"started with 'loop\.py 3', and 'loop\.py 4' is asked: --continue needs the same"
    ):
        serve_or_resume(own, ListenOptions(), QUIET, ["loop.py", "4"])
    assert not calls
    serve_or_resume(own, ListenOptions(), QUIET, ["loop.py", "3"])
    assert [name for name, *_ in calls] == ["serve_again"]


def test_two_ways_to_resume_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server", "--continue", "--resume", "runs/it"]) == 2
    assert "--resume runs/it and --continue: leave one out" in capsys.readouterr().err


def test_a_script_with_other_arguments_is_another_run(
    tmp_path: Path, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import paceline\n")
    config, command = RunConfig(workers=2, name="it", strategy="async"), ["train.py", "--epochs", "3"]
    folder = RunFolder.create(settings_of_script(config, command)[0])
    ScriptCall.of(command).save(folder)
    log_inputs(folder, [(Join(0, 0, 0), 0.0)])
    serve_or_resume(config, ListenOptions(), QUIET, command)
    assert [call[0] for call in calls] == ["serve_again"]
    with pytest.raises(UserError, match=r"started with 'train\.py --epochs 3', and 'train\.py --epochs 4' is asked"):
        serve_or_resume(config, ListenOptions(), QUIET, ["train.py", "--epochs", "4"])
