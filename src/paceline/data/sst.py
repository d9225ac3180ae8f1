"""SST-5 as its authors packed it: a bracketed tree a line; its words become ids by a vocabulary of the train set's own.

Words are lowercased. One that the train set holds once, or not at all, is UNKNOWN, so that this id is learned too.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.idx import Empty
from paceline.errors import DataError

SIZES = {"train.txt": 8_544, "dev.txt": 1_101, "test.txt": 2_210}
ARCHIVE = "trainDevTestTrees_PTB.zip"
NUM_CLASSES = 5
PADDING, UNKNOWN = 0, 1
LARGEST_VOCABULARY = 30_522
"""Ids that the transformer has rows for, these two included."""
LONGEST = 256
"""Words of a sentence that the transformer has positions for."""
LEAST_COUNT = 2

ZIP_ERRORS = (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)

_FOLDERS = ("", "sst5", "sst-5", "SST-5", "sst")
_LARGEST_FILE_NBYTES = 1 << 26
_OPENING = re.compile(r"\([0-4] ")
_LEAF = re.compile(r"\([0-4] ([^()]+)\)")  # up to the bracket: three leaves of the train set hold a no-break space

Sentence = tuple[int, list[str]]
Ids = NDArray[np.int32]
Labels = NDArray[np.int64]


def find(folder: Path) -> tuple[Path | None, str]:
    """The folder with the three files, or their archive, at or under `folder`; else what an incomplete one lacks."""
    lack = ""
    for layout in _FOLDERS:
        for candidate in (folder / layout / "trees", folder / layout):
            missing = [name for name in SIZES if not (candidate / name).is_file()]
            if not missing:
                return candidate, ""
            if len(missing) < len(SIZES) and not lack:
                lack = f"without {', '.join(missing)}"
    for layout in _FOLDERS:
        if (folder / layout / ARCHIVE).is_file():
            return folder / layout / ARCHIVE, ""
    return None, lack


def read(path: Path, max_length: int, remedy: str, empty: Empty) -> tuple[tuple[Ids, Labels, Ids, Labels], str]:
    """Train ids, train labels, test ids and test labels; and what was cut, in one line, or nothing."""
    parts = {name: _sentences(path, name, remedy) for name in SIZES}
    numbers = vocabulary(words for _, words in parts["train.txt"])
    arrays: list[NDArray[Any]] = []
    for name in ("train.txt", "test.txt"):
        arrays += _encoded(parts[name], numbers, max_length, empty)
    said = _what_was_cut(parts, max_length)
    return (arrays[0], arrays[1], arrays[2], arrays[3]), said


def vocabulary(sentences: Iterable[list[str]]) -> dict[str, int]:
    """A number for each word that occurs often enough, the most frequent first.

    >>> vocabulary([["a", "b", "a"], ["b", "c", "a"]])
    {'a': 2, 'b': 3}
    """
    counts = Counter(word for words in sentences for word in words)
    known = sorted((word for word, count in counts.items() if count >= LEAST_COUNT), key=lambda w: (-counts[w], w))
    return {word: number for number, word in enumerate(known[: LARGEST_VOCABULARY - 2], UNKNOWN + 1)}


def tree(line: str) -> Sentence:
    """The label and the lowercased words of one tree; ValueError for what is none.

    >>> tree("(3 (2 Good) (2 8\\u00a01\\\\/2))")
    (3, ['good', '8\\xa01\\\\/2'])
    """
    words = _LEAF.findall(line)
    if not words or not line.endswith(")") or not _OPENING.match(line):
        raise ValueError("no tree")
    if not len(_OPENING.findall(line)) == line.count("(") == line.count(")"):
        raise ValueError("brackets that do not match, or a label that is not 0 to 4")
    return int(line[1]), [word.lower() for word in words]


def _sentences(path: Path, name: str, remedy: str) -> list[Sentence]:
    where = path / name if path.is_dir() else f"{path}: member {name}"
    try:
        text = _content(path, name).decode("utf-8")
    except ZIP_ERRORS as error:
        raise DataError(f"{where}: cannot be read ({error}); {remedy}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected UTF-8, found {error.reason} at byte {error.start}; {remedy}") from None
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found.append(tree(line.rstrip("\r ")))
            except ValueError as error:
                raise DataError(f"{where}, line {number}: expected a tree, found {error}; {remedy}") from None
    if len(found) != SIZES[name]:
        raise DataError(f"{where}: expected {SIZES[name]:,} sentences, found {len(found):,}; {remedy}")
    return found


def _content(path: Path, name: str) -> bytes:
    if path.is_dir():
        return (path / name).read_bytes()
    for found, content in archive_members(path):
        if found == name:
            return content
    raise EOFError(f"no {name} in it")


def archive_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """The text files of a zip, by their last name; members that claim to be far too large are an error."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.rpartition("/")[2]
            if name in SIZES:
                if member.file_size > _LARGEST_FILE_NBYTES:
                    raise zipfile.BadZipFile(f"member {name} claims {member.file_size} bytes")
                yield name, archive.read(member)


def _encoded(sentences: list[Sentence], numbers: dict[str, int], max_length: int, empty: Empty) -> tuple[Ids, Labels]:
    """Ids [N, max_length], padded behind, and labels [N]."""
    ids = empty((len(sentences), max_length), np.dtype(np.int32))
    labels = empty((len(sentences),), np.dtype(np.int64))
    ids[:] = PADDING
    for row, (label, words) in enumerate(sentences):
        labels[row] = label
        found = [numbers.get(word, UNKNOWN) for word in words[:max_length]]
        ids[row, : len(found)] = found
    return ids, labels


def _what_was_cut(parts: dict[str, list[Sentence]], max_length: int) -> str:
    counts = {name: sum(len(words) > max_length for _, words in parts[name]) for name in ("train.txt", "test.txt")}
    if not any(counts.values()):
        return ""
    longest = max(len(words) for name in counts for _, words in parts[name])
    which = " and ".join(
        f"{count:,} of {SIZES[name]:,} {name.removesuffix('.txt')}" for name, count in counts.items() if count
    )
    return f"{which} sentences are longer than --max-length {max_length} and were cut; the longest has {longest} words"
