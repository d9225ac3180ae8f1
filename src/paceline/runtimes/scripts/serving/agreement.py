"""Whether the own loops of a run train the same model, with the same optimizers, on the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import UserError, mismatched_keys
from paceline.interfaces import Layout
from paceline.transports.protocol import Hello

Facts = Mapping[str, Any]
AGREED = {
    "layout": "the names or shapes of parameters",
    "state_layout": "the model's buffers",
    "num_samples": "the number of samples",
    "order": "the samples that their loaders draw",
    "numbers": "the parameter groups of their optimizers",
}
"""The facts in which all loops must agree with the first, and what they are about."""
MODEL = "build the same model in all workers, whatever session.worker is"


def expected_facts(first: Hello) -> dict[str, Any]:
    """The facts in which all scripts must agree with the first."""
    return {name: first.facts[name] for name in AGREED}


def require_same_loops(hellos: Sequence[Hello]) -> None:
    """Raise UserError if a worker's first message tells another model, other optimizers or data than the first one's.

    Of local steps it tells no optimizer.
    """
    first, *others = hellos
    theirs = f"worker {first.join.worker}"
    for other in others:
        mine = f"worker {other.join.worker}"
        for tell, remedy in (
            (_parameters, MODEL),
            (_buffers, MODEL),
            (_optimizers, "make the same optimizers in all workers"),
            (_samples, "give session.prepare(...) the same data in all workers"),
        ):
            if (found := tell(other.facts)) != (expected := tell(first.facts)):
                raise UserError(f"{mine} has {found}, {theirs} has {expected}: {remedy}")
        if wrong := mismatched_keys(expected_facts(first), other.facts):
            what = " and ".join(AGREED[name] for name in wrong)
            raise UserError(f"{mine} and {theirs} differ in {what}: all workers must run the same script")


def _parameters(facts: Facts) -> str:
    return f"{_num_values(facts['layout'])} parameters"


def _buffers(facts: Facts) -> str:
    return f"{_num_values(facts['state_layout'])} values in the model's buffers"


def _optimizers(facts: Facts) -> str:
    names = " and ".join(str(one["class"].get("name")) for one in facts["optimizers"])
    return f"optimizer {names}" if names else "no optimizer"


def _samples(facts: Facts) -> str:
    return f"{facts['num_samples']} samples" if facts["num_samples"] is not None else "data of unknown length"


def _num_values(rows: list[Any]) -> int:
    return Layout.from_rows(rows).num_parameters if rows else 0
