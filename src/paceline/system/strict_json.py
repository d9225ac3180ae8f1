"""Write and read JSON as every parser does: there is no NaN and no infinity. Written ones become null."""

from __future__ import annotations

import json
import math
from typing import Any

_ENCODER = json.JSONEncoder(allow_nan=False)  # `json.dumps` would build one for each call


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


def parse_json(text: bytes | bytearray) -> Any:
    """Parse strict JSON in UTF-8; raise ValueError for NaN, infinities, floats beyond 64 bits, and deep nesting.

    >>> parse_json(b'{"loss": 0.5}')
    {'loss': 0.5}
    >>> parse_json(b'{"loss": 1e400}')
    Traceback (most recent call last):
    ValueError: 1e400 is not a finite number
    """
    try:
        return _DECODER.decode(text.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite_float(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word[:20]} is not a finite number")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite_float, parse_constant=_finite_float)
