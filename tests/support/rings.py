"""Which cases of a test belong to the quick ring."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases, each marked `long` unless it is one of the quick ones, which `make check` runs too."""
    listed = list(cases)
    assert all(case in listed for case in quick), f"{quick} are not all among {listed}"
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in listed
    ]
