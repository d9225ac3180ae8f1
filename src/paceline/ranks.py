"""Processes that a launcher such as torchrun started, as their environment says. Importing this imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from paceline.assemble import cores, on_ring
from paceline.config import RunConfig
from paceline.errors import UserError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rank:
    """One of `size` processes, and one of the `local_size` on its machine."""

    number: int
    size: int
    local: int
    local_size: int
    address: str
    port: int
    store_is_there: bool
    """Whether the launcher itself keeps the store of addresses; if not, the first rank does."""

    @property
    def leads(self) -> bool:
        """Whether this one keeps the run's folder and speaks to the user."""
        return self.number == 0


def rank_here() -> Rank | None:
    """None where no launcher started this process."""
    if not all(name in os.environ for name in VARIABLES):
        return None
    try:
        number, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError:
        found = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES)
        raise UserError(f"a launcher's variables must be numbers, found {found}") from None
    if not 0 <= number < size:
        raise UserError(f"RANK={number} with WORLD_SIZE={size}: ranks are counted from 0 to {size - 1}")
    store_is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Rank(number, size, local, local_size, os.environ["MASTER_ADDR"], port, store_is_there)


def config_of(rank: Rank, config: RunConfig) -> RunConfig:
    """The config of one rank: a launcher's processes are the workers of a ring, as many as the user thinks."""
    if not on_ring(config):
        raise UserError(
            f"strategy {config.strategy} starts its own workers, and a launcher has started {rank.size} of this "
            "command: leave the launcher out, or choose --strategy allreduce"
        )
    if config.workers is not None and config.workers != rank.size:
        raise UserError(
            f"--workers {config.workers}, but the launcher started {rank.size} processes (WORLD_SIZE): leave --workers "
            "out, or start as many"
        )
    threads = config.threads or max(1, cores() // rank.local_size)
    return replace(config, workers=rank.size, threads=threads)
