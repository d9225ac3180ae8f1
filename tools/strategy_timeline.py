"""Timeline of each worker, read from the folder of a simulated run with constant step times and a fast link."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paceline.config import RunConfig
from paceline.core.messages import Disposition
from paceline.runs.arrival_log import Record, read_arrivals
from paceline.runs.folder import RunFolder
from paceline.settings.notation import seconds
from paceline.settings.strategies import on_ring, strategy_of
from paceline.simulation.network import parse_link, ring_seconds

SLACK = 0.0001
"""Maximum seconds that the bytes of small messages add to the link's latency."""


@dataclass(frozen=True)
class Push:
    """One push: begin and end of its work, arrival at the server, staleness, and whether it was applied."""

    worker: int
    began: float
    ended: float
    arrived: float
    steps: int
    staleness: int
    counted: bool


@dataclass(frozen=True)
class Timeline:
    """The timeline of a run; times in seconds."""

    strategy: str
    step_seconds: list[float]
    pushes: list[Push]
    updates: list[float]
    exchange: float
    """Seconds per message; on a ring, seconds of the whole exchange."""
    ring: bool

    @property
    def in_rounds(self) -> bool:
        return strategy_of(self.strategy).in_rounds


def read_timeline(path: Path) -> Timeline:
    """Read the timeline of the run folder at `path`."""
    folder = RunFolder.open(path)
    config = folder.config()
    records, _ = read_arrivals(folder.arrivals_file, config)
    ring = on_ring(config)
    step_seconds = [seconds(text) for text in (config.speeds or "").split(",")]
    exchange = _exchange(config, ring)
    updates = _updates(records, config)
    way = 0.0 if ring else exchange
    steps = {worker: strategy_of(config).local_steps for worker in range(len(step_seconds))}
    told, pushes, taken = dict(steps), [], 0
    number = strategy_of(config).pushes_per_update(len(step_seconds))
    last: dict[int, tuple[float, int]] = {}  # when a worker's last push came, and the version after it
    for record in records:
        worker = record.worker
        if record.kind == "steps":
            told[worker] = record.seq  # valid from the reply to the push that is logged with it
        if record.kind != "push":
            continue
        ended = record.now - way
        began = ended - steps[worker] * step_seconds[worker]
        replied = began - exchange
        arrived, version = last.get(worker, (0.0, 0))
        given = version if replied - arrived < SLACK else bisect_right(updates, replied + SLACK)
        counted = record.disposition == Disposition.TAKEN
        pushes.append(Push(worker, began, ended, record.now, steps[worker], taken // number - given, counted))
        taken += counted
        last[worker] = record.now, taken // number
        steps[worker] = told[worker]
    return Timeline(config.strategy, step_seconds, pushes, updates, exchange, ring)


def _exchange(config: RunConfig, ring: bool) -> float:
    if config.link is None:
        return 0.0
    link = parse_link(config.link)
    return ring_seconds(config.workers or 1, 0, link) if ring else link.latency


def _updates(records: list[Record], config: RunConfig) -> list[float]:
    """Return the time of each update: every accepted push, or the last of every round."""
    taken = [record.now for record in records if record.kind == "push" and record.disposition == Disposition.TAKEN]
    number = strategy_of(config).pushes_per_update(config.workers or 1)
    return taken[number - 1 :: number]


def waits(timeline: Timeline, worker: int) -> list[tuple[float, float]]:
    """Return when `worker` waited: from the arrival of its push until the server sent the reply."""
    own = [push for push in timeline.pushes if push.worker == worker]
    return [(first.arrived, then.began - timeline.exchange) for first, then in pairwise(own)]


def agrees(timeline: Timeline, path: Path) -> bool:
    """Return whether the timeline has the same counts as the run's result."""
    result = json.loads((path / "result.json").read_text(encoding="utf-8"))
    counted = [push.staleness for push in timeline.pushes if push.counted]
    mean = sum(counted) / len(counted)
    dropped = sum(not push.counted for push in timeline.pushes)
    same_mean = abs(mean - result["staleness"]["mean"]) < 0.001
    return same_mean and len(timeline.updates) == result["updates"] and dropped == result["dropped_pushes"]
