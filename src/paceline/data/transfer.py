"""One file over HTTP into a partial file, resumed where an earlier try stopped, with a bounded number of tries."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from paceline.errors import UserError

NUM_TRIES = 3
BACK_OFF_SECONDS = 0.5
TIMEOUT_SECONDS = 30.0

_PIECE_NBYTES = 1 << 18
_WORTH_A_RETRY = (408, 425, 429)

Report = Callable[[int, "int | None"], None]  # bytes so far, bytes in all where the server says


class _Broken(Exception):
    """The connection ended before the file did."""


def fetch(url: str, part: Path, report: Report) -> None:
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


def _try(url: str, part: Path, report: Report) -> None:
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


def _copy(response: http.client.HTTPResponse, file: BinaryIO, received: int, total: int | None, report: Report) -> int:
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
