"""Creates trackers by name: built-in ones, and custom ones as MODULE:NAME."""

from __future__ import annotations

import importlib
from typing import cast

from paceline.errors import UserError
from paceline.settings.imports import TRACKERS, check_tracker, make_own
from paceline.tracking.tracker import Tracker

METHODS = ("started", "row", "finished")


def make_tracker(name: str) -> Tracker:
    """Create the tracker of this name; refuse one without the tracker methods."""
    check_tracker(name)
    if ":" not in name:
        module, _, attribute = TRACKERS[name].home.partition(":")
        return cast(Tracker, getattr(importlib.import_module(module), attribute)())
    tracker = make_own("tracker", name, "CLASS")
    missing = [method for method in METHODS if not callable(getattr(tracker, method, None))]
    if missing:
        raise UserError(
            f"tracker '{name}' creates a {type(tracker).__name__} without {' and '.join(missing)}: define "
            "started(settings, folder), row(kind, fields) and finished(result)"
        )
    return cast(Tracker, tracker)
