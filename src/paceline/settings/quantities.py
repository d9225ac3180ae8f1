"""Quantities as people write them: times, rates and counts with their units."""

from __future__ import annotations

import re

from paceline.errors import UserError

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
