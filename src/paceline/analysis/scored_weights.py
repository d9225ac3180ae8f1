"""Which weights a score belongs to, the live ones or their running average, so that like is compared with like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.config import RunConfig
from paceline.settings.rules import average_horizon

LIVE, AVERAGED = "live", "averaged"
KINDS = (LIVE, AVERAGED)
SHORT = {LIVE: "live", AVERAGED: "avg"}  # for the heading of a column
SCORES = tuple(f"{part}_{what}" for part in ("train", "validation", "test") for what in ("accuracy", "loss"))
"""The figures of a result that belong to the weights that are scored and saved."""
BY_WEIGHTS = tuple(f"{kind}_{score}" for score in SCORES for kind in KINDS)


def kind_of(result: Mapping[str, Any], config: RunConfig | None = None) -> str:
    """The weights that a run scores and saves: `averaged` or `live`.

    `weights` says it; without that key `average`, and without a result the settings.
    """
    found = result.get("weights")
    if found in KINDS:
        return str(found)
    average = result.get("average")
    if average is None:
        return AVERAGED if config is not None and average_horizon(config) is not None else LIVE
    return LIVE if average == "none" else AVERAGED


def by_weights(result: Mapping[str, Any]) -> dict[str, Any]:
    """Every score under the name of its weights, as `live_test_accuracy` and `averaged_test_accuracy`; None if unknown.

    >>> scores = by_weights({"weights": "averaged", "test_accuracy": 89.1, "live_test_accuracy": 86.3})
    >>> scores["averaged_test_accuracy"], scores["live_test_accuracy"], scores["live_test_loss"]
    (89.1, 86.3, None)
    >>> by_weights({"average": "none", "test_accuracy": 86.3})["live_test_accuracy"]
    86.3
    """
    scored = kind_of(result)
    return {
        f"{kind}_{score}": result.get(score if kind == scored else f"{kind}_{score}")
        for score in SCORES
        for kind in KINDS
    }


def comparable(results: Iterable[Mapping[str, Any]], score: str) -> str | None:
    """The key under which all results have this score for the same kind of weights; None if there is none.

    Ignores results without the score. If all score the same kind of weights, it is that one; else it is the live
    weights, which a run that averages scores too.
    """
    scored = [result for result in results if result.get(score) is not None]
    kinds = {kind_of(result) for result in scored}
    for kind in sorted(kinds) if len(kinds) == 1 else KINDS:
        if all(by_weights(result)[f"{kind}_{score}"] is not None for result in scored):
            return f"{kind}_{score}"
    return None
