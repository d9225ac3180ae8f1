"""The idx reader: sound files in every form, and one clear error for every unsound one."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.data import idx
from paceline.data.datasets import Dataset, load, locate
from paceline.errors import DataError
from tests.support.data_files import Write, idx_bytes, idx_contents

TRAIN_IMAGES = "train-images-idx3-ubyte.gz"
TRAIN_LABELS = "train-labels-idx1-ubyte.gz"


def read(folder: Path) -> Dataset:
    return load(locate("mnist", folder))


@pytest.mark.parametrize("packed", [True, False])
def test_files_of_any_size_load(tmp_path: Path, write_idx: Write, packed: bool) -> None:
    found = read(write_idx(tmp_path / "data", packed=packed, num_train=600, num_test=50))
    content = idx_contents(num_train=600, num_test=50)["train-images-idx3-ubyte"]
    assert found.train_images.shape == (600, 1, 28, 28) and found.train_images.dtype == np.uint8
    assert found.train_images.tobytes() == content[16:]
    assert found.test_labels.dtype == np.int64 and found.test_labels.tolist() == [k % 10 for k in range(50)]


def test_decodes_into_the_arrays_it_is_given(tmp_path: Path, write_idx: Write) -> None:
    made = []

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        made.append(np.empty(shape, dtype))
        return made[-1]

    found = load(locate("mnist", write_idx(tmp_path / "data")), empty)
    arrays = [found.train_images, found.train_labels, found.test_images, found.test_labels]
    assert {id(array) for array in arrays} == {id(array) for array in made}


def test_several_gzip_streams_in_one_file_load(tmp_path: Path, write_idx: Write) -> None:
    folder = write_idx(tmp_path / "data")
    content = gzip.decompress((folder / TRAIN_IMAGES).read_bytes())
    (folder / TRAIN_IMAGES).write_bytes(gzip.compress(content[:1000]) + gzip.compress(content[1000:]))
    assert read(folder).train_images.tobytes() == content[16:]


def repacked(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda packed: gzip.compress(change(gzip.decompress(packed)))


def flipped(packed: bytes) -> bytes:
    middle = len(packed) // 2
    return packed[:middle] + bytes([packed[middle] ^ 0x55]) + packed[middle + 1 :]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "truncated gz": (TRAIN_IMAGES, lambda packed: packed[:-500], "whole gzip stream"),
    "missing trailer": (TRAIN_IMAGES, lambda packed: packed[:-4], "whole gzip stream"),
    "empty file": (TRAIN_LABELS, lambda packed: b"", "found 0 bytes|whole gzip stream"),
    "flipped bits": (TRAIN_IMAGES, flipped, "expected"),
    "wrong crc": (TRAIN_IMAGES, lambda packed: packed[:-8] + b"\0\0\0\0" + packed[-4:], "sound gzip stream"),
    "not gzip": (TRAIN_IMAGES, lambda packed: b"<html>" * 100, "sound gzip stream"),
    "garbage behind": (TRAIN_IMAGES, lambda packed: packed + b"more", "sound gzip stream"),
    "wrong magic": (TRAIN_IMAGES, repacked(lambda raw: b"\0\0\x0d\x03" + raw[4:]), "idx magic 0x00000803.*0x00000d03"),
    "labels for images": (TRAIN_IMAGES, repacked(lambda raw: idx_bytes(np.zeros(60))), "idx magic"),
    "short content": (TRAIN_IMAGES, repacked(lambda raw: raw[:-1]), "47040 bytes after the header, found 47039"),
    "long content": (TRAIN_IMAGES, repacked(lambda raw: raw + b"x"), "47040 bytes after the header"),
    "short header": (TRAIN_IMAGES, repacked(lambda raw: raw[:9]), "header of 16 bytes, found 9"),
    "wrong image size": (TRAIN_IMAGES, repacked(lambda raw: idx_bytes(np.zeros((60, 27, 28)))), "28x28.*27x28"),
    "fewer images": (TRAIN_IMAGES, repacked(lambda raw: idx_bytes(np.zeros((59, 28, 28)))), "60 images.*found 59"),
    "label out of range": (
        TRAIN_LABELS,
        repacked(lambda raw: raw[:-1] + b"\x0a"),
        "labels from 0 to 9, found label 10",
    ),
    "no labels": (TRAIN_LABELS, repacked(lambda raw: idx_bytes(np.zeros(0))), "content for 0 items"),
    "absurd count": (
        TRAIN_LABELS,
        repacked(lambda raw: raw[:4] + b"\xff" * 4 + raw[8:]),
        "content for 4294967295 items",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_clear_error(tmp_path: Path, write_idx: Write, damage: str) -> None:
    name, change, said = DAMAGES[damage]
    folder = write_idx(tmp_path / "data")
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    with pytest.raises(DataError, match=said) as caught:
        read(folder)
    message = str(caught.value)
    assert str(folder / name) in message and "paceline data get mnist" in message and "\n" not in message


def test_truncated_unpacked_file_takes_no_memory(tmp_path: Path, write_idx: Write) -> None:
    folder = write_idx(tmp_path / "data", packed=False)
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])

    def no_memory(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        raise AssertionError("memory was taken")

    with pytest.raises(DataError, match="content for 60 items"):
        load(locate("mnist", folder), no_memory)


def test_a_small_piece_of_gzip_is_inflated_in_small_pieces() -> None:
    """Else one megabyte of a bomb would take a gigabyte of memory."""
    content = bytes(1 << 24)
    packed = gzip.compress(content) + gzip.compress(b"a second stream")
    pieces = list(idx.inflate(iter([packed])))
    assert max(map(len, pieces)) <= 1 << 16 and b"".join(pieces) == content + b"a second stream"
