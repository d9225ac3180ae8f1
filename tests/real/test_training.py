"""Whole runs by real processes: equal to one process bit for bit, replayable, and honest when they go wrong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import RunConfig
from paceline.data.datasets import load, locate
from paceline.models.lenet import LeNet5
from paceline.runs.folder import RunFolder
from tests.support.commands import Command, replays, result_of, run, wait_for_records

SAMPLE = ("--dataset", "fashion-mnist-sample", "--name", "it")


def serial_sync(workers: int, steps: int, seed: int) -> dict[str, torch.Tensor]:
    """The same batches averaged in worker order by a plain loop in this process."""
    from paceline.assembly.run import work_of
    from paceline.assembly.task import make_task
    from paceline.settings.resolve import resolve

    strategy = "sync" if workers > 1 else "classic"
    config = resolve(
        RunConfig(dataset="fashion-mnist-sample", strategy=strategy, workers=workers, seed=seed, threads=1, steps=steps)
    )
    dataset = load(locate(config.dataset, None))
    task = make_task(config, dataset)
    work = work_of(task, config)
    loaders = [task.loader(work.batches(worker, config), seed, worker) for worker in range(workers)]
    parameters = list(task.model.parameters())
    velocity = [torch.zeros_like(parameter) for parameter in parameters]
    lr, momentum = torch.tensor(config.lr), torch.tensor(config.momentum)
    for number in range(steps):
        batches = [loader.batch(number) for loader in loaders]
        total = sum(batch.samples for batch in batches)
        mean: list[torch.Tensor] = []
        alike = len({batch.samples for batch in batches}) == 1
        for batch in batches:
            task.model.zero_grad()
            task.loss(task.model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
            share = 1.0 if alike else batch.samples / total
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            mean = (
                [g * share for g in gradients]
                if not mean
                else [m.add(g, alpha=share) for m, g in zip(mean, gradients, strict=True)]
            )
        if alike:
            mean = [gradient / workers for gradient in mean]
        with torch.no_grad():
            for parameter, v, gradient in zip(parameters, velocity, mean, strict=True):
                torch.addcmul(gradient, v, momentum, out=v)
                parameter.addcmul_(v, lr, value=-1.0)
    return {name: parameter.detach() for name, parameter in task.model.named_parameters()}


def test_sync_on_processes_is_one_process_averaging_the_same_batches_bit_for_bit(tmp_path: Path) -> None:
    arguments = ("--strategy", "sync", "--workers", "3", "--steps", "140", "--threads", "1", "--seed", "5")
    command = run("train", *SAMPLE, *arguments, cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    trained = load_file(tmp_path / "runs/it/weights.safetensors")
    torch.set_num_threads(1)
    for name, expected in serial_sync(3, 140, seed=5).items():
        assert torch.equal(trained[name], expected), name


def test_classic_is_the_plain_loop_bit_for_bit_and_runs_twice_alike(tmp_path: Path) -> None:
    arguments = ("--strategy", "classic", "--steps", "60", "--threads", "1", "--seed", "9")
    hashes = set()
    for name in ("one", "two"):
        command = run("train", "--dataset", "fashion-mnist-sample", *arguments, "--name", name, cwd=tmp_path)
        assert command.process.returncode == 0, command.err
        hashes.add(result_of(tmp_path / "runs" / name)["weights_sha256"])
    assert len(hashes) == 1
    trained = load_file(tmp_path / "runs/one/weights.safetensors")
    torch.set_num_threads(1)
    assert all(torch.equal(trained[name], expected) for name, expected in serial_sync(1, 60, seed=9).items())


OWN = ("--epochs", "0.5", "--epoch-mode", "own", "--split", "labels")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--strategy", "async", "--workers", "2", "--epochs", "1", "--score", "test"),
        ("--strategy", "async", "--workers", "3", *OWN, "--score", "none"),
        ("--strategy", "backup:1", "--workers", "3", "--steps", "80", "--score", "none"),
        ("--workers", "2", "--model", "cnn", "--steps", "8", "--optimizer", "adam", "--score", "none"),
    ],
    ids=["async", "own-labels", "backup", "cnn-adam"],
)
def test_replay_gives_the_same_weights(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    command = run("train", *SAMPLE, *arguments, "--json", cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    assert json.loads(command.out) == RunFolder.open(tmp_path / "runs/it").result()
    assert replays(tmp_path / "runs/it")


def test_the_result_and_the_saved_weights_agree_with_plain_torch(tmp_path: Path) -> None:
    command = run("train", *SAMPLE, "--strategy", "async", "--epochs", "2", "--validation", "0.1", cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    result = result_of(tmp_path / "runs/it")
    model = LeNet5()
    model.load_state_dict(load_file(tmp_path / "runs/it/weights.safetensors"))
    dataset = load(locate("fashion-mnist-sample", None))
    images = (torch.from_numpy(dataset.test_images) / 255.0 - dataset.info.mean[0]) / dataset.info.std[0]
    correct = int((model(images).argmax(1) == torch.from_numpy(dataset.test_labels)).sum())
    assert abs(result["test_correct"] - correct) <= 2  # rounding may tip a tie
    assert (result["train_total"], result["epoch_samples"]) == (10_000, 10_800) and result["validation_total"] == 1_200
    assert result["data_is_sample"] is True
    for line in ("training time: ", "Average test accuracy: ", "on 10,000 of 10,800 samples"):
        assert line in command.out
    assert "'paceline data get fashion-mnist' fetches all 70,000" in command.err
    expected = "strategy workers split rule dataset model seed epochs batch_size updates samples train_seconds "
    expected += "samples_per_second train_accuracy train_loss test_accuracy test_loss per_class_accuracy staleness "
    expected += "dropped_pushes bytes_pushed bytes_pulled weights_sha256 status schema environment git"
    assert set(expected.split()) <= set(result)


def test_a_diverging_run_ends_with_code_3_and_says_what_to_change(tmp_path: Path) -> None:
    wild = ("--strategy", "async", "--rule", "plain", "--lr", "1e20", "--epochs", "50")  # 50 only kills the network
    command = run("train", *SAMPLE, *wild, cwd=tmp_path)
    assert command.process.returncode == 3
    last = command.err.strip().splitlines()[-1]
    assert (
        "training diverged at update" in last
        and "try --lr 0.005 (the default, now 1e+20)" in last
        and "or --rule auto" in last
    )
    assert result_of(tmp_path / "runs/it")["status"] == "diverged"
    assert "--recovery checkpoint goes back to its newest" in run("resume", "runs/it", cwd=tmp_path).err


def test_a_delay_on_purpose_makes_a_straggler(tmp_path: Path) -> None:
    arguments = ("--strategy", "async", "--workers", "2", "--steps", "300", "--delay", "normal:40ms,5ms@1")
    command = run("train", *SAMPLE, *arguments, cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    joins = [row for row in (tmp_path / "runs/it/events.jsonl").read_text().splitlines() if '"worker_joined"' in row]
    assert len(joins) == 2
    assert result_of(tmp_path / "runs/it")["staleness"]["max"] >= 3


def test_target_accuracy_ends_the_run_early_as_finished(tmp_path: Path) -> None:
    arguments = ("--strategy", "sync", "--epochs", "50", "--target-accuracy", "50", "--eval-every", "0.5")
    command = run("train", *SAMPLE, *arguments, cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    result = result_of(tmp_path / "runs/it")
    assert result["status"] == "finished" and result["test_accuracy"] >= 50.0
    assert result["reason"] == "target accuracy 50 % reached" and result["updates"] < 2000


def test_no_space_left_is_one_line_and_the_run_resumes_when_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        arguments = ("--strategy", "async", "--steps", "700", "--score", "none", "--runs", str(disk))
        command = run("train", *SAMPLE, *arguments, cwd=tmp_path)
        assert command.process.returncode == 2
        last = command.err.strip().splitlines()[-1]
        assert "no space is left" in last and "paceline resume" in last and "Traceback" not in command.err
        assert not (disk / "it/result.json").exists()
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert run("resume", str(disk / "it"), cwd=tmp_path).process.returncode == 0
        assert result_of(disk / "it")["updates"] == 700
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_nothing_is_left_in_shared_memory_or_among_descriptors(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    with Command(
        "train", *SAMPLE, "--strategy", "async", "--workers", "4", "--steps", "200", "--score", "none", cwd=tmp_path
    ) as command:
        wait_for_records(tmp_path / "runs/it", 10)
        descriptors = Path(f"/proc/{command.forked()[0]}/fd").iterdir()
        names = {str(path.readlink()) for path in descriptors}
        assert not any(name.startswith("/dev/shm") for name in names)
        assert command.finish() == 0
    assert set(Path("/dev/shm").iterdir()) == before
