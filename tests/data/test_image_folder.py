"""A folder of class folders: what is found, what is refused, what is skipped, and what becomes of the pixels."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data import decoding, image_folder
from paceline.data.datasets import Dataset, DecodingOptions, load, locate
from paceline.data.download import status
from paceline.errors import DataError, RunFailed, UserError
from paceline.system import memory
from tests.support.data_files import write_images

pytest.importorskip("PIL")
SIZES = {"cat": 3, "dog": 2}


def folder_of(place: Path) -> Path:
    write_images(place / "train", SIZES)
    write_images(place / "val", {"dog": 1})
    return place


def read(folder: Path, rows: list[dict[str, Any]] | None = None, size: int = 14) -> Dataset:
    location = replace(locate("imagenet", folder), reading=DecodingOptions(image_size=size))
    return load(location, report=(rows if rows is not None else []).append)


def test_classes_are_folders_and_images_are_squares_larger_than_they_are_seen(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    found = read(folder_of(tmp_path / "data"), rows)
    assert found.info.classes == ("cat", "dog") and found.info.image_shape == (3, 14, 14)
    assert found.train_images.shape == (5, 3, 16, 16) and found.train_images.dtype == np.uint8
    assert found.train_labels.tolist() == [0, 0, 0, 1, 1] and found.test_labels.tolist() == [1]
    assert (found.info.train_size, found.info.test_size) == (5, 1)
    assert [row["fraction"] for row in rows] == [5 / 6, 1.0] and rows[-1]["text"] == "decoded 6 of 6 images"
    assert DecodingOptions().stored_size == 256


@pytest.mark.parametrize("layout", [".", "imagenet", "ILSVRC2012"])
def test_layouts(tmp_path: Path, layout: str) -> None:
    folder_of(tmp_path / "data" / layout)
    found = locate("imagenet", tmp_path / "data")
    assert (found.path, found.kind) == (tmp_path / "data" / layout, "folder")


def test_one_folder_is_divided_by_class_and_said(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    found = read(write_images(tmp_path / "data", {"a": 10, "b": 20}), rows)
    assert np.bincount(found.train_labels).tolist() == [9, 18] and np.bincount(found.test_labels).tolist() == [1, 2]
    assert rows[0]["kind"] == "note" and "3 of 30 images, a tenth of each class, are the test set" in rows[0]["text"]


def test_the_middle_is_kept_and_grey_and_transparent_images_are_coloured(tmp_path: Path) -> None:
    from PIL import Image

    folder = write_images(tmp_path / "data" / "train", {"a": 0})
    stripes = np.zeros((16, 48, 3), np.uint8)
    stripes[:, 16:32] = (200, 100, 50)
    Image.fromarray(stripes).save(folder / "a" / "1.png")
    Image.fromarray(np.full((32, 32), 77, np.uint8)).save(folder / "a" / "2.JPG", quality=95)
    Image.new("RGBA", (20, 16), (9, 8, 7, 0)).save(folder / "a" / "3.png")
    write_images(tmp_path / "data" / "val", {"a": 1})
    found = read(tmp_path / "data").train_images
    assert np.array_equal(found[0], np.broadcast_to(np.array([200, 100, 50])[:, None, None], (3, 16, 16)))
    assert (found[1] == 77).all() and (found[2] == np.array([9, 8, 7])[:, None, None]).all()


def test_images_that_do_not_decode_are_named_counted_and_skipped(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data")
    whole = (folder / "train" / "cat" / "picture_000.JPEG").read_bytes()
    (folder / "train" / "cat" / "picture_000.JPEG").write_bytes(whole[: len(whole) // 2])
    for number in range(4):
        (folder / "train" / "dog" / f"a{number}.jpg").write_bytes(b"no image")
    rows: list[dict[str, Any]] = []
    found = read(folder, rows)
    assert found.train_labels.tolist() == [0, 0, 1, 1] and len(found.train_images) == 4 == found.info.train_size
    text = rows[-1]["text"]
    assert "5 of 10 images do not decode and are skipped" in text and text.endswith("and 2 more")
    assert "picture_000.JPEG (OSError: " in text and "\n" not in text


def test_none_that_decodes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data")
    (folder / "val" / "dog" / "picture_000.JPEG").write_bytes(b"")
    with pytest.raises(DataError, match="none of 1 images decodes"):
        read(folder)


def test_bad_folders(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data")
    (folder / "train" / "empty").mkdir()
    (folder / "train" / "empty" / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"train/empty: an empty class folder \(no .jpeg, .jpg, .png in it\)"):
        read(folder)
    (folder / "train" / "empty").rename(tmp_path / "elsewhere")
    write_images(folder / "val", {"fox": 1})
    with pytest.raises(DataError, match=r"val/fox: a class that .*train does not have"):
        read(folder)
    flat = folder_of(tmp_path / "flat")
    (flat / "val" / "dog").rename(flat / "dog")
    with pytest.raises(DataError, match="expected a folder for each class, found none"):
        read(flat)


def test_what_is_not_there_is_explained(tmp_path: Path) -> None:
    (tmp_path / "asked" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"without .*val\) does not hold it.*train/CLASS"):
        locate("imagenet", tmp_path / "asked")
    with pytest.raises(DataError, match=r"in none of .*give --data-dir a folder of your own"):
        locate("imagenet", None)


def test_too_many_images_for_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 6 * 3 * 12 * 12)
    with pytest.raises(DataError, match=r"6 images of 16x16 need 0.0 GiB .*--image-size 10 or smaller"):
        read(folder_of(tmp_path / "data"))
    assert read(tmp_path / "data", size=10).train_images.shape[2] <= 12


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "data")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UserError, match=r"pip install 'paceline\[images\]'"):
        read(folder)


def test_the_list_counts_them(tmp_path: Path) -> None:
    rows = {row.name: row for row in status(folder_of(tmp_path / "data"))}
    assert (rows["imagenet"].train_size, rows["imagenet"].test_size, rows["imagenet"].found) == (5, 1, True)


@pytest.mark.real
def test_processes_decode_what_one_decodes_in_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_images(tmp_path / "data" / "train", {"a": 9, "b": 8})
    (folder / "a" / "picture_003.JPEG").write_bytes(b"no image")
    images = image_folder.list_images(folder).train
    here = decoding.decode(images, 16, np.empty, decoding.Skipped(), lambda done: None)
    monkeypatch.setattr(decoding, "CHUNK", 2)
    monkeypatch.setattr(decoding, "PROCESSES_THRESHOLD", 1)
    monkeypatch.setattr(decoding.os, "sched_getaffinity", lambda pid: {0, 1})
    skipped, done = decoding.Skipped(), list[int]()
    there = decoding.decode(images, 16, np.empty, skipped, done.append)
    assert all(np.array_equal(one, other) for one, other in zip(here, there, strict=True))
    assert skipped.count == 1 and done[-1] == len(images) and done == sorted(done)


@pytest.mark.real
def test_a_decoder_that_dies_is_one_line_and_no_hang(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "data", {"a": 1})
    decoder = decoding._Decoder()
    try:
        decoder.process.kill()
        with pytest.raises(RunFailed, match="a process that decoded images died"):
            decoder.fill([str(folder / "a" / "picture_000.JPEG")], np.empty((1, 3, 16, 16), np.uint8))
    finally:
        decoder.kill()
