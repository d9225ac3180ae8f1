"""The CIFAR-10 reader: archives, folders, the decoded copy, and pickles that ask for more than data."""

from __future__ import annotations

import os
import pickle
import random
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.data import cifar, decoding
from paceline.data.datasets import Dataset, cache_folder, load, locate
from paceline.errors import DataError
from tests.support.data_files import cifar_batches, tar_of


def write_archive(folder: Path, members: dict[str, bytes], mode: str = "gz") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cifar-10-python.tar.{mode}"
    path.write_bytes(tar_of(members, mode))
    return path


def read(folder: Path) -> Dataset:
    return load(locate("cifar10", folder))


def same(left: Dataset, right: Dataset) -> bool:
    names = ("train_images", "train_labels", "test_images", "test_labels")
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


def test_archives_and_folder_agree(tmp_path: Path) -> None:
    members = cifar_batches()
    write_archive(tmp_path / "gz" / "cifar10", members, "gz")
    write_archive(tmp_path / "xz" / "cifar-10", members, "xz")
    unpacked = tmp_path / "unpacked" / "cifar-10-batches-py"
    unpacked.mkdir(parents=True)
    for name, content in members.items():
        (unpacked / name).write_bytes(content)
    whole = read(tmp_path / "gz")
    assert whole.train_images.shape == (50, 3, 32, 32) and whole.test_images.shape == (10, 3, 32, 32)
    first = pickle.loads(members["data_batch_1"])["data"]
    assert np.array_equal(whole.train_images[:10].reshape(10, 3072), first)
    for place in (tmp_path / "xz", tmp_path / "unpacked", unpacked):
        assert same(whole, read(place))


def test_python_2_pickle_is_read() -> None:
    """The opcodes Python 2 wrote: byte strings as keys and as array content."""
    rows = bytes(range(256)) * 12
    content = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(rows).to_bytes(4, "little")
        + rows
        + b"tbU\x06labels](K\x07eu."
    )
    images, labels = cifar._batch(content, "here", "do this")
    assert images.tobytes() == rows and labels == [7]


def test_second_load_uses_the_decoded_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_archive(tmp_path / "data", cifar_batches())
    first = read(tmp_path / "data")
    with monkeypatch.context() as patched:
        patched.setattr(cifar, "read", None)
        assert same(first, read(tmp_path / "data"))
    write_archive(tmp_path / "data", cifar_batches(per_batch=20))
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 10**9))
    assert len(read(tmp_path / "data").train_images) == 100
    assert len(list((cache_folder() / "decoded").iterdir())) == 1


def test_damaged_decoded_copy_is_made_again(tmp_path: Path) -> None:
    write_archive(tmp_path / "data", cifar_batches())
    first = read(tmp_path / "data")
    (kept,) = (cache_folder() / "decoded").iterdir()
    (kept / "train_images.npy").write_bytes((kept / "train_images.npy").read_bytes()[:-9])
    assert same(first, read(tmp_path / "data"))
    assert decoding.load_cached(cache_folder(), tmp_path / "data" / "cifar-10-python.tar.gz", np.empty) is not None


def test_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_archive(tmp_path / "data", cifar_batches())
    assert len(read(tmp_path / "data").train_images) == 50


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_hostile_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    members = cifar_batches()
    members["data_batch_3"] = pickle.dumps(Hostile(tmp_path / "owned"), protocol=2)
    write_archive(tmp_path / "data", members)
    with pytest.raises(DataError, match=r"data_batch_3.*mkdir.*paceline data get cifar10"):
        read(tmp_path / "data")
    assert not (tmp_path / "owned").exists()


BAD_BATCHES = {
    "no data": ({"labels": [1]}, "pickled CIFAR-10 batch"),
    "not a dict": ([1, 2], "pickled CIFAR-10 batch"),
    "wrong width": ({"data": np.zeros((2, 3000), np.uint8), "labels": [1, 2]}, "shape"),
    "not bytes": ({"data": np.zeros((2, 3072), np.float32), "labels": [1, 2]}, "not plain bytes"),
    "too few labels": ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "2 labels"),
    "label out of range": ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, "0 to 9, found 10"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_bad_batches(tmp_path: Path, case: str) -> None:
    content, said = BAD_BATCHES[case]
    members = cifar_batches()
    members["test_batch"] = pickle.dumps(content, protocol=2)
    write_archive(tmp_path / "data", members)
    with pytest.raises(DataError, match=f"test_batch.*{said}"):
        read(tmp_path / "data")


@pytest.mark.parametrize("content", [b"\x80\x02}r\x00\x00\x00\x7f.", b"\x80\x05\x96" + b"\xff" * 5 + b"\0\0\0."])
def test_pickle_that_wants_gigabytes_is_refused_at_once(content: bytes) -> None:
    with pytest.raises(DataError, match="pickled CIFAR-10 batch"):
        cifar._batch(content, "here", "do this")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the standard library warns of odd escapes in random text
def test_random_damage_is_always_a_data_error() -> None:
    whole = cifar_batches(per_batch=1)["test_batch"]
    generator = random.Random(0)
    for _ in range(500):
        content = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            content[generator.choice([generator.randrange(200), generator.randrange(len(content))])] ^= (
                1 << generator.randrange(8)
            )
        try:
            cifar._batch(
                bytes(content[: generator.choice([len(content), generator.randrange(len(content))])]), "x", "y"
            )
        except DataError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("mode", ["gz", "xz"])
def test_truncated_and_corrupted_archives(tmp_path: Path, mode: str) -> None:
    path = write_archive(tmp_path / "data", cifar_batches(), mode)
    whole = path.read_bytes()
    corrupted = bytearray(whole)
    corrupted[len(whole) // 2] ^= 0xFF
    for content in (whole[: len(whole) // 2], whole[:-6], bytes(corrupted), b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cifar-10-python.*paceline data get cifar10"):
            read(tmp_path / "data")


def test_missing_batch(tmp_path: Path) -> None:
    members = cifar_batches()
    del members["data_batch_5"]
    write_archive(tmp_path / "data", members)
    with pytest.raises(DataError, match="none named data_batch_5"):
        read(tmp_path / "data")
