"""From a data set's name to its arrays: where its files lie (`locate`), then what they hold (`load`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data import idx
from paceline.data.catalog import DATASETS, DatasetInfo
from paceline.data.idx import Empty
from paceline.errors import DataError, unknown_name

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetInfo",
    "Location",
    "cache_folder",
    "load",
    "locate",
    "remedy",
    "search_places",
]

SYSTEM_FOLDER = Path("/usr/share/datasets")
BUILTIN_FOLDER = Path(__file__).parent / "builtin"
SAMPLE = "fashion-mnist-sample"

_IDX_FOLDERS = {
    "fashion-mnist": ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", ""),
    "mnist": ("MNIST/raw", "MNIST", "mnist", ""),
}
_CIFAR_FOLDERS = ("", "cifar-10", "cifar10")
_CIFAR_UNPACKED = "cifar-10-batches-py"  # before the archives: it decodes in a fraction of their time
_CIFAR_ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-python.tar.xz", "cifar-10-python.tar")


@dataclass(frozen=True)
class Location:
    """Where a data set was found."""

    name: str  # the name asked for
    kind: str  # "idx" or "cifar"
    path: Path  # a folder, or the archive of a cifar
    origin: str  # "data-dir", "PACELINE_DATA", "cache", "system" or "built-in sample"
    sample: bool  # True when it is the built-in sample


@dataclass(frozen=True)
class Dataset:
    """A data set in memory, as bytes; `info` is the sample's where the sample stands in for the whole."""

    info: DatasetInfo
    location: Location
    train_images: NDArray[np.uint8]  # [N, C, H, W]
    train_labels: NDArray[np.int64]  # [N]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]


def cache_folder() -> Path:
    """The user's cache of Paceline: `$XDG_CACHE_HOME/paceline`, or `~/.cache/paceline`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def remedy(name: str) -> str:
    """The end of every message about a bad file of `name`."""
    if name == SAMPLE:
        return "install Paceline again"
    return f"'paceline data get {name}' fetches a good copy"


def search_places(data_dir: Path | None) -> list[tuple[str, Path]]:
    """The (origin, folder) pairs to look in, in order; a folder that was named but is not there is a DataError."""
    if data_dir is not None:
        folder = data_dir.expanduser()
        if not folder.is_dir():
            raise DataError(f"data folder {folder} was asked for, but there is no such folder: check --data-dir")
        return [("data-dir", folder)]
    places = []
    named = os.environ.get("PACELINE_DATA")
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise DataError(f"PACELINE_DATA names {folder}, but there is no such folder: correct or unset the variable")
        places.append(("PACELINE_DATA", folder))
    places.append(("cache", cache_folder()))
    places.append(("system", Path(os.environ.get("PACELINE_SYSTEM_DATA") or SYSTEM_FOLDER)))
    return places


def locate(name: str, data_dir: Path | None) -> Location:
    """Where the data set `name` lies; a `data_dir` that is given is the only place looked at."""
    if name not in DATASETS:
        raise unknown_name("dataset", name, DATASETS)
    if name == SAMPLE:
        return Location(name, "idx", BUILTIN_FOLDER, "built-in sample", True)
    kind = "cifar" if name == "cifar10" else "idx"
    looked = []
    for origin, folder in search_places(data_dir):
        path, lack = _find_cifar(folder) if kind == "cifar" else _find_idx(folder, name)
        if path is not None:
            return Location(name, kind, path, origin, False)
        looked.append(f"{folder} ({lack})" if lack else f"{folder}")
    if data_dir is not None:
        raise DataError(
            f"dataset '{name}' was asked for, but {looked[0]} does not hold it: "
            f"correct --data-dir, or leave it out and run 'paceline data get {name}'"
        )
    if name == "fashion-mnist":
        return Location(name, "idx", BUILTIN_FOLDER, "built-in sample", True)
    raise DataError(
        f"dataset '{name}' was asked for, but it is in none of {', '.join(looked)}: "
        f"run 'paceline data get {name}', or name its folder with --data-dir"
    )


def load(location: Location, empty: Empty = np.empty) -> Dataset:
    """The data set at `location`, decoded into arrays from `empty(shape, dtype)`; a DataError if a file is damaged."""
    info = DATASETS[SAMPLE if location.sample else location.name]
    if location.kind == "cifar":
        train_images, train_labels, test_images, test_labels = _load_cifar(location, empty)
    else:
        train, test = (
            idx.read_split(location.path, split, info.image_shape, len(info.classes), remedy(info.name), empty)
            for split in idx.SPLITS
        )
        (train_images, train_labels), (test_images, test_labels) = train, test
    return Dataset(info, location, train_images, train_labels, test_images, test_labels)


def _find_idx(folder: Path, name: str) -> tuple[Path | None, str]:
    """The folder at or under `folder` with all four idx files of `name`; else what an incomplete one lacks."""
    lack = ""
    for candidate in _idx_candidates(folder, name):
        missing = [file_name for file_name in idx.FILE_NAMES if idx.find(candidate, file_name) is None]
        if not missing:
            return candidate, ""
        if len(missing) < len(idx.FILE_NAMES) and not lack:
            lack = f"without {', '.join(missing)}"
    return None, lack


def _idx_candidates(folder: Path, name: str) -> Iterator[Path]:
    """Where `name` may lie in `folder`; a folder that bears another data set's name is not taken for this one's."""
    others = {
        layout.partition("/")[0] for other, layouts in _IDX_FOLDERS.items() if other != name for layout in layouts
    }
    for layout in _IDX_FOLDERS[name]:
        whole = folder.absolute()
        if layout or (whole.parent.name if whole.name == "raw" else whole.name) not in others - {""}:
            yield folder / layout


def _find_cifar(folder: Path) -> tuple[Path | None, str]:
    """The unpacked folder or the archive of CIFAR-10 at or under `folder`."""
    for layout in _CIFAR_FOLDERS:
        for unpacked in (folder / layout / _CIFAR_UNPACKED, folder / layout):
            if (unpacked / "data_batch_1").is_file():
                return unpacked, ""
    for layout in _CIFAR_FOLDERS:
        for archive in _CIFAR_ARCHIVES:
            if (folder / layout / archive).is_file():
                return folder / layout / archive, ""
    return None, ""


def _load_cifar(
    location: Location, empty: Empty
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    from paceline.data import cifar, decoded  # here, because tar and lzma are slow to import and seldom needed

    if location.path.is_dir():
        return cifar.read(location.path, remedy(location.name), empty)
    arrays = decoded.recall(cache_folder(), location.path, empty)
    if arrays is None:
        arrays = cifar.read(location.path, remedy(location.name), empty)
        decoded.keep(cache_folder(), location.path, arrays)
    return arrays
