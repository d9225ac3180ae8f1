"""Which settings tell runs apart: for the tables of `compare` and the pages of several runs alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.analysis.naming import Facts, model_name, named_settings, own_source
from paceline.analysis.scored_weights import kind_of
from paceline.config import FIELDS, RunConfig
from paceline.settings.rules import AUTOMATIC, average_in_words

IGNORED_SETTINGS = (
    *("data_dir", "track", "keep", "checkpoint_every", "restart", "restart_workers", "recovery", "durable"),
    *("like", "mirror", "task", "name", "keep_going", "runs"),
)
"""Settings that do not affect how runs compare. A task names the data."""


def compared_settings(config: RunConfig, result: Facts | None, recorded: Facts | None = None) -> dict[str, Any]:
    """The settings by which a run is compared with others, as they were applied.

    `recorded` has the names of an own model and data. An automatic rule has the rule that it chose, without the
    averaging, which is a setting of its own.

    >>> result = {"rule_applied": "foresight (averaged)", "weights": "averaged"}
    >>> found = compared_settings(RunConfig(rule="auto", threads=2), result)
    >>> found["rule"], found["threads"], found["scored_weights"]
    ('auto: foresight', 2, 'averaged')
    """
    found = {name: value for name, value in named_settings(config, recorded or {}).items() if name in FIELDS}
    facts = {**found, "task": config.task}
    found |= {"model": model_name(facts), "dataset": own_source(facts) or facts["dataset"]}
    found["average"] = average_in_words(config)  # auto means another thing for each strategy
    applied = str((result or {}).get("rule_applied") or "").replace(" (averaged)", "")
    if config.rule in AUTOMATIC and applied:
        found["rule"] = f"{config.rule}: {applied}"
    kept = {name: value for name, value in found.items() if name not in IGNORED_SETTINGS}
    return {**kept, "scored_weights": kind_of(result or {}, config)}


def differing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the settings that are not the same for all of these.

    >>> differing([{"lr": 0.1, "threads": 1}, {"lr": 0.1, "threads": 2}])
    ['threads']
    """
    return [name for name in runs[0] if len({setting_text(run[name]) for run in runs}) > 1] if runs else []


def setting_text(value: Any) -> str:
    """A setting as the cell of a table.

    >>> setting_text(None), setting_text(0.10), setting_text([1.0, 2.5]), setting_text(True)
    ('-', '0.1', '1, 2.5', 'true')
    """
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(setting_text, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.10g}" if isinstance(value, float) else str(value)
