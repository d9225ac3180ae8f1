"""A run that is served on another machine, as something to watch: a copy of its folder, followed as any other."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

from paceline.analysis.status import RunStatus, Standing
from paceline.errors import PacelineError
from paceline.reports.watch.mirror import Mirror
from paceline.reports.watch.sources import FolderSource

AGAIN_SECONDS = 3.0
"""How often a server that answers no more is looked for."""
LOST = "unreachable"


class ServedRun:
    """Keeps the copy in step whenever somebody looks; a server that is gone is said, and what was last seen stays."""

    one = True

    def __init__(self, mirror: Mirror) -> None:
        mirror.refresh()
        self.title = f"{mirror.run} at {mirror.address}"
        self._mirror, self._copy = mirror, FolderSource(mirror.folder.path)
        self._lock = threading.Lock()
        self._next = 0.0
        self._loss: str | None = None

    def look(self) -> dict[str, dict[str, Any] | None]:
        with self._lock:
            self._refresh()
            found = list(self._copy.look().values())
        return {self.title: self._told(found[0])} if found and found[0] is not None else {}

    def standings(self) -> list[Standing]:
        with self._lock:
            self._refresh()
            return [Standing(self._stood(status), events) for status, events in self._copy.standings()]

    def _refresh(self) -> None:
        """Ask for what is new, of a server that is gone only now and then; the copy's lock goes with it."""
        if time.monotonic() < self._next:
            return
        try:
            self._mirror.refresh()
            self._loss = None
        except (PacelineError, OSError) as error:
            self._next = time.monotonic() + AGAIN_SECONDS
            self._loss = None if self._mirror.folder.result_file.exists() else str(error)

    def _told(self, digest: dict[str, Any]) -> dict[str, Any]:
        """With the run's own folder wherever the copy's is named."""
        text = json.dumps(digest).replace(
            json.dumps(str(self._mirror.folder.path))[1:-1], json.dumps(self._mirror.run)[1:-1]
        )
        told: dict[str, Any] = {**json.loads(text), "id": self.title, "name": Path(self._mirror.run).name}
        if self._loss is not None:
            told |= {"status": LOST, "going_on": False, "notes": [*told["notes"], self._loss]}
        return told

    def _stood(self, status: RunStatus) -> RunStatus:
        named = dataclasses.replace(status, run=self.title)
        return named if self._loss is None else dataclasses.replace(named, status=LOST, reason=self._loss)
