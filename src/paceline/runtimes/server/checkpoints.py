"""Decide when a run takes a checkpoint, copy it, and write it on another thread, the log first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from paceline.config import RunConfig
from paceline.core.buffers import WorkerBuffers
from paceline.core.server import Server
from paceline.interfaces import Report
from paceline.runs.arrival_log import ArrivalLog
from paceline.runs.checkpoint import Checkpoint, CopyBuffers, take_checkpoint, tensor_kinds, write_checkpoint
from paceline.runs.durable_files import BackgroundWriter
from paceline.runs.events import EventLog, read_events
from paceline.runs.folder import RunFolder

Sinks: TypeAlias = tuple[ArrivalLog, EventLog, Report]  # of inputs, of events, and of messages to the user


class Checkpoints:
    """The checkpoints of one server. Snapshots and best weights share `writer`; failures of all are reported here."""

    def __init__(
        self, server: Server, config: RunConfig, folder: RunFolder, sinks: Sinks, seconds: float, virtual: bool
    ) -> None:
        self._server, self._config, self._folder, self._virtual = server, config, folder, virtual
        self._log, self._events, self._report = sinks
        folder.sweep()
        self.writer, self._room = BackgroundWriter(background=not virtual), CopyBuffers()
        self.next_checkpoint = math.inf if config.timing_only else seconds + config.checkpoint_every
        self._next_room = math.inf if virtual else seconds + config.checkpoint_every / 2
        self.next_due = min(self.next_checkpoint, self._next_room)  # when to call `is_ready` again

    def is_ready(self, now: float, memories: dict[int, WorkerBuffers]) -> bool:
        """Whether a checkpoint is due and can be taken now. Long before the first one, buffers are made for it."""
        if now >= self._next_room:  # on the other thread, so that the first checkpoint's pause is no longer than others
            self._next_room, self.next_due = math.inf, self.next_checkpoint
            kinds = tensor_kinds(self._server, memories)
            self.writer.submit("room for checkpoints", lambda: self._room.make(kinds))
        can_take = self._server.can_checkpoint and self._server.divergence is None  # one to go back to, not the end
        return now >= self.next_checkpoint and can_take and not self.writer.busy

    def take(self, now: float, memories: dict[int, WorkerBuffers], gather: Callable[[], None]) -> None:
        """Copy a checkpoint now and write it on another thread; report it if an earlier one failed."""
        began = time.perf_counter()
        gather()
        checkpoint = take_checkpoint(self._server, memories, self._log.nbytes, now, self._room)
        pause = {} if self._virtual else {"pause_seconds": round(time.perf_counter() - began, 6)}
        self.writer.submit("a checkpoint", lambda: self._write(checkpoint))
        self._events.write("checkpoint", now, updates=self._server.version, **pause)
        self.next_checkpoint = now + self._config.checkpoint_every
        self.next_due = min(self.next_checkpoint, self._next_room)
        self.complain(now)

    def take_and_wait(self, now: float, memories: dict[int, WorkerBuffers], gather: Callable[[], None]) -> None:
        """Write a checkpoint in this thread; it is on disk when this returns."""
        gather()
        self._write(take_checkpoint(self._server, memories, self._log.nbytes, now))

    def _write(self, checkpoint: Checkpoint) -> None:
        """Write the log first: a checkpoint never covers more than the log, even after a power failure."""
        self._log.sync()
        write_checkpoint(self._folder.checkpoints, checkpoint, self._config.keep)
        self._room.recycle(checkpoint)

    def complain(self, now: float) -> None:
        """Report what could not be written, and what can be written again."""
        for what, failure in self.writer.changes():
            if failure is None:
                text = f"{what} could be written again"
                self._events.write("writing_works", now, what=what)
            else:
                why = f"could not be written in {self._folder.path} ({failure.strerror or failure})"
                text = f"{what} {why}: the run goes on without it"
                self._events.write("writing_failed", now, what=what, error=str(failure))
            self._report({"kind": "note", "text": text})

    def upkeep(self) -> dict[str, Any]:
        """The pauses for checkpoints and the number of resumes, over all incarnations of the server."""
        rows = read_events(self._folder.events_file) if not self._virtual else []
        pauses = [row["pause_seconds"] for row in rows if row["kind"] == "checkpoint" and "pause_seconds" in row]
        total = {"count": len(pauses), "max": max(pauses, default=0.0), "total": round(sum(pauses), 6)}
        return {"checkpoint_pause_seconds": total, "resumes": sum(row["kind"] == "recovered" for row in rows)}
