"""How processes that a launcher started find each other: rows by name, in files that only their user can read."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Protocol

from paceline.system.strict_json import to_json

LOOK_SECONDS = 0.05


class RendezvousStore(Protocol):
    """A store of rows by name, written by one process and read by the others."""

    def tell(self, name: str, row: dict[str, Any]) -> None:
        """Publish `row`."""

    def wait_for(self, name: str, seconds: float) -> dict[str, Any] | None:
        """Wait for a row that another process publishes. Return None after `seconds`."""

    def close(self) -> None: ...


class FileRendezvous:
    """A store in a folder of a file system that all machines share, of mode 700."""

    def __init__(self, folder: Path, step: str, keeper: bool) -> None:
        self.path, self._keeper = folder / f".step-{step}", keeper
        if keeper:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)

    def tell(self, name: str, row: dict[str, Any]) -> None:
        """Publish `row` atomically."""
        temporary = self.path / f".{name.replace('/', '-')}.{os.getpid()}"
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(to_json(row))
        temporary.replace(self._file(name))

    def wait_for(self, name: str, seconds: float) -> dict[str, Any] | None:
        """Wait for a row. The folder is listed each time, because that makes a network file system ask its server."""
        file, deadline = self._file(name), time.monotonic() + seconds
        while True:
            with contextlib.suppress(FileNotFoundError):
                if file.name in os.listdir(self.path):  # noqa: PTH208
                    return dict(json.loads(file.read_text()))
            if time.monotonic() > deadline:
                return None
            time.sleep(LOOK_SECONDS)

    def _file(self, name: str) -> Path:
        return self.path / f"{name.replace('/', '-')}.json"

    def close(self) -> None:
        """Remove the folder, in the process that keeps it."""
        if self._keeper:
            with contextlib.suppress(OSError):
                for file in self.path.iterdir():
                    file.unlink(missing_ok=True)
                self.path.rmdir()
