"""From a run's folder to a tracker: the one way, for runs that are over and for those that go on.

The event file is the queue: a tracker that is slow falls behind and misses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.config import to_dict
from paceline.errors import RunFailed
from paceline.runs.events import EventReader
from paceline.runs.folder import RunFolder
from paceline.settings.imports import in_a_line
from paceline.tracking.tracker import Tracker

LOOK_SECONDS = 0.25
AXES = ("updates", "samples")


def feed(folder: RunFolder, name: str, tracker: Tracker, goes_on: Callable[[], bool] = lambda: False) -> int:
    """Tell the tracker of the whole run, and of what is still written while it `goes_on`; returns how many rows."""
    reader, fed = EventReader(folder.events_file), 0
    known: dict[str, Any] = {"now": 0.0, **dict.fromkeys(AXES, 0)}
    config = folder.config()
    try:
        tracker.started(to_dict(config), folder.path)
        while True:
            more = goes_on()  # asked first: what was written before the end is read after it
            for row in reader.read():
                kind = str(row.pop("kind", "unknown"))
                known |= {axis: row[axis] for axis in known if axis in row}
                tracker.row(kind, {**known, **row})
                fed += 1
            if not more:
                break
            time.sleep(LOOK_SECONDS)
        tracker.finished(folder.result())
    except KeyboardInterrupt:
        tracker.finished(None)  # so that what it has is kept
        raise
    except Exception as error:
        raise RunFailed(f"tracker {name} failed after {fed} rows of {folder.path}: {in_a_line(error)}") from error
    return fed
