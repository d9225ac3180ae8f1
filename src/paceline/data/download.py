"""`paceline data get` and `paceline data list`: fetch a data set, check it, and say which ones lie where."""

from __future__ import annotations

import http.client
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.data import idx, image_folder, sources
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
from paceline.errors import DataError, UserError, unknown_name

NUM_TRIES = 3


BACK_OFF_SECONDS = 0.5


TIMEOUT_SECONDS = 30.0


_PIECE_NBYTES = 1 << 18


_WORTH_A_RETRY = (408, 425, 429)


DownloadProgress = Callable[[int, "int | None"], None]  # bytes so far, bytes in all where the server says


class _Broken(Exception):
    """The connection ended before the file did."""


def fetch(url: str, part: Path, report: DownloadProgress) -> None:
    """Complete `part` from `url`; a UserError naming the URL where that cannot be done."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url} was asked for, but only http and https are spoken: correct the mirror")
    reason = ""
    for number in range(NUM_TRIES):
        if number:
            time.sleep(BACK_OFF_SECONDS * 2 ** (number - 1))
        try:
            _try(url, part, report)
            return
        except urllib.error.HTTPError as error:
            reason = f"HTTP status {error.code} ({error.reason})"
            if error.code < 500 and error.code not in _WORTH_A_RETRY:
                break
        except urllib.error.URLError as error:
            reason = str(error.reason)
        except (_Broken, http.client.HTTPException, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
    raise UserError(
        f"{url} could not be fetched: {reason}; check the network, name another mirror with PACELINE_MIRROR, "
        "or copy the files by hand and use --data-dir"
    )


def _try(url: str, part: Path, report: DownloadProgress) -> None:
    """One request: the rest of the file where `part` holds its beginning, else all of it."""
    present = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "paceline", "Accept-Encoding": "identity"})
    if present:
        request.add_header("Range", f"bytes={present}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not present:
            raise
        if error.headers.get("Content-Range", "").rpartition("/")[2] != str(present):
            part.unlink()  # longer than the file itself: not a beginning of it
            _try(url, part, report)
        return
    with response:
        continues = response.status == 206 and _range_start(response) == present
        if response.status == 206 and not continues:
            part.unlink(missing_ok=True)
            raise _Broken("the server sent another part than was asked for")
        start = present if continues else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        with _opened(part, "ab" if continues else "wb") as file:
            received = _copy(response, file, start, total, report)
    if total is not None and received < total:
        raise _Broken(f"the connection ended after {received} of {total} bytes")


def _range_start(response: http.client.HTTPResponse) -> int | None:
    """The first byte a partial response holds, from `Content-Range: bytes 5-9/10`."""
    start = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else None


def _copy(
    response: http.client.HTTPResponse, file: BinaryIO, received: int, total: int | None, report: DownloadProgress
) -> int:
    """Write what the server sends; returns how long the file is then."""
    report(received, total)
    while piece := response.read(_PIECE_NBYTES):
        try:
            file.write(piece)
        except OSError as error:
            raise cannot_write(Path(file.name), error) from None
        received += len(piece)
        report(received, total)
    return received


def _opened(part: Path, mode: str) -> BinaryIO:
    try:
        return part.open(mode, buffering=0)  # type: ignore[return-value]
    except OSError as error:
        raise cannot_write(part, error) from None


def cannot_write(path: Path, error: OSError) -> UserError:
    """The error for a disk that is full or a folder that is not ours."""
    return UserError(
        f"{path} cannot be written ({error.strerror or error}): make room or choose another folder, then run it again"
    )


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
    say: Callable[[str], None] = _say if progress else lambda line: None
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
            fetch(url, part, report)
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
def _reporting(url: str, progress: bool) -> Iterator[DownloadProgress]:
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
