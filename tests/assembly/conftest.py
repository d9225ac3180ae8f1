"""Recorded runs whose files are closed when the test ends."""

from __future__ import annotations

from tests.support.recorded_runs import record

__all__ = ["record"]
