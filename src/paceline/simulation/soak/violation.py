"""The exception for a violated invariant of a soak trial."""

from __future__ import annotations


class InvariantViolation(Exception):
    """A violated invariant: its name, and what was observed."""

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise, self.text = promise, text


def require(kept: bool, promise: str, text: str, *values: object) -> None:
    """Raise `InvariantViolation` unless `kept`; the text is formatted only then."""
    if not kept:
        raise InvariantViolation(promise, text.format(*values))
