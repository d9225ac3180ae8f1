"""Parse the notations that settings share: a name with an argument (`backup:1`), times, bandwidths and counts."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
        raise UserError(f"{kind} '{text}': write {f'{name}:{letter}' if letter else name}")
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
