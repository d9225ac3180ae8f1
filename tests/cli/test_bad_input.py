"""Every bad input: one clear line on standard error, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.data.datasets import BUILTIN_FOLDER

SAMPLE = ["--dataset", "fashion-mnist-sample"]
CASES = {
    "unknown dataset": (["--dataset", "fashon-mnist"], "unknown dataset 'fashon-mnist': did you mean 'fashion-mnist'"),
    "unknown model": (["--model", "lenet"], "unknown model 'lenet': did you mean 'lenet5'"),
    "unknown strategy": (["--strategy", "asink"], "unknown strategy 'asink': did you mean 'async'"),
    "unknown rule": (["--rule", "plane"], "unknown rule 'plane': did you mean 'plain'"),
    "a rule that needs to know its workers": (
        ["--rule", "foresight-cached", "--strategy", "sync"],
        "--rule foresight-cached: strategy sync averages the pushes of a round, and the rule has to know which",
    ),
    "a rule with an optimizer of another kind": (
        ["--rule", "dana", "--optimizer", "adam"],
        "which optimizer adam cannot replace",
    ),
    "a buffer of nothing": (["--rule", "buffered:0"], "rule 'buffered:0': the number after the colon"),
    "drop everything": (["--rule", "ringmaster:0"], "rule 'ringmaster:0': the number after the colon"),
    "unknown average": (["--average", "much"], "--average 'much': give auto, none, on or a number of updates"),
    "unknown codec": (["--codec", "int9"], "unknown codec 'int9': did you mean 'int8'"),
    "unknown codec of replies": (["--pull-codec", "lowrank:0"], "codec 'lowrank:0': the rank after the colon"),
    "a codec without a wire": (["--codec", "int8", "--strategy", "classic"], "strategy classic has no network"),
    "a codec on a ring": (
        ["--codec", "int8", "--strategy", "allreduce"],
        "compresses only between ranks that torchrun",
    ),
    "a codec of replies on a ring": (
        ["--pull-codec", "sign", "--strategy", "local:3"],
        "--pull-codec sign: strategy local:3 has no server that replies",
    ),
    "a codec within a GPU": ([*SAMPLE, "--codec", "int8", "--device", "cuda"], "have no network between them"),
    "less room than workers": (["--workers", "3", "--max-workers", "2"], "--max-workers 2 is below the --workers 3"),
    "room for more in a ring": (
        ["--strategy", "allreduce", "--max-workers", "3"],
        "is a ring, which no worker can join",
    ),
    "a run's name that no folder may have": (
        [*SAMPLE, "--name", "n" * 300],
        "--name has more than 255 bytes: use a shorter --name",
    ),
    "a value like a flag": (["--name", "-foo"], "a value that begins with a dash is taken for a flag: --name=-foo"),
    "an empty folder of runs": (["--runs", ""], "--runs is empty: folder that holds the runs"),
    "an empty file of settings": ([""], "RUN.toml is empty: file of settings"),
    "an empty tracker": (["--track", "csv", "--track", ""], "--track is empty"),
    "a script": (["train.py"], "train.py is a script, and a file of settings is TOML: 'paceline run train.py'"),
    "a folder of settings": (["."], ". cannot be read as TOML: it is a folder; give a TOML file"),
    "unknown flag": (["--stratgy", "sync"], "unknown flag '--stratgy': did you mean --strategy"),
    "unknown optimizer": (["--optimizer", "adm"], "unknown optimizer 'adm': did you mean 'adam'"),
    "unknown split": (["--split", "label"], "did you mean 'labels'"),
    "a second name for a split": (["--shard", "label"], "unknown split 'label': did you mean 'labels'"),
    "unknown augmentation": (["--augment", "flip"], "--augment 'flip': give auto, none, crop, mirror or crop,mirror"),
    "sentences that are mirrored": (
        ["--dataset", "sst5", "--model", "transformer", "--augment", "mirror"],
        "--augment mirror is for images, and dataset sst5 holds sentences",
    ),
    "longer sentences than the model reads": (
        ["--dataset", "sst5", "--model", "transformer", "--max-length", "257"],
        "--max-length 257: the transformer reads at most 256 words",
    ),
    "a model of images on sentences": (["--dataset", "sst5"], "choose --model transformer, or another dataset"),
    "a data set that is not here": (
        ["--dataset", "imagenet", "--data-dir", "."],
        "does not hold it: give --data-dir a folder of your own with train/CLASS",
    ),
    "an augmented task of one's own": (["--task", "a:b", "--augment", "crop"], "is for built-in data sets"),
    "unknown schedule": (["--schedule", "cosin"], "unknown schedule 'cosin': did you mean 'cosine'"),
    "no workers": ([*SAMPLE, "--workers", "0"], "--workers must be at least 1, got 0"),
    "fewer than no workers": ([*SAMPLE, "--workers", "-3"], "--workers must be at least 1, got -3"),
    "more workers than batches": ([*SAMPLE, "--workers", "376"], "make only 375 batches of 32"),
    "lr zero": (["--lr", "0"], "--lr must be a positive number, got 0.0"),
    "lr negative": (["--lr", "-0.1"], "--lr must be a positive number, got -0.1"),
    "lr not a number": (["--lr", "nan"], "--lr must be a positive number, got nan"),
    "lr infinite": (["--lr", "inf"], "--lr must be a positive number, got inf"),
    "lr a word": (["--lr", "fast"], "argument --lr: 'fast' is not a number"),
    "batch larger than a shard": ([*SAMPLE, "--batch-size", "7000"], "7000"),
    "a split that leaves a worker empty": (
        [*SAMPLE, "--split", "dirichlet:0.0001", "--workers", "30"],
        "leaves worker",
    ),
    "bounded below zero": (["--strategy", "bounded:-1"], "strategy 'bounded:-1'"),
    "bounded without a number": (["--strategy", "bounded"], "write bounded:S"),
    "backup with nobody left": (["--strategy", "backup:2", "--workers", "2"], "would leave no worker to wait for"),
    "classic with two": (["--strategy", "classic", "--workers", "2"], "strategy classic is one worker"),
    "a device that is absent": ([*SAMPLE, "--device", "cuda"], "no CUDA device"),
    "an unknown device": (["--device", "tpu"], "unknown device 'tpu'"),
    "no such data folder": (["--data-dir", "/nowhere/at/all"], "/nowhere/at/all"),
    "no such settings file": (["missing.toml"], "no file missing.toml"),
    "a delay for nobody": (["--delay", "3ms@7"], "no worker '7'"),
    "a delay without a unit": (["--delay", "30"], "is not a time"),
    "a bad weight": ([*SAMPLE, "--shard-weights", "1,-1"], "weight"),
    "a run name with a slash": ([*SAMPLE, "--name", "a/b"], "is not a folder name"),
    "a task that is not there": (["--task", "nowhere:build", "--strategy", "classic"], "no module 'nowhere'"),
    "a task without a function": (["--task", "build", "--strategy", "classic"], "MODULE:FUNCTION"),
    "a fold that is none": (["--fold", "6/5"], "fold '6/5': write its number and how many folds there are, as in 2/5"),
    "a fold and a share": (["--fold", "1/5", "--validation", ".1"], "holds out a part already"),
    "more folds than samples": ([*SAMPLE, "--fold", "1/12001"], "use fewer folds"),
    "no checkpoint kept": (["--keep", "0"], "--keep must be at least 1, got 0"),
    "fewer restarts than none": (["--restart", "-1"], "--restart must be zero or more, got -1"),
    "a restart of this very process": (
        [*SAMPLE, "--strategy", "classic", "--restart", "2"],
        "--restart 2: strategy classic trains in the process of this command, which nothing starts again",
    ),
    "workers of this very process": (
        [*SAMPLE, "--strategy", "classic", "--restart-workers", "2"],
        "--restart-workers 2: strategy classic has no worker processes",
    ),
    "workers that return to a ring": (
        [*SAMPLE, "--strategy", "allreduce", "--restart-workers", "2"],
        "--restart-workers 2: strategy allreduce is a ring, which no worker can join again",
    ),
    "an unknown recovery": (["--recovery", "checkpoints"], "unknown recovery 'checkpoints': did you mean 'checkpoint'"),
    "target without evaluation": (["--target-accuracy", "90"], "add --eval-every"),
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that was printed."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("paceline: ")]
    assert len(lines) == 1, lines
    return lines[0]


FOUND_IN_DATA = (
    "a data set that is not here",
    "no such data folder",
    "more workers than batches",
    "batch larger than a shard",
    "a split that leaves a worker empty",
    "a bad weight",
    "more folds than samples",
)
"""Mistakes that only the data shows: it is searched and decoded while the first process imports torch."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that the command starts; all must have ended when it returns."""
    processes: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    yield processes
    assert all(process.returncode is not None for process in processes)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line_and_exit_code_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[subprocess.Popen[bytes]]
) -> None:
    arguments, expected = CASES[name]
    assert main(["train", *arguments]) == 2
    assert expected in complaint(capsys)
    assert not list(tmp_path.glob("runs/*"))
    assert not started or name in FOUND_IN_DATA


def test_an_unknown_verb_offers_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "unknown verb 'trian': did you mean 'train'" in complaint(capsys)


@pytest.mark.parametrize("strategy", ["classic", "async"])
@pytest.mark.usefixtures("started")
def test_a_run_folder_that_exists_is_not_touched(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/notes").write_text("keep me")
    assert main(["train", *SAMPLE, "--strategy", strategy, "--name", "mine"]) == 2
    assert "runs/mine exists already" in complaint(capsys)
    assert (tmp_path / "runs/mine/notes").read_text() == "keep me"


@pytest.mark.parametrize("strategy", ["classic", "async"])
@pytest.mark.usefixtures("started")
def test_a_run_folder_that_cannot_be_made(strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["train", *SAMPLE, "--strategy", strategy, "--runs", "file"]) == 2
    assert "cannot be written: Not a directory; try --runs DIR" in complaint(capsys)


@pytest.mark.parametrize("harm", ["missing", "truncated", "corrupted"])
def test_a_harmed_data_file_is_named(tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(BUILTIN_FOLDER, tmp_path / "data")
    file = tmp_path / "data/train-images-idx3-ubyte.gz"
    if harm == "missing":
        file.unlink()
    elif harm == "truncated":
        file.write_bytes(file.read_bytes()[:100_000])
    else:
        file.write_bytes(gzip.compress(b"\0\0\x08\x03" + b"\xff" * 100))
    assert main(["train", "--strategy", "async", "--dataset", "fashion-mnist", "--data-dir", "data"]) == 2
    line = complaint(capsys)
    assert "fashion-mnist" in line and "paceline data get" in line
    assert not list(tmp_path.glob("runs/*"))


def test_a_wrong_type_in_a_settings_file_names_file_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text('lr = "fast"\n')
    assert main(["train", "run.toml"]) == 2
    assert 'run.toml: lr = "fast": write a number' in complaint(capsys)
    (tmp_path / "run.toml").write_text("learning_rate = 0.1\n")
    assert main(["train", "run.toml"]) == 2
    assert "unknown setting 'learning_rate'" in complaint(capsys)


@pytest.mark.parametrize("verb", ["resume", "replay", "compare"])
def test_a_folder_that_is_no_run(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "runs/nothing"]) == 2
    assert "runs/nothing is not a run folder: it does not exist" in complaint(capsys)


def test_a_replay_in_another_folder_needs_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--strategy", "classic", "--steps", "2", "--score", "none", "--name", "r"]
    assert main(["train", *SAMPLE, *flags]) == 0
    capsys.readouterr()
    assert main(["replay", "runs/r", "--in", "."]) == 2
    assert "--in . is for a script of 'paceline run', and runs/r has none: leave it out" in complaint(capsys)


def test_a_script_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", "nothing.py"]) == 2
    assert "script nothing.py does not exist" in complaint(capsys)
    assert main(["run", "-n", "2"]) == 2
    assert "which script?" in complaint(capsys)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--path ring", "--path ring: your own loop exchanges with a server: leave it out"),
        ("--strategy allreduce --max-workers 3", "--max-workers 3: strategy allreduce is a fixed group, which no"),
        ("--strategy allreduce --stall 9", "--stall 9: strategy allreduce is a fixed group, which no worker can leave"),
        ("--strategy allreduce --path star", "--path star: strategy allreduce is an exchange around a ring"),
        ("--strategy classic -n 1 --codec int8", "--codec int8: strategy classic has no network"),
        ("--max-workers 1", "--max-workers 1 is below the --workers 2 that begin"),
    ],
)
def test_what_a_script_cannot_have(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, why: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text("")
    assert main(["run", "-n", "2", *flags.split(), str(script)]) == 2
    assert why in complaint(capsys)
    assert not list(tmp_path.glob("runs/*"))


def test_too_little_memory_is_found_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.system.memory.available_memory", lambda: 1 << 20)
    assert main(["train", *SAMPLE, "--strategy", "async"]) == 2
    assert "needs 9 MiB of shared memory, 1 MiB are free" in complaint(capsys)
    assert not list(tmp_path.glob("runs/*"))
