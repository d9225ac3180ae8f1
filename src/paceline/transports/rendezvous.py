"""How processes that a launcher started find each other: rows by name, in files that only their user can read."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import UserError
from paceline.system.strict_json import to_json
from paceline.transports.auth import write_secret

LOOK_SECONDS = 0.05


class RendezvousStore(Protocol):
    """A store of rows by name, written by one process and read by the others."""

    def tell(self, name: str, row: dict[str, Any]) -> None:
        """Publish `row`."""

    def wait_for(self, name: str, seconds: float) -> dict[str, Any] | None:
        """Wait for a row that another process publishes. Return None after `seconds`."""

    def close(self) -> None: ...


class FileRendezvous:
    """A store in a folder of a file system that all machines share. Its rows hold the token: nobody else may enter."""

    def __init__(self, folder: Path, step: str, keeper: bool) -> None:
        self.path, self._keeper = folder / f".step-{step}", keeper
        if keeper:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._require_private()

    def tell(self, name: str, row: dict[str, Any]) -> None:
        """Publish `row` atomically."""
        self._require_private()
        write_secret(self._file(name), to_json(row).encode())

    def wait_for(self, name: str, seconds: float) -> dict[str, Any] | None:
        """Wait for a row. The folder is listed each time, because that makes a network file system ask its server."""
        file, deadline = self._file(name), time.monotonic() + seconds
        while True:
            with contextlib.suppress(FileNotFoundError):
                if file.name in os.listdir(self.path):  # noqa: PTH208
                    self._require_private()
                    return dict(json.loads(file.read_text()))
            if time.monotonic() > deadline:
                return None
            time.sleep(LOOK_SECONDS)

    def _require_private(self) -> None:
        """Raise UserError if another user made the folder or may enter it: he would tell ranks which server to obey."""
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            what = f"{self.path} is of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
            raise UserError(f"{what}, not ours alone (700): remove it, or choose another --runs DIR")

    def _file(self, name: str) -> Path:
        return self.path / f"{name.replace('/', '-')}.json"

    def close(self) -> None:
        """Remove the folder, in the process that keeps it."""
        if self._keeper:
            with contextlib.suppress(OSError):
                for file in self.path.iterdir():
                    file.unlink(missing_ok=True)
                self.path.rmdir()
