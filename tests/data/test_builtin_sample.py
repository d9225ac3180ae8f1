"""The sample that ships: real, balanced, small, with its licence."""

from __future__ import annotations

import numpy as np

from paceline.data.datasets import BUILTIN_FOLDER, DATASETS, load, locate


def test_sample_is_balanced_and_of_the_stated_size() -> None:
    sample = load(locate("fashion-mnist-sample", None))
    info = DATASETS["fashion-mnist-sample"]
    assert sample.train_images.shape == (info.train_size, 1, 28, 28) == (12_000, 1, 28, 28)
    assert sample.test_images.shape == (info.test_size, 1, 28, 28) == (2_000, 1, 28, 28)
    assert np.bincount(sample.train_labels).tolist() == [1_200] * 10
    assert np.bincount(sample.test_labels).tolist() == [200] * 10


def test_sample_has_the_constants_of_the_whole() -> None:
    sample = load(locate("fashion-mnist-sample", None))
    pixels = sample.train_images / np.float32(255)
    assert abs(float(pixels.mean()) - sample.info.mean[0]) < 0.002
    assert abs(float(pixels.std()) - sample.info.std[0]) < 0.002


def test_sample_starts_as_the_official_files_do() -> None:
    sample = load(locate("fashion-mnist-sample", None))
    assert sample.train_labels[:8].tolist() == [9, 0, 0, 3, 0, 2, 7, 2]
    assert sample.test_labels[:8].tolist() == [9, 2, 1, 1, 6, 1, 4, 6]


def test_sample_is_small_and_licensed() -> None:
    assert sum(path.stat().st_size for path in BUILTIN_FOLDER.iterdir()) <= 7_000_000
    assert "Copyright (c) 2017 Zalando SE" in (BUILTIN_FOLDER / "LICENSE").read_text()
    assert len(list(BUILTIN_FOLDER.glob("*.gz"))) == 4
