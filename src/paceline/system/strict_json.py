"""Write JSON that every parser reads, and read JSON that a bad disk or a stranger may have changed."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from paceline.system.terminal import printable

_ENCODER = json.JSONEncoder(allow_nan=False)  # `json.dumps` would build one for each call
LARGEST, LARGEST_COUNT = sys.float_info.max, 1 << 53
MAX_LETTERS = 10_000
SEAL = "sha256_of_the_rest"
_NUMBERS = {int, float}
TypeCheck = Callable[[Any], bool]


def to_json(value: Any, indent: int | None = None, compact: bool = False) -> str:
    """Return the value as JSON text: on one line unless `indent` is given, without spaces if `compact`.

    >>> to_json({"loss": [0.5, float("nan")], "lr": float("inf")})
    '{"loss": [0.5, null], "lr": null}'
    """
    encoder = _ENCODER
    if indent is not None or compact:
        encoder = json.JSONEncoder(allow_nan=False, indent=indent, separators=(",", ":") if compact else None)
    try:
        return encoder.encode(value)
    except ValueError:
        return encoder.encode(json.loads(json.dumps(value), parse_constant=lambda _: None))


def from_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON; raise ValueError for all that is none, also for NaN, numbers beyond a float's range and deep nesting.

    >>> from_json('{"loss": [0.5, null]}')
    {'loss': [0.5, None]}
    >>> from_json("[1e999]")
    Traceback (most recent call last):
    ValueError: it holds the number inf
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode(), parse_constant=_refuse)
        _require_sane(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"it holds the number {name}")


def _require_sane(value: Any) -> None:
    """Check every number; lists of numbers, the bulk of large rows, as a whole."""
    if isinstance(value, dict):
        for one in value.values():
            _require_sane(one)
    elif isinstance(value, list):
        kinds = set(map(type, value))
        if kinds and kinds <= _NUMBERS:
            value = [min(value), max(value)]
        for one in value if kinds != {str} else ():
            _require_sane(one)
    elif isinstance(value, int | float) and not -LARGEST <= value <= LARGEST:
        _refuse(str(value) if isinstance(value, float) else "with hundreds of digits")


def escape_texts(value: Any) -> Any:
    """Return parsed JSON whose texts, and names of fields, have no characters that a terminal would obey."""
    if isinstance(value, str):
        return value if value.isprintable() else printable(value, MAX_LETTERS)
    if isinstance(value, list):
        return [escape_texts(one) for one in value]
    if isinstance(value, dict):
        return {escape_texts(name): escape_texts(one) for name, one in value.items()}
    return value


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """Return the object with one more key, a SHA-256 of all others, for `unseal`."""
    return {**value, SEAL: sha256_of(value)}


def unseal(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object and check its seal, if it has one; raise ValueError if it has changed since.

    >>> unseal(to_json(seal({"updates": 7})))
    {'updates': 7}
    >>> unseal(to_json(seal({"updates": 7})).replace("7", "5"))
    Traceback (most recent call last):
    ValueError: its checksum is wrong
    """
    if not text:
        raise ValueError("it is empty")
    value = from_json(text)
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    found = value.pop(SEAL, None)  # older versions wrote none
    if found is not None and found != sha256_of(value):
        raise ValueError("its checksum is wrong")
    return value


def sha256_of(value: dict[str, Any]) -> str:
    """Return the SHA-256 of an object as `to_json` writes it."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()


def require_types(value: dict[str, Any], types: Mapping[str, TypeCheck]) -> None:
    """Raise ValueError unless each key that is there and not null passes its check.

    >>> require_types({"updates": 7, "loss": None, "other": "x"}, {"updates": is_count, "loss": is_number})
    >>> require_types({"updates": "7"}, {"updates": is_count})
    Traceback (most recent call last):
    ValueError: 'updates' is of another type
    """
    for name, found in value.items():
        if found is not None and name in types and not types[name](found):
            raise ValueError(f"'{name}' is of another type")


def is_number(value: Any) -> bool:
    """Return whether the value is a number; true and false are none."""
    return type(value) in (int, float)


def is_count(value: Any) -> bool:
    """Return whether the value is a whole number from 0 on, small enough for any format."""
    return type(value) is int and 0 <= value < LARGEST_COUNT


def is_text(value: Any) -> bool:
    """Return whether the value is text."""
    return isinstance(value, str)


def are_numbers(value: Any) -> bool:
    """Return whether the value is a list of numbers: as `list_of(is_number)`, but fast, for long lists."""
    return isinstance(value, list) and set(map(type, value)) <= _NUMBERS


def are_numbers_or_null(value: Any) -> bool:
    """Return whether the value is a list of numbers and nulls."""
    return isinstance(value, list) and set(map(type, value)) <= _NUMBERS | {type(None)}


def optional(has_type: TypeCheck) -> TypeCheck:
    """Return a check that null passes too."""
    return lambda value: value is None or has_type(value)


def list_of(has_type: TypeCheck) -> TypeCheck:
    """Return a check for lists whose values all pass `has_type`."""
    return lambda value: isinstance(value, list) and all(map(has_type, value))


def dict_of(has_type: TypeCheck) -> TypeCheck:
    """Return a check for objects whose values all pass `has_type`."""
    return lambda value: isinstance(value, dict) and all(map(has_type, value.values()))
