"""A served run's folder, copied over the network as it grows: what reads run folders reads this one too.

It is locked, as a folder is into which somebody trains, for as long as the server answers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import RunFailed
from paceline.runs.folder import RunFolder, write_atomically
from paceline.transports.file_client import Observer, Piece

GROWING = ("arrivals.log", "events.jsonl")
"""The events last: a server that has ended waits until they were seen."""


class Mirror:
    """Keeps the copy in `path`, an empty folder, in step with the run; of growing files the last `tail` bytes at first.

    `refresh` asks for what is new. A server that is gone is looked for once more, as it may have been started anew.
    """

    def __init__(
        self,
        reach: Callable[[], Observer],
        path: Path,
        tail: int | None = None,
        growing: Sequence[str] = GROWING,
    ) -> None:
        self._reach, self._tail, self._growing = reach, tail, growing
        self.folder = RunFolder(path)
        self._observer = reach()
        self.address, self.run = self._observer.address, self._observer.run
        self._offsets: dict[str, int] = {}
        self._held = contextlib.ExitStack()

    def refresh(self) -> bool:
        """Whether anything has changed. RunFailed when the server is gone, and the lock with it."""
        try:
            return self._look()
        except ConnectionError:
            self._observer.close()
        try:
            self._observer = self._reach()
            if self._observer.run != self.run:
                raise ConnectionError(f"{self._observer.run} is served there now")
            return self._look()
        except Exception as error:
            self.close()
            raise RunFailed(
                f"{self.address} answers no more ({error}): {self.run} has ended there, or its server was killed; "
                f"'paceline status {self.run}' on that machine tells which"
            ) from None

    def _look(self) -> bool:
        changed = self._store("config.toml", self._observer.read("config.toml"))
        if not self.folder.is_locked():
            self._held.enter_context(self.folder.locked())
        result = self._observer.read("result.json")  # asked for first: where there is one, the rest is complete
        for name in self._growing:
            changed |= self._follow(name)
        return changed | self._store("result.json", result)

    def _store(self, name: str, piece: Piece | None) -> bool:
        """A small file, whole."""
        path, found = self.folder.path / name, piece.data if piece is not None else None
        before = path.read_bytes() if path.exists() else None
        if found is None:
            path.unlink(missing_ok=True)
        elif found != before:
            if before is None or name != "config.toml":
                write_atomically(path, found)
            else:  # in place, since it is the lock too
                with path.open("r+b") as file:
                    file.write(found)
                    file.truncate()
        return found != before

    def _follow(self, name: str) -> bool:
        """What a file has grown by; one that has become shorter is begun anew."""
        path, begun = self.folder.path / name, self._offsets.get(name)
        offset = begun if begun is not None else -self._tail if self._tail is not None else 0
        piece = self._observer.read(name, offset)
        if piece is not None and begun is not None and piece.size < begun:
            path.unlink(missing_ok=True)
            piece = self._observer.read(name)
        if piece is None:
            return False
        with path.open("ab") as file:
            while piece is not None:
                file.write(piece.data)
                self._offsets[name], age = piece.offset + len(piece.data), piece.age
                grows = piece.data and self._offsets[name] < piece.size
                piece = self._observer.read(name, self._offsets[name]) if grows else None
        os.utime(path, 2 * (time.time() - age,))
        return self._offsets[name] != begun

    def close(self) -> None:
        """Hang up; what was copied stays."""
        self._held.close()
        self._observer.close()
