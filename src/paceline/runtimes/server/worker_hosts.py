"""What workers tell of the machines they are on, and what is odd there: too few cores for all, a clock that is off."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from paceline.system.environment import machine_name

SKEW_SECONDS = 10.0
"""Clocks that differ by less are one for every purpose here, and the message itself was under way."""


class Place(NamedTuple):
    """Where a worker computes. Workers of one process take turns, and share its threads."""

    machine: str
    cores: int
    process: int
    threads: int
    clock: float
    """Seconds since 1970, as it believes."""


def own_place(threads: int) -> dict[str, Any]:
    """What a worker tells of this process when it applies."""
    return Place(machine_name(), os.cpu_count() or 1, os.getpid(), threads, time.time())._asdict()


class Machines:
    """Who computes where. Each oddity is told once a machine."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._crowded: set[str] = set()
        self._off: set[str] = set()

    def come(self, worker: int, told: object, now: float) -> list[str]:
        """Somebody came; lines for the user, where its machine is the first time odd.

        >>> machines, here = Machines(), {"machine": "m", "cores": 2, "threads": 2, "clock": 70.0}
        >>> machines.come(0, here | {"process": 71}, 70.1), machines.come(1, here | {"process": 71}, 70.1)
        ([], [])
        >>> print(*machines.come(2, here | {"process": 72}, 70.1))
        workers 0, 1 and 2 share the 2 cores of a machine with 4 threads, and wait for each other: give each --threads 1
        """
        place = _parse(told)
        if place is None:
            return []
        self._places[worker] = place
        return [*self._crowd(place), *self._skew(worker, place, now)]

    def leave(self, worker: int) -> None:
        """It computes no more."""
        self._places.pop(worker, None)

    def _crowd(self, place: Place) -> Iterator[str]:
        here = {number: one for number, one in self._places.items() if one.machine == place.machine}
        threads = {one.process: one.threads for one in here.values()}
        total = sum(threads.values())
        if total > place.cores and len(threads) > 1 and place.machine not in self._crowded:
            self._crowded.add(place.machine)
            *others, last = sorted(here)
            yield (
                f"workers {', '.join(map(str, others))} and {last} share the {place.cores} cores of a machine with "
                f"{total} threads, and wait for each other: give each --threads {max(1, place.cores // len(threads))}"
            )

    def _skew(self, worker: int, place: Place, now: float) -> Iterator[str]:
        behind = now - place.clock
        if abs(behind) > SKEW_SECONDS and place.machine not in self._off:
            self._off.add(place.machine)
            off = f"{abs(behind):,.0f} s {'behind' if behind > 0 else 'ahead of'} ours"
            yield (
                f"the clock of worker {worker}'s machine is {off}: training does not mind, but dates of files and "
                "certificates will not agree; set it right"
            )


def _parse(told: object) -> Place | None:
    """What a worker told; None where it is nothing of ours.

    >>> _parse({"machine": "m", "cores": 0, "process": 7, "threads": 1, "clock": 7.0}) is None
    True
    """
    if not isinstance(told, Mapping) or set(told) != set(Place._fields):
        return None
    place = Place(**told)
    counts = (place.cores, place.process, place.threads)
    if not isinstance(place.machine, str) or not isinstance(place.clock, float):
        return None
    return place if all(type(count) is int and count > 0 for count in counts) else None
