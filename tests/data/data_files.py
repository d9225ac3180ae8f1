"""The contents of small but well-formed data files."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

Write = Callable[..., Path]


def idx_bytes(items: np.ndarray) -> bytes:
    return struct.pack(f">{1 + items.ndim}I", 0x0800 + items.ndim, *items.shape) + items.astype(np.uint8).tobytes()


def idx_contents(num_train: int = 60, num_test: int = 20, seed: int = 0) -> dict[str, bytes]:
    generator = np.random.default_rng(seed)
    contents = {}
    for split, size in (("train", num_train), ("t10k", num_test)):
        contents[f"{split}-images-idx3-ubyte"] = idx_bytes(generator.integers(0, 256, (size, 28, 28)))
        contents[f"{split}-labels-idx1-ubyte"] = idx_bytes(np.arange(size) % 10)
    return contents


def cifar_batches(per_batch: int = 10) -> dict[str, bytes]:
    """Pickles as Python 3 writes them in protocol 2: the same opcodes, with text keys."""
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    generator = np.random.default_rng(1)
    return {
        name: pickle.dumps(
            {
                "data": generator.integers(0, 256, (per_batch, 3072), dtype=np.uint8),
                "labels": [number % 10 for number in range(per_batch)],
            },
            protocol=2,
        )
        for name in names
    }


def tar_of(members: dict[str, bytes], mode: str) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=f"w:{mode}") as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return target.getvalue()
