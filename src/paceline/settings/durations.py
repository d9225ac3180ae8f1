"""Delays on purpose, so that stragglers can be studied for real: parsed from text, drawn by address."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import UserError
from paceline.randomness import rng

_FORM = "write 30ms, normal:60ms,5ms or 0.5s, with @1,3 behind it for those workers only"
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Delay:
    """Seconds a worker waits before each push: constant, or normal and never below zero."""

    mean: float
    deviation: float = 0.0

    def seconds(self, seed: int, worker: int, seq: int) -> float:
        """The wait before push `seq`; a function of its address."""
        if not self.deviation:
            return self.mean
        return max(0.0, self.mean + self.deviation * float(rng(seed, "delay", worker, seq).standard_normal()))


def _seconds(text: str, whole: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(us|ms|s)", text.strip())
    if match is None:
        raise UserError(f"--delay '{whole}': '{text}' is not a time; {_FORM}")
    return float(match[1]) * _UNITS[match[2]]


def parse_delays(texts: list[str], num_workers: int) -> dict[int, Delay]:
    """The delay of each delayed worker; later texts win over earlier ones.

    >>> parse_delays(["30ms", "normal:60ms,5ms@1"], 2)
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
        for worker in _named(names, text, num_workers) if at else range(num_workers):
            delays[worker] = delay
    return delays


def _named(names: str, whole: str, num_workers: int) -> list[int]:
    workers = []
    for name in names.split(","):
        if not name.strip().isdecimal() or int(name) >= num_workers:
            raise UserError(f"--delay '{whole}': no worker '{name}', there are 0 to {num_workers - 1}")
        workers.append(int(name))
    return workers


_NUMBER = r"(\d+\.?\d*(?:e-?\d+)?|\.\d+)"


_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


_BYTES_PER_SECOND = {f"{prefix}bit": 125.0 * 1000**power for power, prefix in enumerate("kmgt")}


_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def _quantity(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = re.fullmatch(_NUMBER + r"\s*([A-Za-z]*)", text.strip())
    if match is None:
        raise UserError(f"'{text}' is not {what}: write a number and its unit, as in {example}")
    if match[2] not in units:
        known = ", ".join(unit or "no unit" for unit in units)
        raise UserError(f"'{text}' has the unknown unit '{match[2]}': {what} is given in {known}, as in {example}")
    return float(match[1]) * units[match[2]]


def seconds(text: str) -> float:
    """A time.

    >>> seconds("30ms")
    0.03
    """
    return _quantity(text, _SECONDS, "a time", "30ms")


def bytes_per_second(text: str) -> float:
    """The bandwidth of a link.

    >>> bytes_per_second("1gbit")
    125000000.0
    """
    rate = _quantity(text, _BYTES_PER_SECOND, "a bandwidth", "1gbit")
    if not rate:
        raise UserError(f"'{text}' is a link that carries nothing: give a bandwidth above zero, as in 1gbit")
    return rate


def count(text: str) -> int:
    """How many, with k, M or G behind it.

    >>> count("25.6M")
    25600000
    """
    return round(_quantity(text, _COUNTS, "a count", "25.6M"))
