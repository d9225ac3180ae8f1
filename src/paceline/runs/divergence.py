"""What to tell somebody whose run has diverged."""

from __future__ import annotations

from paceline.config import RunConfig
from paceline.core.server import Server


def why_diverged(config: RunConfig, server: Server) -> str:
    """What happened, the likely cause, and what to change."""
    found = server.divergence
    where = f"update {server.version} ({server.samples} samples)"
    what = (
        f"worker {found.worker} sent a push with a NaN or infinity (its loss was {found.loss:g})"
        if found is not None
        else "the weights are no longer finite"
    )
    stale = " Stale pushes act as extra momentum, so" if server.num_workers > 1 else " So"
    lower = f" lower --momentum (now {config.momentum:g})," if config.optimizer == "sgd" and config.momentum else ""
    advice = f"{stale} try --lr {(config.lr or 0) / 4:g} (now {config.lr:g}),{lower} --clip 1 or --warmup 0.05"
    if config.rule == "plain" and config.strategy.startswith(("async", "bounded")) and server.num_workers > 1:
        advice += "; or --rule auto, which allows for staleness"
    if config.outer_lr is not None:
        advice += f"; or --outer-lr {config.outer_lr / 2:g} (now {config.outer_lr:g})"
    return f"training diverged at {where}: {what}.{advice}"
