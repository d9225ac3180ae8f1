"""Read SST-5 from its official files (one bracketed tree per line) and encode the words as ids."""

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
PADDING, UNKNOWN = 0, 1
MAX_VOCABULARY = 30_522  # rows in the transformer's embedding, including PADDING and UNKNOWN
MAX_LENGTH = 256  # positions in the transformer, in words of a sentence
MIN_COUNT = 2  # a rarer word of the lowercased train set becomes UNKNOWN, so that this id is trained too

ZIP_ERRORS = (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)

_FOLDERS = ("", "sst5", "sst-5", "SST-5", "sst")
_MAX_FILE_NBYTES = 1 << 26
_OPENING = re.compile(r"\([0-4] ")
_LEAF = re.compile(r"\([0-4] ([^()]+)\)")  # not split at spaces: three leaves of the train set contain a no-break space

Sentence = tuple[int, list[str]]
Ids = NDArray[np.int32]
Labels = NDArray[np.int64]


def find(folder: Path) -> tuple[Path | None, str]:
    """Return the folder with the three files, or their archive; else None and what an incomplete folder lacks."""
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
    """Return train ids, train labels, test ids and test labels; and one line about truncated sentences, or ""."""
    parts = {name: _sentences(path, name, remedy) for name in SIZES}
    numbers = vocabulary(words for _, words in parts["train.txt"])
    arrays: list[NDArray[Any]] = []
    for name in ("train.txt", "test.txt"):
        arrays += _encode(parts[name], numbers, max_length, empty)
    return (arrays[0], arrays[1], arrays[2], arrays[3]), _truncation_note(parts, max_length)


def vocabulary(sentences: Iterable[list[str]]) -> dict[str, int]:
    """Return an id for each word that occurs at least MIN_COUNT times, most frequent first.

    >>> vocabulary([["a", "b", "a"], ["b", "c", "a"]])
    {'a': 2, 'b': 3}
    """
    counts = Counter(word for words in sentences for word in words)
    known = sorted((word for word, count in counts.items() if count >= MIN_COUNT), key=lambda w: (-counts[w], w))
    return {word: number for number, word in enumerate(known[: MAX_VOCABULARY - 2], UNKNOWN + 1)}


def tree(line: str) -> Sentence:
    """Return the label and the lowercased words of one tree; raise ValueError if the line is not a tree.

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
    for found, content in zip_members(path):
        if found == name:
            return content
    raise EOFError(f"no {name} in it")


def zip_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (base name, content) of the three text files in a zip; raise BadZipFile if one could unpack to any size."""
    with zipfile.ZipFile(path) as archive:
        seen = set()
        for member in archive.infolist():
            name = member.filename.rpartition("/")[2]
            if name in SIZES:
                if member.file_size > _MAX_FILE_NBYTES:
                    raise zipfile.BadZipFile(f"member {name} claims {member.file_size} bytes")
                if name in seen or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise zipfile.BadZipFile(f"member {name} is there twice, or packed in another way than deflate")
                seen.add(name)
                yield name, archive.read(member)


def _encode(sentences: list[Sentence], numbers: dict[str, int], max_length: int, empty: Empty) -> tuple[Ids, Labels]:
    """Return ids [N, max_length], padded at the end, and labels [N]."""
    ids = empty((len(sentences), max_length), np.dtype(np.int32))
    labels = empty((len(sentences),), np.dtype(np.int64))
    ids[:] = PADDING
    for row, (label, words) in enumerate(sentences):
        labels[row] = label
        found = [numbers.get(word, UNKNOWN) for word in words[:max_length]]
        ids[row, : len(found)] = found
    return ids, labels


def _truncation_note(parts: dict[str, list[Sentence]], max_length: int) -> str:
    counts = {name: sum(len(words) > max_length for _, words in parts[name]) for name in ("train.txt", "test.txt")}
    if not any(counts.values()):
        return ""
    longest = max(len(words) for name in counts for _, words in parts[name])
    truncated = [f"{num:,} of {SIZES[name]:,} {name.removesuffix('.txt')}" for name, num in counts.items() if num]
    what = f"{' and '.join(truncated)} sentences are longer than --max-length {max_length} and were truncated"
    return f"{what}; the longest has {longest} words"
