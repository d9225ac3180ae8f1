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


def tree_files(words: int = 2) -> dict[str, bytes]:
    """Trees as many as SST-5 has, of a few words each; the label says which word is repeated."""
    sizes = {"train.txt": 8_544, "dev.txt": 1_101, "test.txt": 2_210}
    lines = [f"({label} (2 The) " + "".join(f"(2 Word{label})" for _ in range(words - 1)) + ")" for label in range(5)]
    return {name: "\n".join(lines[row % 5] for row in range(size)).encode() + b"\n" for name, size in sizes.items()}


def write_trees(folder: Path, **changes: bytes) -> Path:
    """The files of SST-5 in `folder`; `train=...` puts other bytes in front of train.txt's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tree_files().items():
        (folder / name).write_bytes(changes.get(name.removesuffix(".txt"), b"") + content)
    return folder


def write_images(folder: Path, sizes: dict[str, int], suffix: str = ".JPEG") -> Path:
    """So many images of random size in each class folder."""
    from PIL import Image

    generator = np.random.default_rng(2)
    for name, count in sizes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            shape = (*generator.integers(20, 60, 2), 3)
            picture = Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8))
            picture.save(folder / name / f"picture_{number:03d}{suffix}")
    return folder
