"""The strategies: how workers keep pace, by name. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.errors import UserError, name_and_argument, whole_number

IN_ROUNDS = ("sync", "backup", "allreduce", "local", "diloco")


ON_ARRIVAL = ("async", "bounded")


LOCAL = ("local", "diloco", "async-local")
"""Strategies whose workers push the drift of steps of their own."""


OUTER = {"diloco": (0.7, 0.9), "async-local": (0.4, 0.8)}
"""The outer learning rate and momentum of those that have them, unless said: as published (arXiv 2311.08105), and
shorter where every drift is a round old: 10 workers whose drifts go all the way diverge from about .6 on."""


STRATEGIES = {
    "classic": "one worker, no process",
    "sync": "replies when all have pushed",
    "async": "replies at once",
    "backup": "replies when all but B have pushed: backup:B",
    "bounded": "replies while within S steps of the slowest: bounded:S",
    "allreduce": "all exchange with all, in step",
    "local": "H steps each, then the mean of their drifts: local:H",
    "diloco": "H steps each, then Nesterov's momentum on the mean drift: diloco:H",
    "async-local": "H steps each, each drift applied at once, momentum once a round: async-local:H",
}
ARGUMENTS = {"backup": ("B", 1), "bounded": ("S", 0), **dict.fromkeys(LOCAL, ("H", 1))}
"""What stands behind a strategy's colon, and the least it can be."""
RINGS = ("allreduce", "local", "diloco")
"""Strategies that need no server."""


@dataclass(frozen=True)
class Strategy:
    """A strategy's name and the number behind its colon."""

    name: str
    number: int = 0

    @property
    def in_rounds(self) -> bool:
        """Whether several pushes make one update."""
        return self.name in ("sync", "backup", "allreduce", "local", "diloco")

    @property
    def is_local(self) -> bool:
        """Whether a worker pushes the drift of steps of its own."""
        return self.name in LOCAL

    @property
    def local_steps(self) -> int:
        """Steps a worker makes for one push."""
        return self.number if self.is_local else 1


def on_ring(config: RunConfig) -> bool:
    """Whether workers exchange with each other instead of with a server."""
    return config.path != "star" and parse_strategy(config.strategy).name in RINGS


def on_star(config: RunConfig) -> bool:
    """Whether workers exchange with a server, over a wire that codecs can relieve."""
    return not on_ring(config) and parse_strategy(config.strategy).name != "classic"


def keeps_own(config: RunConfig) -> bool:
    """Whether a worker's next push depends on earlier ones of its own: an optimizer inside local steps."""
    stateless = config.optimizer == "sgd" and not config.momentum
    return parse_strategy(config.strategy).is_local and not stateless


def require_gradients(config: RunConfig) -> None:
    """Refuse strategies whose workers step by themselves, where the user's own loop does the stepping."""
    if parse_strategy(config.strategy).is_local:
        raise UserError(
            f"strategy {config.strategy} steps inside its workers, and your own loop pushes gradients: "
            "use sync, async or bounded:S, or paceline.train with a task"
        )


def parse_strategy(text: str) -> Strategy:
    """`sync`, `backup:1`, `bounded:3`; a clear error for anything else.

    >>> parse_strategy("bounded:3")
    Strategy(name='bounded', number=3)
    """
    letters = {name: ARGUMENTS[name][0] if name in ARGUMENTS else "" for name in STRATEGIES}
    name, argument = name_and_argument("strategy", text, letters)
    if name not in ARGUMENTS:
        return Strategy(name)
    return Strategy(name, whole_number("strategy", text, argument, ARGUMENTS[name][1]))


def pushes_per_update(strategy: Strategy, workers: int) -> int:
    """How many pushes make one update."""
    if not strategy.in_rounds:
        return 1
    return workers - strategy.number if strategy.name == "backup" else workers


def pushes_in_a_step(strategy: Strategy, workers: int) -> int:
    """Over how many pushes a step is averaged: under async-local, those of a round each count for their share."""
    return workers if strategy.name == "async-local" else pushes_per_update(strategy, workers)
