"""SST-5: leaves, words to ids, sentences that are too long, and everything that can be wrong with its files."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.data import sources
from paceline.data import sst as treebank
from paceline.data.datasets import Dataset, DecodingOptions, load, locate
from paceline.data.sources import RemoteFile, fault
from paceline.errors import DataError
from tests.support.data_files import tree_files, write_trees


def read(folder: Path, max_length: int = 64) -> Dataset:
    return load(replace(locate("sst5", folder), reading=DecodingOptions(max_length=max_length)))


def zipped(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"trees/{name}", content)
    return target.getvalue()


def test_a_leaf_is_read_up_to_its_bracket() -> None:
    line = "(4 (2 (2 8\u00a01\\/2) (2 women)) (3 (2 -LRB-) (2 !)))"
    assert treebank.tree(line) == (4, ["8\u00a01\\/2", "women", "-lrb-", "!"])


@pytest.mark.parametrize(
    "line", ["hello", "3 good", "(5 (2 a) (2 b))", "(3 (2 a) (2 b)", "(3 (2 a) (7 b))", "(3 )", "(3 (2 a)) x"]
)
def test_what_is_no_tree_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        treebank.tree(line)


def test_words_become_ids_padded_behind(tmp_path: Path) -> None:
    once = b"(4 (2 ONCE) (3 (2 the) (2 Word0)))\n"
    folder = write_trees(tmp_path / "data", train=once)
    files = folder / "train.txt"
    files.write_bytes(files.read_bytes().removesuffix(b"(3 (2 The) (2 Word3))\n"))
    found = read(tmp_path / "data", 5)
    assert found.train_images.shape == (8_544, 5) and found.test_images.shape == (2_210, 5)
    assert found.train_images.dtype == np.int32 and found.info.image_shape == (5,)
    the, word0 = 2, found.train_images[1, 1]
    assert found.train_images[0].tolist() == [treebank.UNKNOWN, the, word0, 0, 0] and found.train_labels[0] == 4
    assert found.train_images.max() == 7 and found.test_labels[:6].tolist() == [0, 1, 2, 3, 4, 0]


def test_words_of_the_test_set_alone_are_unknown(tmp_path: Path) -> None:
    folder = write_trees(tmp_path / "data")
    test = (folder / "test.txt").read_bytes().replace(b"(2 The)", b"(2 Strange)")
    (folder / "test.txt").write_bytes(test)
    assert (read(folder).test_images[:, 0] == treebank.UNKNOWN).all()


def test_a_sentence_longer_than_the_limit_is_cut_counted_and_said_in_one_line(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    location = locate("sst5", write_trees(tmp_path / "data"))
    load(replace(location, reading=DecodingOptions(max_length=2)), report=rows.append)
    assert rows == []
    found = load(replace(location, reading=DecodingOptions(max_length=1)), report=rows.append)
    (row,) = rows
    assert row["kind"] == "note" and row["text"] == (
        "sst5: 8,544 of 8,544 train and 2,210 of 2,210 test sentences are longer than --max-length 1 "
        "and were truncated; the longest has 2 words"
    )
    assert (found.train_images == 2).all()


@pytest.mark.parametrize("layout", ["sst5/trees", "sst5", "trees", "."])
def test_layouts(tmp_path: Path, layout: str) -> None:
    write_trees(tmp_path / "data" / layout)
    found = locate("sst5", tmp_path / "data")
    assert (found.path, found.kind, found.origin) == (tmp_path / "data" / layout, "trees", "data-dir")


def test_the_archive_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / treebank.ARCHIVE).write_bytes(zipped(tree_files()))
    packed, unpacked = read(tmp_path / "data"), read(write_trees(tmp_path / "other"))
    assert np.array_equal(packed.train_images, unpacked.train_images)
    whole = (tmp_path / "data" / treebank.ARCHIVE).read_bytes()
    for damaged in (whole[:-30], whole[:200] + b"x" * 40 + whole[240:], b"<html>", zipped({"dev.txt": b""})):
        (tmp_path / "data" / treebank.ARCHIVE).write_bytes(damaged)
        with pytest.raises(DataError, match=r"train.txt: .*paceline data get sst5") as caught:
            read(tmp_path / "data")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (b"(3 (2 a) (2 b))\n", "expected 8,544 sentences, found 8,545"),
        (b"(3 (2 a) (2 b)\n", "train.txt, line 1: expected a tree, found brackets that do not match"),
        (b"\xff\n", "expected UTF-8, found invalid start byte at byte 0"),
    ],
)
def test_damaged_files(tmp_path: Path, before: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write_trees(tmp_path / "data", train=before))


def test_an_incomplete_folder_says_what_it_lacks(tmp_path: Path) -> None:
    (write_trees(tmp_path / "data") / "dev.txt").unlink()
    with pytest.raises(DataError, match=r"without dev.txt.*paceline data get sst5"):
        locate("sst5", tmp_path / "data")


def test_what_is_fetched_is_checked_by_its_members(tmp_path: Path) -> None:
    files = tree_files()
    wanted = RemoteFile(treebank.ARCHIVE, {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items()})
    path = tmp_path / "part"
    path.write_bytes(zipped(files))
    assert fault(path, wanted) is None
    path.write_bytes(zipped(files | {"dev.txt": b"other"}))
    assert "of dev.txt instead of" in (fault(path, wanted) or "")
    path.write_bytes(b"<html>")
    assert "damaged" in (fault(path, wanted) or "")
    assert sources.SOURCES["sst5"].files[0].name == treebank.ARCHIVE


def test_ids_and_lengths_are_those_the_transformer_has_rows_for() -> None:
    from paceline.models import transformer

    assert (treebank.PADDING, treebank.MAX_VOCABULARY) == (transformer.PADDING, transformer.VOCABULARY)
    assert treebank.MAX_LENGTH == transformer.MAX_LENGTH
    words = [[f"w{number}"] * 2 for number in range(40_000)]
    assert max(treebank.vocabulary(words).values()) == transformer.VOCABULARY - 1
