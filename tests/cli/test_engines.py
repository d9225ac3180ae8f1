"""Where a run is placed: every combination that makes no sense is one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.folder import RunFolder
from paceline.runtimes.cluster.credentials import ListenOptions
from paceline.runtimes.cluster.serve import serve
from paceline.settings.ranks import VARIABLES
from paceline.settings.resolve import resolve

CASES = {
    "an engine nobody knows": (["--engine", "rey"], "unknown engine 'rey': did you mean 'ray'"),
    "two that place workers": (["--engine", "ray", "--hosts", "hosts"], "--engine ray and --hosts hosts both place"),
    "hosts that are not there": (["--hosts", "hosts"], "no hosts file hosts: write one host a line"),
    "encryption on one machine": (["--tls"], "--tls is about workers on other machines: add --hosts FILE"),
    "an address on one machine": (["--listen", "0.0.0.0:1"], "--listen is about workers on other machines"),
    "a ring of actors": (["--engine", "ray", "--strategy", "allreduce"], "--strategy allreduce has no server"),
    "a part of a GPU without Ray": (["--gpus-per-worker", "0.5"], "--gpus-per-worker 0.5 is what Ray gives to each"),
    "no part of a GPU": (
        ["--engine", "ray", "--gpus-per-worker", "0"],
        "--gpus-per-worker 0 is a worker without a GPU",
    ),
    "two GPUs for a worker": (["--engine", "ray", "--gpus-per-worker", "2"], "--gpus-per-worker 2: a worker computes"),
    "a GPU whose pushes are lost": (
        ["--engine", "ray", "--gpus-per-worker", "1"],
        "--gpus-per-worker 1: after a crash",
    ),
    "a device that Ray gives": (
        ["--engine", "ray", "--device", "cuda"],
        "--device cuda: under --engine ray each worker",
    ),
    "no ray": (["--engine", "ray", "--dataset", "fashion-mnist-sample"], "--engine ray needs ray, which is not"),
}
HOSTS = {
    "a number that differs": (["--workers", "5"], "--workers 5, but hosts lists 3: leave --workers out"),
    "restarts by one who starts workers": (["--restart", "2"], "--restart 2 is for 'paceline server'"),
    "restarts of workers elsewhere": (["--restart-workers", "2"], "--restart-workers 2: this command does not start"),
    "a ring over ssh": (["--strategy", "allreduce"], "--strategy allreduce has no server"),
    "a task that is not there": (["--task", "none.py:build"], "--task "),
    "an address that is none": (["--listen", "here"], "address 'here': write HOST:PORT"),
    "an address of another machine": (["--listen", "192.0.2.77:0"], "--listen 192.0.2.77:0 is not possible here"),
}


def test_a_server_that_starts_workers_is_not_replaced() -> None:
    config = RunConfig(dataset="fashion-mnist-sample", restart=2)
    with pytest.raises(UserError, match="--restart 2 is for 'paceline server' and for runs on one machine"):
        serve(config, ListenOptions(), Console(quiet=True), lambda opened: None)
    assert not Path("runs").exists()


def complaint(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(["train", *arguments]) == 2
    last: str = capsys.readouterr().err.splitlines()[-1]
    assert not Path("runs").exists()
    return last


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed


@pytest.mark.parametrize("case", CASES)
def test_each_has_its_line(capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, expected = CASES[case]
    assert complaint(capsys, arguments).startswith(f"paceline: {expected}")


@pytest.mark.parametrize("case", HOSTS)
def test_so_has_each_about_hosts(capsys: pytest.CaptureFixture[str], case: str) -> None:
    Path("hosts").write_text("node1 workers=2\nnode2\n")
    arguments, expected = HOSTS[case]
    assert complaint(capsys, ["--hosts", "hosts", *arguments]).startswith(f"paceline: {expected}")


@pytest.mark.parametrize("arguments", [["--engine", "ray"], ["--hosts", "hosts"]])
def test_a_launcher_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    for name, value in zip(VARIABLES, ("0", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert "leave the launcher (torchrun, srun) out" in complaint(capsys, arguments)


def test_a_run_is_resumed_on_as_many_workers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts").write_text("node1 workers=2\n")
    assert main(["resume", "runs/it", "--hosts", "hosts"]) == 2
    assert "runs/it is not a run folder" in capsys.readouterr().err
    RunFolder.create(resolve(RunConfig(name="it", workers=3)))
    assert main(["resume", "runs/it", "--hosts", "hosts"]) == 2
    assert "runs/it has 3 workers, and hosts lists 2: list as many" in capsys.readouterr().err
    assert main(["resume", "runs/it", "--tls"]) == 2
    assert "--tls is about workers on other machines" in capsys.readouterr().err
