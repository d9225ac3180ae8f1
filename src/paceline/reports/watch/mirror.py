"""Mirrors the folder of a served run over the network; the copy is locked as long as the server answers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import RunFailed
from paceline.runs.durable_files import write_atomically
from paceline.runs.folder import RunFolder
from paceline.system.terminal import printable
from paceline.transports.file_client import FileChunk, FileClient

GROWING = ("arrivals.log", "events.jsonl")
"""Append-only files; events last, because a server that has ended waits until they were read."""
MAX_NBYTES = 1 << 30  # of one file: the log of 29 million pushes
TAILS = 64  # of a status that is repeated: how often the events may grow by the length of its first look
MAX_SECONDS = 60.0  # for the last part of a file, which has a mebibyte or less
MAX_SIZE, MAX_AGE = 1 << 62, 1e10
MAX_LETTERS = 500


class Mirror:
    """Keeps a copy of the run in `path`, an empty folder; of append-only files first the last `tail` bytes.

    `refresh` fetches what is new. If the connection fails, it reconnects once: the server may have restarted.
    """

    def __init__(
        self, connect: Callable[[], FileClient], path: Path, tail: int | None = None, growing: Sequence[str] = GROWING
    ) -> None:
        self._connect, self._tail, self._growing = connect, tail, growing
        self.folder = RunFolder(path)
        self._observer = connect()
        self.address, self.run = self._observer.address, printable(self._observer.run, MAX_LETTERS)
        self._most = MAX_NBYTES if tail is None else TAILS * tail
        self._offsets: dict[str, int] = {}
        self._held = contextlib.ExitStack()

    def refresh(self) -> bool:
        """Fetch new data; return whether anything changed. If the server is gone, unlock and raise RunFailed."""
        try:
            return self._sync()
        except ConnectionError:
            self._observer.close()
        try:
            self._observer = self._connect()
            if (now := printable(self._observer.run, MAX_LETTERS)) != self.run:
                raise ConnectionError(f"it now serves {now}")
            return self._sync()
        except Exception as error:
            self.close()
            why = printable(str(error), MAX_LETTERS)
            raise RunFailed(
                f"{self.address} no longer answers ({why}): {self.run} has ended there, or its server was killed; "
                f"run 'paceline status {self.run}' on that machine"
            ) from None

    def _sync(self) -> bool:
        if (config := self._observer.read("config.toml")) is None:
            raise ConnectionError("it shows no config.toml")
        changed = self._store("config.toml", config)
        if not self.folder.is_locked():
            self._held.enter_context(self.folder.locked())
        result = self._observer.read("result.json")  # read first: if there is one, the other files are complete
        for name in self._growing:
            changed |= self._follow(name)
        return changed | self._store("result.json", result)

    def _store(self, name: str, piece: FileChunk | None) -> bool:
        """Store a small file as a whole; return whether it changed."""
        path, found = self.folder.path / name, piece.data if piece is not None else None
        before = path.read_bytes() if path.exists() else None
        if found is None:
            path.unlink(missing_ok=True)
        elif found != before:
            write_atomically(path, found)
        return found != before

    def _follow(self, name: str) -> bool:
        """Append what a file has grown by; fetch a file that became shorter from its start."""
        path, begun = self.folder.path / name, self._offsets.get(name)
        offset = begun if begun is not None else -self._tail if self._tail is not None else 0
        piece, deadline = self._read(name, offset), time.monotonic() + MAX_SECONDS
        if piece is not None and begun is not None and piece.size < begun:
            path.unlink(missing_ok=True)
            piece = self._read(name, 0)
        if piece is None:
            return False
        until = piece.size  # what is appended meanwhile comes with the next refresh
        if until - piece.offset > self._most:
            raise ConnectionError(f"it says that {name} has {until:,} bytes: look at it there")
        with path.open("ab") as file:
            while piece is not None:
                if file.tell() + len(piece.data) > self._most:
                    raise RunFailed(f"{self.address} sends more than {self._most:,} bytes of {name}: look at it there")
                file.write(piece.data)
                self._offsets[name], age = piece.offset + len(piece.data), piece.age
                grows = piece.data and self._offsets[name] < until
                if grows and self._tail is not None and time.monotonic() > deadline:
                    raise ConnectionError(f"it takes more than {MAX_SECONDS:g} s to send {name}")
                piece = self._read(name, self._offsets[name]) if grows else None
        os.utime(path, 2 * (time.time() - age,))
        return self._offsets[name] != begun

    def _read(self, name: str, offset: int) -> FileChunk | None:
        """Read a piece of a file; raise ConnectionError for one that is not what was asked for."""
        piece = self._observer.read(name, offset)
        if piece is None:
            return None
        begin = offset if offset >= 0 else max(0, piece.size + offset)
        is_shorter = piece.size < begin  # the file was cut off since
        is_sane = 0 <= piece.size < MAX_SIZE and 0.0 <= piece.age < MAX_AGE
        if not is_sane or not (piece.offset == begin or is_shorter):
            raise ConnectionError(f"a part of {name} that was not asked for")
        return piece

    def close(self) -> None:
        """Disconnect and unlock; the copy stays."""
        self._held.close()
        self._observer.close()
