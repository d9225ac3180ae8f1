"""Describes a run in sentences: its outcome, the closing lines, and its events."""

from __future__ import annotations

from typing import Any

from paceline.analysis.scored_weights import AVERAGED
from paceline.analysis.statistics import FAILED
from paceline.data.catalog import DATASETS
from paceline.reports.console import closing_lines
from paceline.system.terminal import printable, seconds_text

MAX_TEXT = 400  # characters of an event: its row may come from anybody
FIRST_WORDS = {"stopped": "Stopped early", "killed": "Ended without a result"}


def outcome_sentence(status: str, figures: dict[str, Any], resume_hint: str | None) -> str:
    """Return the status and the quality of the run in one or two sentences."""
    reason = figures.get("reason")
    if status in FAILED and reason:
        return str(reason)[0].upper() + str(reason)[1:] + ("" if str(reason).endswith((".", "?")) else ".")
    first = FIRST_WORDS.get(status, status.capitalize()) + (f" ({reason})" if reason else "")
    good, much = _how_good(figures), _how_much(figures, status)
    got = f"{first}: {good} {much}" if good else f"{first} {much}"
    sentence = f"{got.strip()}, {_how_fast(figures)}."
    return f"{sentence} To continue: {resume_hint}." if resume_hint else sentence


def _how_good(figures: dict[str, Any]) -> str:
    when = " at the last evaluation," if figures.get("scored_early") else ""
    for which in ("test", "validation", "train"):
        accuracy, loss = figures.get(f"{which}_accuracy"), figures.get(f"{which}_loss")
        if accuracy is not None:
            return f"{accuracy:.2f} % {which} accuracy{_of_weights(figures, f'{which}_accuracy', '.2f', ' %')}{when}"
        if loss is not None:
            return f"{which} loss {loss:.4f}{_of_weights(figures, f'{which}_loss', '.4f')}{when}"
    reported = [f"{name} {value:.4g}" for name, value in (figures.get("metrics") or {}).items() if value is not None]
    return f"{', '.join(reported[:3])} (reported by the script)" if reported else ""


def _of_weights(figures: dict[str, Any], score: str, form: str, unit: str = "") -> str:
    """Return which weights the score belongs to, and that of the live weights if it is another."""
    if figures.get("weights") != AVERAGED:
        return " (live weights)"
    live = figures.get(f"live_{score}")
    return " (averaged weights" + (f"; live weights: {live:{form}}{unit})" if live is not None else ")")


def _how_much(figures: dict[str, Any], status: str) -> str:
    samples, fraction = figures.get("samples"), figures.get("fraction")
    share = f" ({100 * fraction:.0f} % of the budget)" if status != "finished" and fraction is not None else ""
    return f"after {samples:,} samples{share}" if samples else ""


def _how_fast(figures: dict[str, Any]) -> str:
    seconds, rate = figures.get("seconds"), figures.get("rate")
    workers = "1 worker" if figures.get("workers") == 1 else f"{_amount(figures, 'workers')} workers"
    virtual = " of virtual time" if figures.get("simulated") else ""
    text = f"in {seconds_text(seconds)}{virtual} on {workers}" if seconds else f"on {workers}"
    return text + (f" ({rate:,.0f} samples/s)" if rate else "")


def closing(result: dict[str, Any] | None, classes: tuple[str, ...] | None, folder: str) -> list[str]:
    """Return the closing lines of the run; empty if its result is incomplete."""
    try:
        return closing_lines(result, classes, folder) if result is not None else []
    except (KeyError, TypeError, ValueError):
        return []


def class_names(settings: dict[str, Any]) -> tuple[str, ...] | None:
    info = DATASETS.get(str(settings.get("dataset"))) if settings.get("task") is None else None
    return info.classes if info is not None else None


def event_sentence(row: dict[str, Any]) -> str | None:
    """Return an event as a sentence; None for events that charts show."""
    text = _worker_event(row) or _run_event(row)
    return printable(text[0].upper() + text[1:], MAX_TEXT) if text else None


def _worker_event(row: dict[str, Any]) -> str | None:
    worker, pushes = f"worker {row.get('worker')}", f"after {_amount(row, 'pushes')} pushes"
    match row["kind"]:
        case "worker_joined" if row["now"] > 0 or row.get("incarnation"):
            return f"{worker} joined"
        case "worker_lost":
            return f"{worker} was lost {pushes}; {row.get('live', '?')} live"
        case "worker_left":
            return f"{worker} left {pushes}"
        case "expelled":
            return f"{worker} was expelled: {row.get('why')}"
        case "suspicious" | "not_finite":
            return f"{worker}{' looks suspicious' if row['kind'] == 'suspicious' else ''}: {row.get('why')}"
        case "stalled":
            return f"{worker} has made no step for {_seconds(row, 'seconds')}; usually {_seconds(row, 'usual')}"
        case "worker_draining":
            return f"{worker} is being drained"
    return None


def _amount(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return f"{value:,}" if isinstance(value, int) else "?"


def _seconds(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return seconds_text(value) if isinstance(value, int | float) else "?"


def _run_event(row: dict[str, Any]) -> str | None:
    match row["kind"]:
        case "fault":
            target = f" of worker {row['worker']}" if row.get("worker") is not None else ""
            return f"injected fault: {row.get('fault')}{target}"
        case "run_resumed":
            return f"the run resumed at update {_amount(row, 'updates')}"
        case "recovered":
            again = f"{_amount(row, 'recomputed_pushes')} pushes were recomputed"
            return again + (f", {_amount(row, 'lost_pushes')} are lost" if row.get("lost_pushes") else "")
        case "deal":
            members = row.get("members")
            return f"the data was reassigned to {len(members) if isinstance(members, list) else '?'} workers"
        case "writing_failed":
            return f"{row.get('what')} could not be written: {row.get('error')}"
        case "turned_away":
            return f"rejected: {row.get('text')}"
        case "stopped":
            return f"stopped: {row.get('reason')}"
    return None
