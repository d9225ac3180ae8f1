"""Download and check data sets (`paceline data get`) and list those found (`paceline data list`)."""

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

from paceline.data import datasets, idx, image_folder, sources
from paceline.data.datasets import DATASETS, SAMPLE, Location, cache_folder, locate, remedy, search_places
from paceline.data.sources import RemoteFile
from paceline.errors import DataError, UserError, unknown_name

NUM_TRIES = 3
BACK_OFF_SECONDS = 0.5
TIMEOUT_SECONDS = 30.0
_PIECE_NBYTES = 1 << 18
_RETRYABLE_STATUSES = (408, 425, 429)

DownloadProgress = Callable[[int, "int | None"], None]  # bytes received, bytes in all or None if unknown


class _Broken(Exception):
    """The connection ended before the file did."""


def fetch(url: str, part: Path, report: DownloadProgress, limit: int) -> None:
    """Complete the file `part`, of at most `limit` bytes, from `url`; raise UserError with the URL if that fails."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url} was asked for, but only http and https are supported: correct the mirror")
    reason = ""
    for number in range(NUM_TRIES):
        if number:
            time.sleep(BACK_OFF_SECONDS * 2 ** (number - 1))
        try:
            _request(url, part, report, limit)
            return
        except urllib.error.HTTPError as error:
            reason = f"HTTP status {error.code} ({error.reason})"
            if error.code < 500 and error.code not in _RETRYABLE_STATUSES:
                break
        except urllib.error.URLError as error:
            reason = str(error.reason)
        except (_Broken, http.client.HTTPException, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
    raise UserError(
        f"{url} could not be fetched: {reason}; check the network, name another mirror with PACELINE_MIRROR, "
        "or copy the files by hand and use --data-dir"
    )


def _request(url: str, part: Path, report: DownloadProgress, limit: int) -> None:
    """Send one request: for the rest of the file if `part` holds its beginning, else for all of it."""
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
            part.unlink()  # longer than the file itself, so not its beginning
            _request(url, part, report, limit)
        return
    with response:
        continues = response.status == 206 and _range_start(response) == present
        if response.status == 206 and not continues:
            part.unlink(missing_ok=True)
            raise _Broken("the server sent a different byte range than requested")
        start = present if continues else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        if total is not None and total > limit:
            raise _too_large(url, part, limit)
        with _open(part, "ab" if continues else "wb") as file:
            received = _copy(response, file, start, total, report, limit)
        if received > limit:
            raise _too_large(url, part, limit)
    if total is not None and received < total:
        raise _Broken(f"the connection ended after {received} of {total} bytes")


def _range_start(response: http.client.HTTPResponse) -> int | None:
    """Return the first byte of a partial response, from `Content-Range: bytes 5-9/10`."""
    start = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else None


def _too_large(url: str, part: Path, limit: int) -> UserError:
    part.unlink(missing_ok=True)
    return UserError(f"{url} has more than {limit} bytes, twice what this data set has: try another mirror")


def _copy(
    response: http.client.HTTPResponse,
    file: BinaryIO,
    received: int,
    total: int | None,
    report: DownloadProgress,
    limit: int,
) -> int:
    """Write the response to `file`, until it is longer than `limit`; return the length of the file after it."""
    report(received, total)
    while received <= limit and (piece := response.read(_PIECE_NBYTES)):
        try:
            file.write(piece)
        except OSError as error:
            raise cannot_write(Path(file.name), error) from None
        received += len(piece)
        report(received, total)
    return received


def _open(part: Path, mode: str) -> BinaryIO:
    try:
        return part.open(mode, buffering=0)  # type: ignore[return-value]
    except OSError as error:
        raise cannot_write(part, error) from None


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the error for a full disk or a folder without write permission."""
    hint = "make room or choose another folder, then run it again"
    return UserError(f"{path} cannot be written ({error.strerror or error}): {hint}")


@dataclass(frozen=True)
class DatasetStatus:
    """One row of `paceline data list`."""

    name: str
    title: str
    found: bool
    origin: str  # as in Location; empty if not found
    path: Path | None
    sample: bool
    train_size: int  # of the files found, or of the complete set if none was found
    test_size: int
    nbytes: int  # on disk; for a folder of images, or if not found, the approximate download size
    licence: str
    note: str  # the problem or what to do; empty if all is well


def get(name: str, destination: Path | None = None, mirror: str | None = None, progress: bool = True) -> Path:
    """Download and check the missing files of `name`; return the folder that holds them (in the cache by default)."""
    if name not in DATASETS:
        raise unknown_name("dataset", name, DATASETS)
    say: Callable[[str], None] = _print_line if progress else lambda line: None
    if name == SAMPLE:
        say(f"{name} comes with Paceline: {datasets.BUILTIN_FOLDER}")
        return datasets.BUILTIN_FOLDER
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
            say(f"{target} is already there and correct")
            continue
        _get_file(f"{url.rstrip('/')}/{file.name}", target, file, progress, 2 * DATASETS[name].download_nbytes)
        say(f"{target} fetched and checked")
    return folder


def status(data_dir: Path | None) -> list[DatasetStatus]:
    """Return one row per data set, with its location if it was found."""
    search_places(data_dir)  # raises if a folder that the user named is missing
    return [_status(name, data_dir) for name in DATASETS]


def _get_file(url: str, target: Path, file: RemoteFile, progress: bool, limit: int) -> None:
    """Download one file; it gets its final name only after its content was checked."""
    part = target.with_name(f"{target.name}.part")
    while True:
        resumed = part.exists()
        with _reporting(url, progress) as report:
            fetch(url, part, report, limit)
        fault = sources.fault(part, file)
        if fault is None:
            break
        part.unlink()
        if not resumed:  # else the part from an earlier run may be wrong: download everything once
            hint = "nothing was kept: try again or another mirror"
            raise DataError(f"{url}: expected the official content, found {fault}; {hint}")
    try:
        part.replace(target)
    except OSError as error:
        raise cannot_write(target, error) from None


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _reporting(url: str, progress: bool) -> Iterator[DownloadProgress]:
    """Yield a progress callback: a bar on a terminal, else one line per file, else silent without `progress`."""
    if not progress:
        yield lambda received, total: None
    elif not sys.stderr.isatty():
        _print_line(f"fetching {url}")
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
            listing = image_folder.list_images(location.path)
            train_size, test_size = len(listing.train), len(listing.test)
        if location.sample and name != SAMPLE:
            note = f"the built-in sample is used; 'paceline data get {name}' fetches the whole set"
    except DataError as error:
        note = str(error)
    origin, path, sample = "", None, False
    if location is not None:
        origin, path, sample = location.origin, location.path, location.sample
    sizes = train_size, test_size, nbytes
    return DatasetStatus(name, info.title, location is not None, origin, path, sample, *sizes, info.licence, note)


def _files(location: Location) -> list[Path]:
    """Return the data files of a location, to sum their sizes; none for a folder of images."""
    if location.kind == "idx":
        return [path for path in (idx.find(location.path, name) for name in idx.FILE_NAMES) if path is not None]
    if location.kind == "folder":
        return []  # too many files to stat
    if location.path.is_dir():
        return [path for path in location.path.iterdir() if path.is_file()]
    return [location.path]
