"""Find the files of a data set by its name (`locate`), then read them into arrays (`load`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import RunConfig
from paceline.data import idx, image_folder, sst
from paceline.data.catalog import DATASETS as DATASETS
from paceline.data.catalog import DatasetInfo as DatasetInfo
from paceline.data.idx import Arrays, Empty
from paceline.errors import DataError, unknown_name
from paceline.interfaces import Report

SYSTEM_FOLDER = Path("/usr/share/datasets")
BUILTIN_FOLDER = Path(__file__).parent / "builtin"
SAMPLE = "fashion-mnist-sample"

_IDX_FOLDERS = {
    "fashion-mnist": ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", ""),
    "mnist": ("MNIST/raw", "MNIST", "mnist", ""),
}
_CIFAR_FOLDERS = ("", "cifar-10", "cifar10")
_CIFAR_UNPACKED = "cifar-10-batches-py"  # tried before the archives: it decodes much faster
_CIFAR_ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-python.tar.xz", "cifar-10-python.tar")
_KINDS = {"cifar10": "cifar", "sst5": "trees", "imagenet": "folder"}


@dataclass(frozen=True)
class DecodingOptions:
    """User settings for decoding files into arrays."""

    max_length: int = 64  # of a sentence, in words
    image_size: int = 224  # side of an image from a folder, as the model sees it

    @property
    def stored_size(self) -> int:
        """Side of a decoded image: a seventh larger than the model's input, for random crops (256 for 224)."""
        return self.image_size + self.image_size // 7


DEFAULT_READING = DecodingOptions()


@dataclass(frozen=True)
class Location:
    """The place where a data set was found."""

    name: str  # the name that was asked for
    kind: str  # "idx", "cifar", "trees" or "folder"
    path: Path  # a folder, or an archive
    origin: str  # "data-dir", "PACELINE_DATA", "cache", "system" or "built-in sample"
    sample: bool  # whether it is the built-in sample
    reading: DecodingOptions = DEFAULT_READING


@dataclass(frozen=True)
class Dataset:
    """A data set in memory; `info` describes the sample if the sample replaces the whole set."""

    info: DatasetInfo
    location: Location
    train_images: NDArray[Any]  # images uint8 [N, C, H, W], or token ids int32 [N, L]
    train_labels: NDArray[np.int64]  # [N]
    test_images: NDArray[Any]
    test_labels: NDArray[np.int64]


def cache_folder() -> Path:
    """Return the user's cache folder: `$XDG_CACHE_HOME/paceline`, or `~/.cache/paceline`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def remedy(name: str) -> str:
    """Return the advice that ends each message about a bad file of the data set `name`."""
    if name == SAMPLE:
        return "install Paceline again"
    if name == "imagenet":
        return image_folder.REMEDY
    return f"'paceline data get {name}' fetches a good copy"


def search_places(data_dir: Path | None) -> list[tuple[str, Path]]:
    """Return the (origin, folder) pairs to search, in order; raise DataError if a folder the user named is missing."""
    if data_dir is not None:
        folder = data_dir.expanduser()
        if not folder.is_dir():
            raise DataError(f"data folder {folder} was asked for, but there is no such folder: check --data-dir")
        return [("data-dir", folder)]
    places = [("cache", cache_folder()), ("system", Path(os.environ.get("PACELINE_SYSTEM_DATA") or SYSTEM_FOLDER))]
    if named := os.environ.get("PACELINE_DATA"):
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise DataError(f"PACELINE_DATA names {folder}, but there is no such folder: correct or unset the variable")
        places.insert(0, ("PACELINE_DATA", folder))
    return places


def locate(name: str, data_dir: Path | None) -> Location:
    """Return the location of the data set `name`; search only `data_dir` if it is given."""
    if name not in DATASETS:
        raise unknown_name("dataset", name, DATASETS)
    if name == SAMPLE:
        return Location(name, "idx", BUILTIN_FOLDER, "built-in sample", True)
    kind = _KINDS.get(name, "idx")
    searched = []
    for origin, folder in search_places(data_dir):
        path, lack = _find(kind, folder, name)
        if path is not None:
            return Location(name, kind, path, origin, False)
        searched.append(f"{folder} ({lack})" if lack else f"{folder}")
    if name == "fashion-mnist" and data_dir is None:
        return Location(name, "idx", BUILTIN_FOLDER, "built-in sample", True)
    if data_dir is not None:
        found = f"{searched[0]} does not hold it"
        advice = f"correct --data-dir, or leave it out and run 'paceline data get {name}'"
    else:
        found = f"it is in none of {', '.join(searched)}"
        advice = f"run 'paceline data get {name}', or name its folder with --data-dir"
    advice = image_folder.REMEDY if kind == "folder" else advice
    raise DataError(f"dataset '{name}' was asked for, but {found}: {advice}")


def locate_data(config: RunConfig) -> Location | None:
    """Where the data set of a run lies; None if a task of the user's own brings its data."""
    if config.task is not None:
        return None
    location = locate(config.dataset, Path(config.data_dir) if config.data_dir is not None else None)
    return replace(location, reading=DecodingOptions(config.max_length, config.image_size))


def resolve_dataset(config: RunConfig) -> tuple[RunConfig, Location | None]:
    """Locate the data set of a new run. If the sample stands in for it, name the sample in the config and the location.

    Otherwise a later look-up, when the complete data set has been fetched, would find other data.
    """
    location = locate_data(config)
    if location is not None and location.sample:
        config, location = replace(config, dataset=SAMPLE), replace(location, name=SAMPLE)
    return config, location


def _find(kind: str, folder: Path, name: str) -> tuple[Path | None, str]:
    """Return the path of the data set at or under `folder`; else None and what an incomplete copy lacks."""
    finders = {"cifar": _find_cifar, "trees": sst.find, "folder": image_folder.find}
    return _find_idx(folder, name) if kind == "idx" else finders[kind](folder)


def load(location: Location, empty: Empty = np.empty, report: Report = lambda row: None) -> Dataset:
    """Decode the data set at `location` into arrays from `empty(shape, dtype)`; raise DataError for a damaged file."""
    info = DATASETS[SAMPLE if location.sample else location.name]
    if location.kind == "folder":
        return _load_folder(location, empty, report)
    if location.kind == "trees":
        return _load_trees(location, empty, report)
    if location.kind == "cifar":
        return Dataset(info, location, *_load_cifar(location, empty))
    train, test = (
        idx.read_split(location.path, split, info.image_shape, len(info.classes), remedy(info.name), empty)
        for split in idx.SPLITS
    )
    return Dataset(info, location, *train, *test)


def _load_trees(location: Location, empty: Empty, report: Report) -> Dataset:
    length = location.reading.max_length
    arrays, note = sst.read(location.path, length, remedy(location.name), empty)
    if note:
        report({"kind": "note", "text": f"{location.name}: {note}"})
    return Dataset(replace(DATASETS[location.name], image_shape=(length,)), location, *arrays)


def _load_folder(location: Location, empty: Empty, report: Report) -> Dataset:
    from paceline.data import decoding  # here, because it is slow to import and seldom needed

    listing, reading = image_folder.list_images(location.path), location.reading
    total = len(listing.train) + len(listing.test)
    decoding.require_pillow()
    decoding.require_memory_for(total, reading.stored_size)
    if listing.own_split:
        what = f"{len(listing.test):,} of {total:,} images, a tenth of each class, are the test set"
        report({"kind": "note", "text": f"{location.path} has no train/ and val/: {what}"})
    skipped, before = decoding.Skipped(), 0
    arrays: list[NDArray[Any]] = []
    for part in (listing.train, listing.test):

        def progress(done: int, before: int = before) -> None:
            row = {"kind": "working", "text": f"decoded {before + done:,} of {total:,} images"}
            report({**row, "fraction": (before + done) / total})

        arrays += decoding.decode(part, reading.stored_size, empty, skipped, progress)
        before += len(part)
    if skipped.count:
        report({"kind": "note", "text": f"{location.path}: {skipped.line(total)}"})
    shape = (3, reading.image_size, reading.image_size)
    info = replace(DATASETS[location.name], classes=listing.classes, image_shape=shape)
    info = replace(info, train_size=len(arrays[1]), test_size=len(arrays[3]))
    return Dataset(info, location, *arrays)


def _find_idx(folder: Path, name: str) -> tuple[Path | None, str]:
    """Return the folder at or under `folder` with all four idx files; else None and what an incomplete one lacks."""
    lack = ""
    for candidate in _idx_candidates(folder, name):
        missing = [file_name for file_name in idx.FILE_NAMES if idx.find(candidate, file_name) is None]
        if not missing:
            return candidate, ""
        if len(missing) < len(idx.FILE_NAMES) and not lack:
            lack = f"without {', '.join(missing)}"
    return None, lack


def _idx_candidates(folder: Path, name: str) -> Iterator[Path]:
    """Yield the folders that may hold `name`, but not one that has the name of another data set."""
    layouts = [layout for other in _IDX_FOLDERS if other != name for layout in _IDX_FOLDERS[other]]
    others = {layout.partition("/")[0] for layout in layouts}
    for layout in _IDX_FOLDERS[name]:
        whole = folder.absolute()
        if layout or (whole.parent.name if whole.name == "raw" else whole.name) not in others - {""}:
            yield folder / layout


def _find_cifar(folder: Path) -> tuple[Path | None, str]:
    """Return the unpacked folder or the archive of CIFAR-10 at or under `folder`."""
    for layout in _CIFAR_FOLDERS:
        for unpacked in (folder / layout / _CIFAR_UNPACKED, folder / layout):
            if (unpacked / "data_batch_1").is_file():
                return unpacked, ""
    for layout in _CIFAR_FOLDERS:
        for archive in _CIFAR_ARCHIVES:
            if (folder / layout / archive).is_file():
                return folder / layout / archive, ""
    return None, ""


def _load_cifar(location: Location, empty: Empty) -> Arrays:
    from paceline.data import cifar, decoding  # here, because tar and lzma are slow to import and seldom needed

    if location.path.is_dir():
        return cifar.read(location.path, remedy(location.name), empty)
    arrays = decoding.load_cached(cache_folder(), location.path, empty)
    if arrays is None:
        arrays = cifar.read(location.path, remedy(location.name), empty)
        decoding.save_cached(cache_folder(), location.path, arrays)
    return arrays
