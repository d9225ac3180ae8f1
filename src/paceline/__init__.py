"""Train PyTorch models on many workers; one word, the strategy, chooses how they keep pace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api import train
    from paceline.config import RunConfig
    from paceline.errors import PacelineError, UserError
    from paceline.runtimes.scripts.session import Session, join
    from paceline.tasks.metrics import Perplexity
    from paceline.tasks.supervised import SupervisedTask as Task
    from paceline.tracking.tracker import Tracker

__all__ = ["PacelineError", "Perplexity", "RunConfig", "Session", "Task", "Tracker", "UserError", "join", "train"]

_HOMES = {
    "PacelineError": "paceline.errors:PacelineError",
    "Perplexity": "paceline.tasks.metrics:Perplexity",
    "RunConfig": "paceline.config:RunConfig",
    "Session": "paceline.runtimes.scripts.session:Session",
    "Task": "paceline.tasks.supervised:SupervisedTask",
    "Tracker": "paceline.tracking.tracker:Tracker",
    "UserError": "paceline.errors:UserError",
    "join": "paceline.runtimes.scripts.session:join",
    "train": "paceline.api:train",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    import importlib

    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
