"""Sentences and folders of images through the command line: trained by real processes, and again from the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import replays, result_of, run
from tests.support.data_files import write_images, write_trees

PACE = ("--strategy", "sync", "--workers", "2", "--batch-size", "4", "--steps", "2", "--name", "it")


def test_sentences_train_the_transformer(tmp_path: Path) -> None:
    data = ("--dataset", "sst5", "--data-dir", str(write_trees(tmp_path / "trees")), "--max-length", "1")
    command = run("train", *data, *PACE, "--model", "transformer", "--optimizer", "adam", cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    (line,) = [line for line in command.err.splitlines() if "were truncated" in line]
    assert line.startswith("sst5: 8,544 of 8,544 train and 2,210 of 2,210 test sentences are longer")
    result = result_of(tmp_path / "runs/it")
    assert (result["updates"], result["status"], result["test_total"]) == (2, "finished", 2_210)
    assert "very negative" in command.out


def test_a_folder_of_images_is_decoded_augmented_and_replayed(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = write_images(tmp_path / "pictures", {"a": 20, "b": 20})
    (folder / "a" / "picture_000.JPEG").write_bytes(b"no image")
    data = ("--dataset", "imagenet", "--data-dir", str(folder), "--image-size", "28")
    command = run("train", *data, *PACE, cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    assert "1 of 40 images do not decode and are skipped" in command.err and "picture_000.JPEG" in command.err
    assert result_of(tmp_path / "runs/it")["updates"] == 2
    assert 'augment = "crop,mirror"' in (tmp_path / "runs/it/config.toml").read_text()
    assert replays(tmp_path / "runs/it")
