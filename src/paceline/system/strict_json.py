"""Write JSON that every parser reads: a NaN or infinity, which JSON does not have, becomes null."""

from __future__ import annotations

import json
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
