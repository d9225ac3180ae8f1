"""Connections with and without TLS."""

from __future__ import annotations

from tests.support.served_runs import tls

__all__ = ["tls"]
