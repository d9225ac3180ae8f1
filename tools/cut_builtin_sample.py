"""Make the built-in sample from the complete Fashion-MNIST: the first images of each class, in file order.

Usage: python tools/cut_builtin_sample.py SOURCE_FOLDER [DESTINATION_FOLDER]; the same source gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import struct
from pathlib import Path

import numpy as np

from paceline.data.datasets import BUILTIN_FOLDER, Location, load

PER_CLASS = {"train": 1_200, "t10k": 200}


def first_of_each_class(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Return the indices of the first `per_class` samples of every class, in file order."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in np.unique(labels)]))


def write_idx(path: Path, items: np.ndarray) -> int:
    """Write a gzipped idx file without time stamp and name; return its size."""
    header = struct.pack(f">{1 + items.ndim}I", 0x0800 + items.ndim, *items.shape)
    packed = gzip.compress(header + items.astype(np.uint8).tobytes(), compresslevel=9, mtime=0)
    path.write_bytes(packed)
    return len(packed)


def main() -> None:
    """Write both splits and print their sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="folder with the four official files, packed or not")
    parser.add_argument("destination", type=Path, nargs="?", default=BUILTIN_FOLDER)
    arguments = parser.parse_args()
    whole = load(Location("fashion-mnist", "idx", arguments.source, "data-dir", False))
    arguments.destination.mkdir(parents=True, exist_ok=True)
    total = 0
    for split, images, labels in (
        ("train", whole.train_images, whole.train_labels),
        ("t10k", whole.test_images, whole.test_labels),
    ):
        chosen = first_of_each_class(labels, PER_CLASS[split])
        total += write_idx(arguments.destination / f"{split}-images-idx3-ubyte.gz", images[chosen, 0])
        total += write_idx(arguments.destination / f"{split}-labels-idx1-ubyte.gz", labels[chosen])
        print(f"{split}: {len(chosen)} images")
    print(f"{total} bytes in {arguments.destination}")


if __name__ == "__main__":
    main()
