"""How a promise that was not kept is told."""

from __future__ import annotations


class Broken(Exception):
    """A promise that was not kept: its name, and what was seen."""

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise, self.text = promise, text


def require(kept: bool, promise: str, text: str, *values: object) -> None:
    """Raise Broken unless `kept`; the text is put together only then."""
    if not kept:
        raise Broken(promise, text.format(*values))
