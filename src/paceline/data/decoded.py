"""Decoded copies of slow archives, kept in the user's cache as plain .npy files; losing one costs only time."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np

from paceline.data.cifar import ARRAY_NAMES, Arrays
from paceline.data.idx import Empty


def recall(cache: Path, source: Path, empty: Empty) -> Arrays | None:
    """The arrays kept for `source` as it is now, in arrays from `empty`, or None."""
    folder = _folder(cache, source)
    if not folder.is_dir():
        return None
    try:
        kept = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAY_NAMES]
    except (OSError, ValueError, EOFError):
        return None
    num_train, num_test = len(kept[1]), len(kept[3])
    shapes = [(num_train, 3, 32, 32), (num_train,), (num_test, 3, 32, 32), (num_test,)]
    dtypes = [np.dtype(np.uint8), np.dtype(np.int64)] * 2
    if [array.shape for array in kept] != shapes or [array.dtype for array in kept] != dtypes:
        return None
    arrays = []
    for array in kept:
        target = empty(array.shape, array.dtype)
        target[...] = array
        arrays.append(target)
    return arrays[0], arrays[1], arrays[2], arrays[3]


def keep(cache: Path, source: Path, arrays: Arrays) -> None:
    """Keep `arrays` for `source`, replacing copies of its earlier states; does nothing where that is not possible."""
    folder = _folder(cache, source)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        for name, array in zip(ARRAY_NAMES, arrays, strict=True):
            with (unfinished / f"{name}.npy").open("wb") as file:
                np.save(file, np.asarray(array), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        for old in folder.parent.glob(f"{folder.name.partition('-')[0]}-*"):
            shutil.rmtree(old, ignore_errors=True)
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)


def _folder(cache: Path, source: Path) -> Path:
    """Where the copy of `source` lies: by its path, then by its size and time of change."""
    state = source.stat()
    key = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
    return cache / "decoded" / f"{key}-{state.st_size}-{state.st_mtime_ns}"
