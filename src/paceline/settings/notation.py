"""Parse the notations that settings share: a name with an argument (`backup:1`), times, bandwidths, counts, delays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from paceline.config import RunConfig, max_workers_of
from paceline.errors import UserError, unknown_name

_QUANTITY = re.compile(r"(\d+\.?\d*(?:e-?\d+)?|\.\d+)\s*([A-Za-z]*)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES_PER_SECOND = {f"{prefix}bit": 125.0 * 1000**power for power, prefix in enumerate("kmgt")}
_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def name_and_argument(kind: str, text: str, letters: Mapping[str, str]) -> tuple[str, str]:
    """Split `backup:1` into its name and its argument; `letters` gives the letter for the argument, "" for none.

    >>> name_and_argument("rule", "buffered:4", {"plain": "", "buffered": "K"})
    ('buffered', '4')
    """
    name, colon, argument = text.partition(":")
    if name not in letters:
        raise unknown_name(kind, name, letters)
    letter = letters[name]
    if bool(letter) != bool(colon):
        form = f"{name}:{letter}, with a number for {letter}" if letter else f"{name}, without a number"
        raise UserError(f"{kind} '{text}': write {form}")
    return name, argument


def whole_number(kind: str, text: str, argument: str, least: int) -> int:
    """Parse the argument of `text` as a whole number of at least `least`."""
    if not argument.isdecimal() or int(argument) < least:
        raise UserError(f"{kind} '{text}': the number after the colon must be a whole number of at least {least}")
    return int(argument)


def _quantity(text: str, units: Mapping[str, float], what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise UserError(f"'{text}' is not {what}: write a number and its unit, as in {example}")
    if match[2] not in units:
        known = ", ".join(unit or "no unit" for unit in units)
        raise UserError(f"'{text}' has the unknown unit '{match[2]}': {what} is given in {known}, as in {example}")
    return float(match[1]) * units[match[2]]


def seconds(text: str) -> float:
    """Parse a time.

    >>> seconds("30ms"), seconds("2min")
    (0.03, 120.0)
    """
    return _quantity(text, _SECONDS, "a time", "30ms")


def bytes_per_second(text: str) -> float:
    """Parse the bandwidth of a link.

    >>> bytes_per_second("1gbit")
    125000000.0
    """
    rate = _quantity(text, _BYTES_PER_SECOND, "a bandwidth", "1gbit")
    if not rate:
        raise UserError(f"'{text}' is a link that carries nothing: give a bandwidth above zero, as in 1gbit")
    return rate


def count(text: str) -> int:
    """Parse a count, with k, M or G behind it.

    >>> count("25.6M")
    25600000
    """
    return round(_quantity(text, _COUNTS, "a count", "25.6M"))


def parameters_of(config: RunConfig) -> int | None:
    """The number of `--parameters`; None if it was not given."""
    try:
        return count(config.parameters) if config.parameters is not None else None
    except UserError as error:
        raise UserError(f"--parameters {error}") from None


_DELAY_FORM = "write 30ms, normal:60ms,5ms or 0.5s, with @1,3 behind it for those workers only"


@dataclass(frozen=True)
class Delay:
    """Seconds that a worker waits before each push: constant, or normal and never below zero."""

    mean: float
    deviation: float = 0.0

    def seconds(self, seed: int, worker: int, seq: int) -> float:
        """The wait before push `seq` of a worker; the same whenever it is drawn."""
        if not self.deviation:
            return self.mean
        from paceline.randomness import rng  # it imports numpy, which a help text does without

        return max(0.0, self.mean + self.deviation * float(rng(seed, "delay", worker, seq).standard_normal()))


def delays_of(config: RunConfig, num_workers: int | None = None) -> Mapping[int, Delay]:
    """The delay of each delayed worker of a run, parsed once, for `num_workers` workers (default: the config's)."""
    return _parse_delays(tuple(config.delay or ()), num_workers or max_workers_of(config))


@cache
def _parse_delays(texts: tuple[str, ...], num_workers: int) -> Mapping[int, Delay]:
    """A delay for some workers wins over one for all, in either order; a worker has one of each at most.

    >>> _parse_delays(("30ms", "normal:60ms,5ms@1"), 2)
    {0: Delay(mean=0.03, deviation=0.0), 1: Delay(mean=0.06, deviation=0.005)}
    """
    delays: dict[int, Delay] = {}
    origin: dict[int, str] = {}  # by worker, the text that gave its delay
    for text in sorted(texts, key=lambda text: "@" in text):
        amount, at, names = text.partition("@")
        kind, colon, times = amount.partition(":")
        if not colon:
            delay = Delay(_delay_seconds(amount, text))
        elif kind == "normal" and times.count(",") == 1:
            mean, deviation = times.split(",")
            delay = Delay(_delay_seconds(mean, text), _delay_seconds(deviation, text))
        else:
            raise UserError(f"--delay '{text}': {_DELAY_FORM}")
        for name in names.split(",") if at else map(str, range(num_workers)):
            if not name.strip().isdecimal() or int(name) >= num_workers:
                raise UserError(f"--delay '{text}': no worker '{name}', there are 0 to {num_workers - 1}")
            before = origin.get(int(name))
            if before is not None and ("@" in before) == bool(at):
                both = f"worker {int(name)}" if at else "all workers"
                raise UserError(f"--delay '{before}' and --delay '{text}' are both for {both}: leave one out")
            delays[int(name)], origin[int(name)] = delay, text
    return delays


def _delay_seconds(text: str, whole: str) -> float:
    try:
        return seconds(text)
    except UserError:
        raise UserError(f"--delay '{whole}': '{text}' is not a time; {_DELAY_FORM}") from None
