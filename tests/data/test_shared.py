"""What one process decodes another attaches: the same arrays and the same facts, through JSON and descriptors."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.data.datasets import DecodingOptions, Location, locate
from paceline.data.shared import SharedDataset, attach
from tests.support.data_files import write_images, write_trees


def trees(folder: Path) -> Location:
    return replace(locate("sst5", write_trees(folder)), reading=DecodingOptions(max_length=3))


def pictures(folder: Path) -> Location:
    pytest.importorskip("PIL")
    write_images(folder / "train", {"a": 3, "b": 2})
    (folder / "train" / "a" / "picture_001.JPEG").write_bytes(b"no image")
    write_images(folder / "val", {"a": 1})
    return replace(locate("imagenet", folder), reading=DecodingOptions(image_size=14))


@pytest.mark.parametrize("make", [trees, pictures])
def test_another_process_sees_the_same(tmp_path: Path, make: object) -> None:
    shared = SharedDataset(make(tmp_path))  # type: ignore[operator]
    found = attach(json.loads(json.dumps(shared.spec())), [os.dup(fd) for fd in shared.fds])
    assert found.info == shared.dataset.info and found.location == shared.dataset.location
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        one, other = getattr(found, name), getattr(shared.dataset, name)
        assert np.array_equal(one, other) and one.dtype == other.dtype
    found.train_labels[0] = 4
    assert shared.dataset.train_labels[0] == 4, "it is the same memory"
