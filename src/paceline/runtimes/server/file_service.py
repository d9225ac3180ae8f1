"""Serve a run's files to observers over the network: one thread an observer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

from paceline.errors import ProtocolError
from paceline.runs.folder import RunFolder
from paceline.transports.connection import Connection, send
from paceline.transports.file_client import SHOWN, FileChunk, read_look
from paceline.transports.frames import MAX_SEEN, FrameKind, fields_frame, header
from paceline.transports.listener import JoinRequest

MAX_OBSERVERS = 16
IDLE_SECONDS = 120.0
ENDING_SECONDS = 3.0  # how long observers may still read the result after the run's end


class FileService:
    """The observers of one run. The server's thread only admits them."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._here: dict[Connection, set[str]] = {}
        """Which of the last files each has read completely: the result, and then the events."""
        self._changed = threading.Condition()

    def admit(self, applicant: JoinRequest) -> None:
        """Admit an observer, unless there are too many."""
        connection = applicant.connection
        with self._changed:
            if len(self._here) >= MAX_OBSERVERS:
                applicant.refuse(f"{MAX_OBSERVERS} observers watch this run already: close one of them")
                return
            self._here[connection] = set()
        applicant.take_on({"run": str(self._folder.path)})
        threading.Thread(target=self._serve, args=(connection,), name="paceline-observer", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        connection.sock.settimeout(IDLE_SECONDS)
        try:
            with contextlib.suppress(ConnectionError, ProtocolError):
                while True:
                    self._answer(connection, read_look(connection))
        finally:
            connection.close()
            with self._changed:
                del self._here[connection]
                self._changed.notify_all()

    def _answer(self, connection: Connection, look: dict[str, Any]) -> None:
        name, offset, most = look["file"], look["offset"], look["most"]
        if name not in SHOWN:
            raise ProtocolError("an observer asked for a file that is not served")
        piece = read_piece(self._folder, name, offset, most)
        known = {"offset": piece.offset, "size": piece.size, "age": piece.age} if piece is not None else {}
        data = piece.data if piece is not None else b""
        send(connection, fields_frame(FrameKind.SEEN, known, MAX_SEEN), header(FrameKind.BODY, len(data)), data)
        if piece is not None and piece.offset + len(data) == piece.size:
            self._note(connection, name)

    def _note(self, connection: Connection, name: str) -> None:
        """Record that an observer has read a file completely."""
        with self._changed:
            seen = self._here[connection]
            if name == "result.json" or (name == "events.jsonl" and seen):
                seen.add(name)
                self._changed.notify_all()

    def end(self, seconds: float = ENDING_SECONDS) -> None:
        """Wait until every observer has read the result, but at most `seconds`, and disconnect all."""
        with self._changed:
            self._changed.wait_for(lambda: all(len(seen) == 2 for seen in self._here.values()), seconds)
            for connection in self._here:
                connection.shut_down()


def read_piece(folder: RunFolder, name: str, offset: int, most: int) -> FileChunk | None:
    """Read bytes of one of the run's files, from its end if `offset` is negative; None if there is no such file."""
    try:
        with (folder.path / name).open("rb") as file:
            found = os.fstat(file.fileno())
            begin = max(0, found.st_size + offset) if offset < 0 else min(offset, found.st_size)
            file.seek(begin)
            data = file.read(min(most, found.st_size - begin))  # it may have grown meanwhile
            return FileChunk(begin, found.st_size, max(0.0, time.time() - found.st_mtime), data)
    except OSError:
        return None
