"""One thread for torch, so that tests neither fight for cores nor depend on how many there are; and small data sets."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from paceline.data import datasets, idx
from paceline.data.datasets import DATASETS, SAMPLE, Dataset, Location, load, locate

settings.register_profile("paceline", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("paceline")

SMALL_TRAIN, SMALL_TEST = 240, 40
MakeDataset = Callable[..., Dataset]


@pytest.fixture(scope="session", autouse=True)
def own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sign run folders with a key of these tests, not of the user who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_columns() -> Iterator[None]:
    """Forget the COLUMNS that pytest's import of readline sets for child processes: lines would be folded to them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        os.unsetenv("COLUMNS")  # readline sets it past os.environ
        yield


@pytest.fixture(autouse=True)
def plain_arithmetic() -> None:
    """One thread, and subnormal floats (hypothesis draws them), before each test: a run in this process sets both."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)
        torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def make_dataset() -> MakeDataset:
    """Random images that fit a built-in model; the same for the same arguments."""

    def make(num_train: int = 60, num_test: int = 20, name: str = "fashion-mnist", seed: int = 0) -> Dataset:
        generator = np.random.default_rng(seed)
        info = replace(DATASETS[name], train_size=num_train, test_size=num_test)

        def images(count: int) -> np.ndarray:
            return generator.integers(0, 256, (count, *info.image_shape), dtype=np.uint8)

        def labels(count: int) -> np.ndarray:
            return generator.permutation(np.arange(count) % len(info.classes)).astype(np.int64)

        location = Location(name, "idx", Path("nowhere"), "test", False)
        return Dataset(info, location, images(num_train), labels(num_train), images(num_test), labels(num_test))

    return make


@pytest.fixture(scope="session")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first images of the built-in sample as idx files."""
    folder, whole = tmp_path_factory.mktemp("sample"), load(locate(SAMPLE, None))
    parts = {"train": (whole.train_images, whole.train_labels), "t10k": (whole.test_images, whole.test_labels)}
    for split, (images, labels) in parts.items():
        count = SMALL_TRAIN if split == "train" else SMALL_TEST
        pixels = struct.pack(">IIII", 0x0803, count, 28, 28) + images[:count].tobytes()
        (folder / idx.IMAGES.format(split)).write_bytes(pixels)
        classes = struct.pack(">II", 0x0801, count) + labels[:count].astype(np.uint8).tobytes()
        (folder / idx.LABELS.format(split)).write_bytes(classes)
    return folder


@pytest.fixture
def small_sample(small_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in sample is small, and no other data set is to be found."""
    monkeypatch.setattr(datasets, "BUILTIN_FOLDER", small_files)
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    monkeypatch.setenv("PACELINE_SYSTEM_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))
