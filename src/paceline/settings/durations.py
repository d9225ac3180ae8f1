"""Delays that slow workers on purpose: parsed from `--delay`, drawn from (seed, worker, push)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from paceline.config import RunConfig, max_workers_of
from paceline.errors import UserError
from paceline.randomness import rng
from paceline.settings.notation import seconds

_FORM = "write 30ms, normal:60ms,5ms or 0.5s, with @1,3 behind it for those workers only"


@dataclass(frozen=True)
class Delay:
    """Seconds that a worker waits before each push: constant, or normal and never below zero."""

    mean: float
    deviation: float = 0.0

    def seconds(self, seed: int, worker: int, seq: int) -> float:
        """The wait before push `seq` of a worker; the same whenever it is drawn."""
        if not self.deviation:
            return self.mean
        return max(0.0, self.mean + self.deviation * float(rng(seed, "delay", worker, seq).standard_normal()))


def delays_of(config: RunConfig, num_workers: int | None = None) -> Mapping[int, Delay]:
    """The delay of each delayed worker of a run, parsed once, for `num_workers` workers (default: the config's)."""
    return _parse(tuple(config.delay or ()), num_workers or max_workers_of(config))


@cache
def _parse(texts: tuple[str, ...], num_workers: int) -> Mapping[int, Delay]:
    """A later text wins over an earlier one.

    >>> _parse(("30ms", "normal:60ms,5ms@1"), 2)
    {0: Delay(mean=0.03, deviation=0.0), 1: Delay(mean=0.06, deviation=0.005)}
    """
    delays: dict[int, Delay] = {}
    for text in texts:
        amount, at, names = text.partition("@")
        kind, colon, times = amount.partition(":")
        if not colon:
            delay = Delay(_seconds(amount, text))
        elif kind == "normal" and times.count(",") == 1:
            mean, deviation = times.split(",")
            delay = Delay(_seconds(mean, text), _seconds(deviation, text))
        else:
            raise UserError(f"--delay '{text}': {_FORM}")
        for name in names.split(",") if at else map(str, range(num_workers)):
            if not name.strip().isdecimal() or int(name) >= num_workers:
                raise UserError(f"--delay '{text}': no worker '{name}', there are 0 to {num_workers - 1}")
            delays[int(name)] = delay
    return delays


def _seconds(text: str, whole: str) -> float:
    try:
        return seconds(text)
    except UserError:
        raise UserError(f"--delay '{whole}': '{text}' is not a time; {_FORM}") from None
