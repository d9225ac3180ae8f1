"""Workers that were started one by one on the same machine, each of which thinks that all its cores are its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.runs.environment import machine_name


class Place(NamedTuple):
    """Where a worker computes. Workers of one process take turns, and share its threads."""

    machine: str
    cores: int
    process: int
    threads: int


def own_place(threads: int) -> dict[str, Any]:
    """What a worker tells of this process when it applies."""
    return Place(machine_name(), os.cpu_count() or 1, os.getpid(), threads)._asdict()


class Crowds:
    """Who computes where, and whether a machine has cores for all of them."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._told: set[str] = set()

    def come(self, worker: int, told: object) -> str | None:
        """Somebody came: a line for the user the first time that its machine has more threads at work than cores.

        >>> crowds, here = Crowds(), {"machine": "m", "cores": 2, "threads": 2}
        >>> crowds.come(0, here | {"process": 71}), crowds.come(1, here | {"process": 71})
        (None, None)
        >>> print(crowds.come(2, here | {"process": 72}))
        workers 0, 1 and 2 share the 2 cores of a machine with 4 threads, and wait for each other: give each --threads 1
        """
        place = _parse(told)
        if place is None:
            return None
        self._places[worker] = place
        here = {number: one for number, one in self._places.items() if one.machine == place.machine}
        threads = {one.process: one.threads for one in here.values()}
        if sum(threads.values()) <= place.cores or len(threads) == 1 or place.machine in self._told:
            return None
        self._told.add(place.machine)
        *others, last = sorted(here)
        return (
            f"workers {', '.join(map(str, others))} and {last} share the {place.cores} cores of a machine with "
            f"{sum(threads.values())} threads, and wait for each other: give each --threads "
            f"{max(1, place.cores // len(threads))}"
        )

    def leave(self, worker: int) -> None:
        """It computes no more."""
        self._places.pop(worker, None)


def _parse(told: object) -> Place | None:
    """What a worker told; None where it is nothing of ours.

    >>> _parse({"machine": "m", "cores": 0, "process": 7, "threads": 1}) is None
    True
    """
    if not isinstance(told, Mapping) or set(told) != set(Place._fields) or not isinstance(told["machine"], str):
        return None
    numbers = [told[name] for name in ("cores", "process", "threads")]
    return Place(**told) if all(type(number) is int and number > 0 for number in numbers) else None
