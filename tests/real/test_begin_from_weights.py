"""Runs that begin from the weights of a file: the same bits in every process, and no need of that file later."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import paceline
from paceline.assembly.run import work_of
from paceline.assembly.task import make_task
from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.runtimes.cluster.worker import WorkerContext, WorkerOptions
from paceline.settings.resolve import resolve
from tests.support import normed_task
from tests.support.cluster_commands import address_of, serve, workers
from tests.support.commands import Command, replays, result_of, run, simulate, wait_for_records

TASK = f"{Path(normed_task.__file__)}:build"
FLAGS = ("--task", TASK, "--threads", "1", "--batch-size", "16", "--lr", "0.05")


@pytest.fixture
def given(tmp_path: Path) -> dict[str, torch.Tensor]:
    return normed_task.save_other(tmp_path / "given.safetensors")


def flags(tmp_path: Path, strategy: str, name: str, *more: str, count: int = 2) -> list[str]:
    weights = ("--weights", str(tmp_path / "given.safetensors"), "--runs", str(tmp_path / "runs"), "--name", name)
    return [*FLAGS, *weights, "--strategy", strategy, "--workers", str(count), *more]


def test_classic_from_a_file_is_plain_torch_from_that_file(tmp_path: Path, given: dict[str, torch.Tensor]) -> None:
    settings: dict[str, Any] = {"strategy": "classic", "batch_size": 16, "lr": 0.05, "momentum": 0.0, "threads": 1}
    path = tmp_path / "given.safetensors"
    paceline.train(normed_task.build, weights=path, steps=12, runs=str(tmp_path), name="it", quiet=True, **settings)
    trained = load_file(tmp_path / "it/weights.safetensors")
    task = normed_task.build()
    model = normed_task.make_model()
    model.load_state_dict(given)
    config = resolve(RunConfig(task=TASK, **settings))
    loader = task.loader(work_of(task, config).batches(0, config), config.seed, 0)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05)
    torch.set_num_threads(1)
    for number in range(12):
        batch = loader.batch(number)
        optimizer.zero_grad()
        task.loss(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    expected = model.state_dict() | {"1.num_batches_tracked": given["1.num_batches_tracked"]}  # saved as at the start
    assert {name: torch.equal(trained[name], tensor) for name, tensor in expected.items()} == dict.fromkeys(given, True)
    again = paceline.train(
        normed_task.build,
        weights=tmp_path / "it/weights.safetensors",
        steps=1,
        runs=str(tmp_path),
        quiet=True,
        **settings,
    )
    assert again["initial_weights"]["loaded"] == len(given) and not again["initial_weights"]["missing"]


STRATEGIES = ("sync", "backup:1", "async", "bounded:2", "allreduce", "local:2", "diloco:2", "async-local:2")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_begins_with_the_bits_of_the_file(
    tmp_path: Path, given: dict[str, torch.Tensor], strategy: str
) -> None:
    """With steps too small to change a float, the end is the beginning."""
    tiny = ("--lr", "1e-30", "--steps", "3", "--average", "none")
    simulate(*flags(tmp_path, strategy, "it", *tiny))
    trained = load_file(tmp_path / "runs/it/weights.safetensors")
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "1.num_batches_tracked"):
        assert torch.equal(trained[name], given[name]), name


@pytest.mark.parametrize("strategy", ["sync", "allreduce"])
def test_processes_have_the_bits_of_the_simulator(
    tmp_path: Path, given: dict[str, torch.Tensor], strategy: str
) -> None:
    done = run("train", *flags(tmp_path, strategy, "real", "--steps", "60"), cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert "begins from" in done.err and "9 tensors loaded" in done.err
    (tmp_path / "given.safetensors").rename(tmp_path / "moved.safetensors")
    assert replays(tmp_path / "runs/real")  # the run folder has a copy
    simulate("--trust", "--like", str(tmp_path / "runs/real"), "--runs", str(tmp_path / "runs"), "--name", "like")
    (tmp_path / "moved.safetensors").rename(tmp_path / "given.safetensors")
    simulate(*flags(tmp_path, strategy, "simulated", "--steps", "60"))
    real, like, simulated = (result_of(tmp_path / "runs" / name) for name in ("real", "like", "simulated"))
    assert real["weights_sha256"] == simulated["weights_sha256"] == like["weights_sha256"]
    assert real["initial_weights"] == simulated["initial_weights"]
    assert real["initial_weights"]["sha256"] == like["initial_weights"]["sha256"]


@pytest.fixture
def stopped(tmp_path: Path, given: dict[str, torch.Tensor]) -> Path:
    """The folder of a run that was interrupted, and whose file is gone."""
    folder = tmp_path / "runs/it"
    with Command("train", *flags(tmp_path, "async", "it", "--epochs", "40"), cwd=tmp_path) as command:
        wait_for_records(folder, 60)
        command.process.send_signal(signal.SIGINT)
        assert command.finish() == 130
    (tmp_path / "given.safetensors").unlink()
    return folder


def test_a_damaged_copy_in_the_run_folder_is_one_line(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = stopped / "initial.safetensors"
    damaged = bytearray(copy.read_bytes())
    damaged[-1] ^= 1
    copy.write_bytes(damaged)
    for verb in ("resume", "replay"):
        assert main([verb, "--trust", str(stopped)]) == 2
        assert "initial.safetensors have the SHA-256" in capsys.readouterr().err
    copy.unlink()
    for verb in ("resume", "replay"):
        assert main([verb, "--trust", str(stopped)]) == 2
        assert "initial.safetensors do not exist" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_is_resumed_without_the_file(stopped: Path) -> None:
    done = run("resume", "--trust", str(stopped), cwd=stopped)
    assert done.process.returncode == 0, done.err
    assert result_of(stopped)["initial_weights"]["loaded"] == 9
    assert replays(stopped)


def test_workers_over_tcp_take_their_own_copy_or_that_of_the_run(
    tmp_path: Path, given: dict[str, torch.Tensor]
) -> None:
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *flags(tmp_path, "sync", "it", "--steps", "4"))
        address_of(tmp_path / "runs/it")
        (tmp_path / "given.safetensors").rename(tmp_path / "copy.safetensors")
        (there,) = workers(stack, tmp_path, 1, "--weights", "copy.safetensors")
        here = stack.enter_context(Command("worker", "--run", "runs/it", "--threads", "1", cwd=tmp_path))
        assert server.finish() == 0, server.err
        assert [there.finish(), here.finish()] == [0, 0], there.err + here.err
    (tmp_path / "copy.safetensors").rename(tmp_path / "given.safetensors")
    simulate(*flags(tmp_path, "sync", "simulated", "--steps", "4"))
    over_tcp, simulated = (result_of(tmp_path / "runs" / name) for name in ("it", "simulated"))
    assert over_tcp["weights_sha256"] == simulated["weights_sha256"]


def test_what_was_not_loaded_is_told_and_recorded(
    tmp_path: Path, given: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    del given["3.weight"], given["3.bias"]
    save_file({**given, "extra": torch.ones(2)}, tmp_path / "given.safetensors")
    simulate(*flags(tmp_path, "sync", "it", "--steps", "1", "--weights-partial"))
    said = "7 tensors loaded, not loaded: 2 missing in the file: 3.bias, 3.weight; 1 unknown to the model: extra"
    assert said in " ".join(capsys.readouterr().err.split())
    found = result_of(tmp_path / "runs/it")["initial_weights"]
    assert (found["loaded"], found["missing"], found["unexpected"]) == (7, ["3.bias", "3.weight"], ["extra"])
    rows = [json.loads(line) for line in (tmp_path / "runs/it/events.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["kind"] == "initial_weights"]
    assert {name: row[name] for name in found} == found


def test_a_worker_without_the_file_is_refused_only_if_its_model_needs_it(
    tmp_path: Path, given: dict[str, torch.Tensor]
) -> None:
    """The server sends what is trained; frozen weights and statistics do not travel."""
    config = resolve(RunConfig(task=TASK, weights=str(tmp_path / "given.safetensors")))
    context = WorkerContext(WorkerOptions(), 0.0, lambda config: None, print, lambda: False)
    assert context.make_task(config, None).initial_weights is not None
    (tmp_path / "given.safetensors").unlink()
    with pytest.raises(UserError, match=r"needs the file that the run begins from.*--weights FILE"):
        context.make_task(config, None)
    plain = RunConfig(task=f"{Path(normed_task.__file__)}:plain", weights="gone", weights_sha256="0" * 64)
    assert context.make_task(plain, None).layout.num_parameters == 8


def test_a_misfit_with_a_built_in_model_ends_before_a_worker_is_started(
    tmp_path: Path, given: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--weights", str(tmp_path / "given.safetensors"), "--runs", str(tmp_path / "runs"), "--workers", "2")
    assert main(["train", "--dataset", "fashion-mnist-sample", *words]) == 2
    found = capsys.readouterr().err
    assert found.startswith("paceline: --weights") and "does not fit the model" in found
    assert not (tmp_path / "runs").exists()


def test_a_misfit_with_a_task_is_one_line_and_leaves_no_folder(tmp_path: Path, given: dict[str, torch.Tensor]) -> None:
    task = f"{Path(normed_task.__file__)}:plain"
    done = run("train", "--task", task, "--batch-size", "2", "--weights", "given.safetensors", cwd=tmp_path)
    assert done.process.returncode == 2
    assert done.err.count("paceline: ") == 1 and "does not fit the model" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()


def test_an_own_loop_loads_its_weights_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop.py").write_text("import paceline\nsession = paceline.join()\n")
    assert main(["run", "-n", "2", "--weights", "w.safetensors", str(tmp_path / "loop.py")]) == 2
    assert "your own loop loads its weights itself" in capsys.readouterr().err


def test_the_lab_and_forecasts_of_times_refuse_a_file(
    tmp_path: Path, given: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--weights", str(tmp_path / "given.safetensors"), "--runs", str(tmp_path / "runs"))
    assert main(["simulate", *words, "--timing-only", "--dataset", "fashion-mnist-sample"]) == 2
    assert "--timing-only has no weights to begin from" in capsys.readouterr().err
    from paceline.studies.batch_runs import why_not_in_lab

    config = resolve(RunConfig(weights=str(tmp_path / "given.safetensors"), dataset="fashion-mnist-sample"))
    assert "the lab draws its initial weights" in (why_not_in_lab(config) or "")


def test_a_task_is_not_built_without_the_weights_that_were_given() -> None:
    """A runtime that forgets to read the file would begin from other weights: it fails instead."""
    with pytest.raises(AssertionError, match="reads its --weights"):
        make_task(RunConfig(task=TASK, weights="w.safetensors", weights_sha256="0" * 64), None)
