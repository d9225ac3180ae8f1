"""Read CIFAR-10 from its official tar of Python 2 pickles, without running any code that a pickle names."""

from __future__ import annotations

import gzip
import io
import lzma
import pickle
import pickletools
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from paceline.data.idx import Arrays, Empty
from paceline.errors import DataError

TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCHES = ("test_batch",)
ARRAY_NAMES = ("train_images", "train_labels", "test_images", "test_labels")

_IMAGE_SHAPE = (3, 32, 32)
_IMAGE_NBYTES = 3 * 32 * 32
_NUM_CLASSES = 10
_MAX_MEMBER_NBYTES = 1 << 28
_MAX_ARCHIVE_NBYTES = 1 << 29  # of the unpacked tar; the official one has 186 MB

Batch = tuple[NDArray[np.uint8], list[int]]


def read(path: Path, remedy: str, empty: Empty) -> Arrays:
    """Return train images, train labels, test images and test labels from an archive or an unpacked folder."""
    members = _members(path, remedy)
    batches = {name: _batch(content, f"{path}: member {name}", remedy) for name, content in members}
    missing = [name for name in TRAIN_BATCHES + TEST_BATCHES if name not in batches]
    if missing:
        raise DataError(f"{path}: expected six batches, found none named {', '.join(missing)}; {remedy}")
    train = _join([batches.pop(name) for name in TRAIN_BATCHES], empty)
    return train + _join([batches.pop(name) for name in TEST_BATCHES], empty)


class _BoundedStream:
    """Reads a stream up to a limit: a small archive may unpack to any size."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream, self._left, self._limit = stream, limit, limit

    def read(self, size: int) -> bytes:
        content = self._stream.read(min(size, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise tarfile.ReadError(f"it unpacks to more than {self._limit} bytes")
        return content


def _open_archive(path: Path, suffix: str) -> IO[bytes]:
    """Open the tar stream inside an archive; it is decompressed while it is read."""
    if suffix == ".xz":
        return cast("IO[bytes]", lzma.open(path, "rb"))
    if suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return path.open("rb")


def tar_members(path: Path, suffix: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield (base name, file) of each regular file in a tar compressed as `suffix`; read on to the final checksum."""
    with _open_archive(path, suffix) as unbounded:
        stream = _BoundedStream(unbounded, _MAX_ARCHIVE_NBYTES)
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isreg() else None
                if file is not None:
                    if member.size > _MAX_MEMBER_NBYTES:
                        raise tarfile.ReadError(f"member {member.name} claims {member.size} bytes")
                    yield member.name.rpartition("/")[2], file
        while stream.read(1 << 20):
            pass


ARCHIVE_ERRORS = (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError)


def _members(path: Path, remedy: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each batch file that is present."""
    wanted = TRAIN_BATCHES + TEST_BATCHES
    try:
        if path.is_dir():
            for name in wanted:
                if (path / name).is_file():
                    yield name, (path / name).read_bytes()
        else:
            for name, file in tar_members(path, path.suffix):
                if name in wanted:
                    yield name, file.read()
    except ARCHIVE_ERRORS as error:
        raise DataError(f"{path}: expected a whole archive, found a damaged one ({error}); {remedy}") from None


class _PickledType:
    """Stand-in for numpy.dtype that only stores its type code."""

    def __init__(self, code: str | bytes = "", *_: object) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        pass


class _PickledArray:
    """Stand-in for numpy.ndarray that only stores its state, so that no numpy code runs on unchecked input."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def rows(self) -> NDArray[np.uint8]:
        """Return the images, one per row; raise ValueError if the state is anything else."""
        _, shape, dtype, fortran, content = self.state
        if not isinstance(dtype, _PickledType) or dtype.code not in ("u1", "|u1") or not isinstance(content, bytes):
            raise ValueError("data that is not plain bytes")
        if len(shape) != 2 or shape[1] != _IMAGE_NBYTES or shape[0] < 1 or shape[0] * shape[1] != len(content):
            raise ValueError(f"data of shape {shape} in {len(content)} bytes")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


def _latin1(text: str, encoding: str) -> bytes:
    """Undo how Python 3 writes bytes in an old pickle protocol."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _PickledArray(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _PickledArray(),
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledType,
    ("_codecs", "encode"): _latin1,
}

# A damaged pickle can fail in any of these ways; all of them mean that the file is bad.
_VALUE_FAULTS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
_PICKLE_FAULTS = (*_VALUE_FAULTS, pickle.PickleError, EOFError, MemoryError, RecursionError, struct.error)


class _BatchUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"a pickle that asks for {module}.{name}")
        return _ALLOWED[module, name]


def _check_opcodes(content: bytes) -> None:
    """Refuse a pickle whose memo indices would make the unpickler allocate far more memory than the file holds."""
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not (argument is not None and 0 <= argument <= number):
            raise pickle.UnpicklingError(f"a pickle that stores memo entry {argument} at step {number}")


def _batch(content: bytes, where: str, remedy: str) -> Batch:
    """Return the images, one per row, and the labels of one pickled batch."""
    try:
        _check_opcodes(content)
        fields = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in fields.items()}
        rows, labels = fields["data"].rows(), fields["labels"]
    except _PICKLE_FAULTS as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())  # on one line
        raise DataError(f"{where}: expected a pickled CIFAR-10 batch, found {found}; {remedy}") from None
    if not isinstance(labels, list) or len(labels) != len(rows):
        found = f"{len(labels)}" if isinstance(labels, list) else "no list"
        raise DataError(f"{where}: expected {len(rows)} labels, one per image, found {found}; {remedy}")
    wrong = next((label for label in labels if type(label) is not int or not 0 <= label < _NUM_CLASSES), None)
    if wrong is not None:
        raise DataError(f"{where}: expected labels from 0 to {_NUM_CLASSES - 1}, found {wrong!r}; {remedy}")
    return rows, labels


def _join(batches: list[Batch], empty: Empty) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Concatenate batches into arrays from `empty`."""
    size = sum(len(rows) for rows, _ in batches)
    images, labels = empty((size, *_IMAGE_SHAPE), np.dtype(np.uint8)), empty((size,), np.dtype(np.int64))
    start = 0
    for rows, batch_labels in batches:
        stop = start + len(rows)
        images[start:stop] = rows.reshape(-1, *_IMAGE_SHAPE)
        labels[start:stop] = batch_labels
        start = stop
    return images, labels
