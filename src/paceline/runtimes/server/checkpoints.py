"""When a run is cut, and how the cut gets to disk beside it: on another thread, the log first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from paceline.config import RunConfig
from paceline.core.buffers import Memory
from paceline.core.server import Server
from paceline.interfaces import Report
from paceline.runs.arrival_log import ArrivalLog
from paceline.runs.background_writer import Writer
from paceline.runs.checkpoint import Cut, Room, take_checkpoint, tensor_kinds, write_checkpoint
from paceline.runs.events import EventLog, read_events
from paceline.runs.folder import RunFolder


class Checkpoints:
    """Cuts of one server. `writer` also writes what else a run leaves; failures of either are told here."""

    def __init__(
        self,
        server: Server,
        config: RunConfig,
        folder: RunFolder,
        log: ArrivalLog,
        events: EventLog,
        report: Report,
        seconds: float,
        virtual: bool,
    ) -> None:
        self._server, self._config, self._folder = server, config, folder
        self._log, self._events, self._report = log, events, report
        self.writer = Writer(background=not virtual)
        self._virtual = virtual
        self._room = Room()
        self._next = math.inf if config.timing_only else seconds + config.checkpoint_every
        self._next_room = math.inf if virtual else seconds + config.checkpoint_every / 2

    def is_due(self, now: float) -> bool:
        """Whether the next one is only waiting for its moment."""
        return now >= self._next

    def look(self, now: float, memories: dict[int, Memory], may_be_cut: Callable[[], bool]) -> bool:
        """Whether this is the moment; long before the first, room is made for it."""
        if now >= self._next_room:
            self._make_room(memories)
        return self.is_due(now) and self._server.can_be_cut and not self.writer.busy and may_be_cut()

    def _make_room(self, memories: dict[int, Memory]) -> None:
        """On the other thread, what would make the first pause longer than the others."""
        self._next_room = math.inf
        kinds = tensor_kinds(self._server, memories)
        self.writer.submit("room for checkpoints", lambda: self._room.make(kinds))

    def take(self, now: float, memories: dict[int, Memory], gather: Callable[[], None]) -> None:
        """Take a cut now and write it on another thread; if an earlier one failed, say so and go on."""
        began = time.perf_counter()
        gather()
        cut = take_checkpoint(self._server, memories, self._log.nbytes, now, self._room)
        pause = {} if self._virtual else {"pause_seconds": round(time.perf_counter() - began, 6)}
        self.writer.submit("a checkpoint", lambda: self._write(cut))
        self._events.write("checkpoint", now, updates=self._server.version, **pause)
        self._next = now + self._config.checkpoint_every
        self.complain(now)

    def take_and_wait(self, now: float, memories: dict[int, Memory], gather: Callable[[], None]) -> None:
        """Take a cut and see it written before anything else happens; others wait for it."""
        gather()
        self._write(take_checkpoint(self._server, memories, self._log.nbytes, now))

    def _write(self, cut: Cut) -> None:
        """On disk, the log first: a checkpoint never speaks of more than the log has, even after a power cut."""
        self._log.sync()
        write_checkpoint(self._folder.checkpoints, cut, self._config.keep)
        self._room.recycle(cut)

    def complain(self, now: float) -> None:
        """Tell what cannot be written, and what can be again."""
        for what, failure in self.writer.changes():
            if failure is None:
                self._events.write("writing_works", now, what=what)
                self._report({"kind": "note", "text": f"{what} could be written again"})
                continue
            text = f"{what} could not be written ({failure.strerror or failure}): the run goes on without it"
            self._events.write("writing_failed", now, what=what, error=str(failure))
            self._report({"kind": "note", "text": text})

    def upkeep(self) -> dict[str, Any]:
        """What the result says of checkpoints and resumes, over all lives of the run."""
        rows = list(read_events(self._folder.events_file)) if not self._virtual else []
        pauses = [row["pause_seconds"] for row in rows if row["kind"] == "checkpoint" and "pause_seconds" in row]
        total = {"count": len(pauses), "max": max(pauses, default=0.0), "total": round(sum(pauses), 6)}
        return {"checkpoint_pause_seconds": total, "resumes": sum(row["kind"] == "recovered" for row in rows)}
