"""`paceline data get` and `paceline data list`: fetch a data set, check it, and say which ones lie where."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.data import idx, image_folder, sources, transfer
from paceline.data.datasets import (
    BUILTIN_FOLDER,
    DATASETS,
    SAMPLE,
    Location,
    cache_folder,
    locate,
    remedy,
    search_places,
)
from paceline.data.sources import RemoteFile
from paceline.data.transfer import Report, cannot_write
from paceline.errors import DataError, unknown_name

Say = Callable[[str], None]


@dataclass(frozen=True)
class DatasetStatus:
    """One row of `paceline data list`."""

    name: str
    title: str
    found: bool
    origin: str  # as in Location; empty where not found
    path: Path | None
    sample: bool
    train_size: int  # of the files found; of the complete set where none was
    test_size: int
    nbytes: int  # on disk; about what a download takes, where it was not found or is a folder of images
    licence: str
    note: str  # what is wrong or what to do; empty where all is well


def get(name: str, destination: Path | None = None, mirror: str | None = None, progress: bool = True) -> Path:
    """Fetch and check what is missing of `name`; returns the folder that holds it (the cache's, unless given)."""
    if name not in DATASETS:
        raise unknown_name("dataset", name, DATASETS)
    say: Say = _say if progress else lambda line: None
    if name == SAMPLE:
        say(f"{name} comes with Paceline: {BUILTIN_FOLDER}")
        return BUILTIN_FOLDER
    if name not in sources.SOURCES:
        raise DataError(f"{name} cannot be fetched, its owners ask you to accept their terms: {remedy(name)}")
    source = sources.SOURCES[name]
    url = mirror or os.environ.get("PACELINE_MIRROR") or source.url
    folder = destination.expanduser() if destination is not None else cache_folder() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    for file in source.files:
        target = folder / file.name
        if target.is_file() and sources.fault(target, file) is None:
            say(f"{target} is already there, and right")
            continue
        _get_file(f"{url.rstrip('/')}/{file.name}", target, file, progress)
        say(f"{target} fetched and checked")
    return folder


def status(data_dir: Path | None) -> list[DatasetStatus]:
    """A row for every data set, with what was found of it."""
    search_places(data_dir)  # a folder that was named but is not there is an error, not a row
    return [_status(name, data_dir) for name in DATASETS]


def _get_file(url: str, target: Path, file: RemoteFile, progress: bool) -> None:
    """Fetch one file; it gets its final name only once its content is right."""
    part = target.with_name(f"{target.name}.part")
    while True:
        resumed = part.exists()
        with _reporting(url, progress) as report:
            transfer.fetch(url, part, report)
        fault = sources.fault(part, file)
        if fault is None:
            break
        part.unlink()
        if not resumed:  # what an earlier run left may be to blame, once
            raise DataError(
                f"{url}: expected the official content, found {fault}; nothing was kept: try again or another mirror"
            )
    try:
        part.replace(target)
    except OSError as error:
        raise cannot_write(target, error) from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _reporting(url: str, progress: bool) -> Iterator[Report]:
    """Something to report bytes to: a bar on a terminal, a line a file elsewhere, nothing when not wanted."""
    if not progress:
        yield lambda received, total: None
    elif not sys.stderr.isatty():
        _say(f"fetching {url}")
        yield lambda received, total: None
    else:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(url.rpartition("/")[2], total=None)
            yield lambda received, total: bar.update(task, completed=received, total=total)


def _status(name: str, data_dir: Path | None) -> DatasetStatus:
    info = DATASETS[name]
    train_size, test_size, nbytes, note = info.train_size, info.test_size, info.download_nbytes, ""
    location: Location | None = None
    try:
        location = locate(name, data_dir)
        nbytes = sum(path.stat().st_size for path in _files(location)) or nbytes
        if location.kind == "idx":
            train_size, test_size = (idx.count(location.path, split, remedy(name)) for split in idx.SPLITS)
        if location.kind == "folder":
            train_size, test_size = image_folder.count_images(location.path)
        if location.sample and name != SAMPLE:
            note = f"the built-in sample stands in; 'paceline data get {name}' fetches the whole"
    except DataError as error:
        note = str(error)
    return DatasetStatus(
        name=name,
        title=info.title,
        found=location is not None,
        origin=location.origin if location is not None else "",
        path=location.path if location is not None else None,
        sample=location.sample if location is not None else False,
        train_size=train_size,
        test_size=test_size,
        nbytes=nbytes,
        licence=info.licence,
        note=note,
    )


def _files(location: Location) -> list[Path]:
    """The data files of a location."""
    if location.kind == "idx":
        return [path for path in (idx.find(location.path, name) for name in idx.FILE_NAMES) if path is not None]
    if location.kind == "folder":
        return []  # too many to ask each for its size
    if location.path.is_dir():
        return [path for path in location.path.iterdir() if path.is_file()]
    return [location.path]
