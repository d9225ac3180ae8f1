"""Read the idx files of MNIST and Fashion-MNIST, plain or gzipped, directly into the caller's arrays."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError

Empty = Callable[[tuple[int, ...], "np.dtype[Any]"], NDArray[Any]]
"""Allocates an array of (shape, dtype), for example in shared memory."""
Arrays = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]
"""Train images, train labels, test images and test labels."""

SPLITS = ("train", "t10k")
IMAGES = "{}-images-idx3-ubyte"
LABELS = "{}-labels-idx1-ubyte"
FILE_NAMES = tuple(pattern.format(split) for split in SPLITS for pattern in (IMAGES, LABELS))

_PIECE_NBYTES = 1 << 16
_MAX_DEFLATE_RATIO = 1032  # of any deflate stream: a header that declares more content is wrong


def find(folder: Path, name: str) -> Path | None:
    """Return the path of the idx file `name` in `folder`, plain or as .gz, or None."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def read_split(
    folder: Path, split: str, image_shape: tuple[int, ...], num_classes: int, remedy: str, empty: Empty
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images [N, C, H, W] and labels [N] of one split, in arrays from `empty`; raise DataError for bad files."""
    path = _existing(folder, LABELS.format(split), remedy)
    small = _decode(path, (), None, remedy, np.empty)
    if int(small.max()) >= num_classes:
        raise _damaged(path, f"labels from 0 to {num_classes - 1}", f"label {int(small.max())}", remedy)
    channels, height, width = image_shape
    assert channels == 1
    path = _existing(folder, IMAGES.format(split), remedy)
    with_channel: Empty = lambda shape, dtype: empty((shape[0], 1, *shape[1:]), dtype)  # noqa: E731
    images = _decode(path, (height, width), len(small), remedy, with_channel)
    labels = empty((len(small),), np.dtype(np.int64))
    labels[:] = small
    return images, labels


def count(folder: Path, split: str, remedy: str) -> int:
    """Return the number of labels of a split, read from the header of its label file."""
    path = _existing(folder, LABELS.format(split), remedy)
    return _header(path, _pieces(path, remedy), 1, remedy)[0][0]


def _existing(folder: Path, name: str, remedy: str) -> Path:
    path = find(folder, name)
    if path is None:
        raise DataError(f"{folder}: expected {name} or {name}.gz, found neither; {remedy}")
    return path


def _decode(
    path: Path, item_shape: tuple[int, ...], expected_count: int | None, remedy: str, empty: Empty
) -> NDArray[np.uint8]:
    """Return the items of one idx file; raise DataError if its header or length is wrong."""
    pieces = _pieces(path, remedy)
    dims, rest = _header(path, pieces, 1 + len(item_shape), remedy)
    if dims[1:] != item_shape:
        raise _damaged(path, f"items of {_times(item_shape)}", f"items of {_times(dims[1:])}", remedy)
    if expected_count is not None and dims[0] != expected_count:
        raise _damaged(path, f"{expected_count} images, one per label", f"{dims[0]} images", remedy)
    nbytes = int(np.prod(dims, dtype=object))
    if not 0 < nbytes <= _max_nbytes(path, 4 + 4 * len(dims)):
        raise _damaged(path, f"content for {dims[0]} items", f"a file of {path.stat().st_size} bytes", remedy)
    items = empty(dims, np.dtype(np.uint8))
    target, filled = items.data.cast("B"), 0
    for piece in chain((rest,), pieces):
        if filled + len(piece) > nbytes:
            raise _damaged(path, f"{nbytes} bytes after the header", f"at least {filled + len(piece)}", remedy)
        target[filled : filled + len(piece)] = piece
        filled += len(piece)
    if filled < nbytes:
        raise _damaged(path, f"{nbytes} bytes after the header", f"{filled}, so it is truncated", remedy)
    return items


def _header(path: Path, pieces: Iterator[bytes], num_dims: int, remedy: str) -> tuple[tuple[int, ...], bytes]:
    """Return the dimensions that an idx file declares, and the bytes read beyond its header."""
    nbytes, start = 4 + 4 * num_dims, b""
    while len(start) < nbytes:
        piece = next(pieces, None)
        if piece is None:
            raise _damaged(path, f"a header of {nbytes} bytes", f"{len(start)} bytes, so it is truncated", remedy)
        start += piece
    magic, *dims = struct.unpack(f">{1 + num_dims}I", start[:nbytes])
    if magic != 0x0800 + num_dims:  # 08 is unsigned bytes, then the number of dimensions
        raise _damaged(path, f"idx magic 0x{0x0800 + num_dims:08x}", f"0x{magic:08x}", remedy)
    return tuple(dims), start[nbytes:]


def _pieces(path: Path, remedy: str) -> Iterator[bytes]:
    """Yield the content of a file piece by piece; inflate a .gz and check its CRC."""
    try:
        with path.open("rb") as file:
            packed = iter(lambda: file.read(_PIECE_NBYTES), b"")
            yield from inflate(packed) if path.suffix == ".gz" else packed
    except EOFError:
        found = f"the end of the file after {path.stat().st_size} bytes"
        raise _damaged(path, "a whole gzip stream", found, remedy) from None
    except zlib.error as error:
        raise _damaged(path, "a sound gzip stream", f"a corrupted one ({error})", remedy) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from None


def inflate(packed: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the content of a gzip stream; raise zlib.error for bad data or CRC, EOFError if it ends early."""
    inflater = zlib.decompressobj(wbits=31)
    for piece in packed:
        while piece:
            if inflater.eof:
                inflater = zlib.decompressobj(wbits=31)  # a gzip file may hold several streams in a row
            yield inflater.decompress(piece, _PIECE_NBYTES)  # a small piece may hold a thousand times as much
            piece = inflater.unconsumed_tail or inflater.unused_data
    if not inflater.eof:
        raise EOFError


def _max_nbytes(path: Path, header_nbytes: int) -> int:
    """Return the most content a file of this size can hold, so that a wrong header is found before allocating."""
    return path.stat().st_size * (_MAX_DEFLATE_RATIO if path.suffix == ".gz" else 1) - header_nbytes


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(str(length) for length in shape)


def _damaged(path: Path, expected: str, found: str, remedy: str) -> DataError:
    return DataError(f"{path}: expected {expected}, found {found}; {remedy}")
