"""Recorded runs whose files are closed when the test ends, and connections with and without TLS."""

from __future__ import annotations

from tests.support.recorded_runs import record
from tests.support.served_runs import tls

__all__ = ["record", "tls"]
