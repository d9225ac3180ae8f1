"""List the images in a folder of class folders, the layout of ImageNet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data.partition import hold_out
from paceline.errors import DataError

SUFFIXES = (".jpeg", ".jpg", ".png")
REMEDY = "give --data-dir a folder of your own with train/CLASS/*.JPEG and val/CLASS/*.JPEG (docs/data.md)"
"""ImageNet requires each user to accept its terms, so it cannot be downloaded here."""
TEST_SHARE = 0.1  # share of each class that becomes the test set if the folder has no val/

_FOLDERS = ("", "imagenet", "ImageNet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC")
_MAX_PROBED_FOLDERS = 20

Labelled = list[tuple[str, int]]


@dataclass(frozen=True)
class ImageListing:
    """The images of a folder as (path, class number), in a fixed order."""

    classes: tuple[str, ...]
    train: Labelled
    test: Labelled
    own_split: bool  # whether the test images were chosen here because there is no val/


def find(folder: Path) -> tuple[Path | None, str]:
    """Return the folder with train/ and val/, or with class folders; else None and what an incomplete one lacks."""
    lack = ""
    for layout in _FOLDERS:
        candidate = folder / layout
        parts = [(candidate / part).is_dir() for part in ("train", "val")]
        if all(parts) or _holds_classes(candidate):
            return candidate, ""
        if any(parts) and not lack:
            lack = f"without {candidate / ('val' if parts[0] else 'train')}"
    return None, lack


def list_images(folder: Path) -> ImageListing:
    """List every image below `folder`; raise DataError for an empty class folder or a class that only val/ has."""
    if not ((folder / "train").is_dir() and (folder / "val").is_dir()):
        images, classes = _by_class(folder)
        labels = np.array([label for _, label in images], np.int64)
        train, test = hold_out(labels, TEST_SHARE, 0)
        return ImageListing(classes, [images[row] for row in train], [images[row] for row in test], True)
    train_images, classes = _by_class(folder / "train")
    test_images, test_classes = _by_class(folder / "val")
    unknown = sorted(set(test_classes) - set(classes))
    if unknown:
        what = f"a class that {folder / 'train'} does not have ({len(unknown)} of them)"
        raise DataError(f"{folder / 'val' / unknown[0]}: {what}: make the class folders of both the same")
    number = {name: place for place, name in enumerate(classes)}
    test_images = [(path, number[test_classes[label]]) for path, label in test_images]
    return ImageListing(classes, train_images, test_images, False)


def _by_class(folder: Path) -> tuple[Labelled, tuple[str, ...]]:
    """Return the labelled images of all subfolders, and the names of the subfolders."""
    try:
        classes = sorted(x.name for x in os.scandir(folder) if x.is_dir() and not x.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror or error}); make it readable") from None
    if not classes:
        raise DataError(f"{folder}: expected a folder for each class, found none: move the images into class folders")
    images: Labelled = []
    for label, name in enumerate(classes):
        found = sorted(entry.path for entry in _images(folder / name))
        if not found:
            what = f"an empty class folder (no {', '.join(SUFFIXES)} in it)"
            raise DataError(f"{folder / name}: {what}: remove it, or put its images into it")
        images += [(path, label) for path in found]
    return images, tuple(classes)


def _images(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if entry.name.lower().endswith(SUFFIXES) and entry.is_file())


def _holds_classes(folder: Path) -> bool:
    """Return whether one of the first subfolders of `folder` holds an image."""
    try:
        with os.scandir(folder) as entries:
            subfolders = sorted(entry.path for entry in entries if entry.is_dir())[:_MAX_PROBED_FOLDERS]
        return any(next(_images(Path(path)), None) is not None for path in subfolders)
    except OSError:
        return False
