"""One thread for torch, so that tests neither fight for cores nor depend on how many there are; and small data sets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from paceline.data.datasets import DATASETS, Dataset, Location

settings.register_profile("paceline", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("paceline")

collect_ignore_glob = ["*conftest.py"]  # they hold no doctests, and two of one name cannot be collected as modules

MakeDataset = Callable[..., Dataset]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Before each test, since a run in this process sets its own count."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


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
