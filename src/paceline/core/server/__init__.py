"""The server as a pure state machine: inputs in, replies out. It owns the weights."""

from paceline.core.server.aggregation import TrimmedMean
from paceline.core.server.checkpoint import restore_server, server_facts
from paceline.core.server.guard import Finding, NormHistory, PushGuard
from paceline.core.server.optimizers import OptimizersServer
from paceline.core.server.roster import Roster
from paceline.core.server.server import Server
from paceline.core.server.updates import (
    RECOMPUTE_EVERY,
    AppliedUpdate,
    Divergence,
    Exchange,
    Mean,
    Updater,
)

__all__ = [
    "RECOMPUTE_EVERY",
    "AppliedUpdate",
    "Divergence",
    "Exchange",
    "Finding",
    "Mean",
    "NormHistory",
    "OptimizersServer",
    "PushGuard",
    "Roster",
    "Server",
    "TrimmedMean",
    "Updater",
    "restore_server",
    "server_facts",
]
