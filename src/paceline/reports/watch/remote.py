"""Opens a run for reading: a local folder, or a mirror of a run that a server serves."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.analysis.status import TAIL_BYTES, RunStatus, read_status
from paceline.errors import UserError
from paceline.reports.watch.mirror import GROWING, Mirror
from paceline.transports.auth import ConnectOptions, read_only, tls_of, token_of
from paceline.transports.connection import parse_address
from paceline.transports.file_client import FileClient
from paceline.transports.handshake import TlsExpected
from paceline.transports.tls import worker_tls


def is_served(target: str) -> bool:
    """Return whether the target is HOST:PORT and not a folder.

    >>> is_served("10.0.0.1:29500"), is_served("runs/async"), is_served("runs:7/x")
    (True, False, False)
    """
    if Path(target).exists():
        return False
    try:
        return "/" not in target and bool(parse_address(target))
    except UserError:
        return False


@contextlib.contextmanager
def mirrored(options: ConnectOptions, tail: int | None = None) -> Iterator[Mirror]:
    """Yield a mirror of the served run's folder; with `tail`, of its events only the last bytes.

    The server gets proof of the read-only token alone, which is derived from the run's token if that one is given.
    """
    token, tls = read_only(token_of(options)), tls_of(options)

    def connect() -> FileClient:
        try:
            return FileClient(options.connect, token, tls)
        except TlsExpected:  # a server for other machines, reached over loopback
            if options.tls is not None:
                raise
            return FileClient(options.connect, token, worker_tls())

    with tempfile.TemporaryDirectory(prefix="paceline-") as path, contextlib.ExitStack() as stack:
        growing = GROWING if tail is None else GROWING[-1:]
        mirror = Mirror(connect, Path(path), tail, growing)
        stack.callback(mirror.close)
        yield mirror


@contextlib.contextmanager
def status_reader(
    target: str,
    token_file: str | None = None,
    tls: bool | None = None,
    fingerprint: str | None = None,
    ca: str | None = None,
) -> Iterator[Callable[[], RunStatus]]:
    """Yield a function that returns the current status of the run."""
    if not is_served(target):
        if any(given is not None for given in (token_file, tls, fingerprint, ca)):
            what = "--token-file, --tls, --plain, --fingerprint and --ca need HOST:PORT"
            raise UserError(f"{target} is a folder: {what}")
        yield lambda: read_status(Path(target))
        return
    with mirrored(ConnectOptions(target, token_file, tls, fingerprint, ca), TAIL_BYTES) as mirror:

        def status() -> RunStatus:
            mirror.refresh()
            return dataclasses.replace(read_status(mirror.folder.path), run=f"{mirror.run} at {mirror.address}")

        yield status
