"""Feeds a run folder to a tracker. The event file is the queue: a slow tracker falls behind and misses nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.config import to_dict
from paceline.errors import RunFailed, UserError
from paceline.runs.events import EventReader
from paceline.runs.folder import RunFolder
from paceline.settings.imports import in_a_line
from paceline.tracking.tracker import Tracker

POLL_SECONDS = 0.25


def feed(
    folder: RunFolder,
    name: str,
    tracker: Tracker,
    is_running: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = lambda _: None,
) -> int:
    """Pass all rows of the run to the tracker, and new ones while `is_running`; return the number of rows.

    `note` is called with a sentence if rows are damaged.
    """
    reader, fed = EventReader(folder.events_file), 0
    known: dict[str, Any] = {"now": 0.0, "updates": 0, "samples": 0}
    config = folder.config()
    try:
        tracker.started(to_dict(config), folder.path)
        while True:
            more = is_running()  # checked first, so that rows written before the end are read after it
            for row in reader.read():
                kind = str(row.pop("kind", "unknown"))
                known |= {axis: row[axis] for axis in known if row.get(axis) is not None}
                tracker.row(kind, {**row, **known})
                fed += 1
            if not more:
                break
            time.sleep(POLL_SECONDS)
        for text in reader.parser.notes():
            note(text)
        tracker.finished(folder.result())
    except (KeyboardInterrupt, UserError):
        tracker.finished(None)  # keep what it has
        raise
    except Exception as error:
        raise RunFailed(f"tracker {name} failed after {fed} rows of {folder.path}: {in_a_line(error)}") from error
    return fed
