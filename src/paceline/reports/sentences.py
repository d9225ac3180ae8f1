"""Describes a run in sentences: its outcome, the closing lines, and its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.analysis.naming import own_source
from paceline.analysis.reported import read_reported
from paceline.analysis.scored_weights import AVERAGED, LIVE, kind_of
from paceline.analysis.statistics import FAILED
from paceline.data.catalog import DATASETS
from paceline.system.terminal import counted, loss_text, printable, seconds_text

MAX_TEXT = 400  # characters of an event: its row may come from anybody
NOTABLE_PERCENT = 5.0  # by which the least busy worker is below the mean, to be named
MAX_NAMED = 8  # lost workers
MAX_CLASSES = 20  # classes listed one by one; the result has all
PART_NAMES = {"computing": "computing", "server": "at the server", "waiting": "waiting", "sending": "sending"}
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
    return f"after {samples:,} {figures.get('unit') or 'samples'}{share}" if samples else ""


def _how_fast(figures: dict[str, Any]) -> str:
    seconds, rate = figures.get("seconds"), figures.get("rate")
    workers = "1 worker" if figures.get("workers") == 1 else f"{_amount(figures, 'workers')} workers"
    virtual = " of virtual time" if figures.get("simulated") else ""
    text = f"in {seconds_text(seconds)}{virtual} on {workers}" if seconds else f"on {workers}"
    return text + (f" ({rate:,.0f} {figures.get('unit') or 'samples'}/s)" if rate else "")


def class_names(settings: dict[str, Any]) -> tuple[str, ...] | None:
    info = DATASETS.get(str(settings.get("dataset"))) if settings.get("task") is None else None
    return info.classes if info is not None else None


def closing_lines(
    result: dict[str, Any],
    classes: tuple[str, ...] | None,
    folder: str,
    shares: Sequence[Mapping[str, float]] = (),
) -> list[str]:
    """Return the final lines: what was trained, its scores as the published tables name them, then the other figures.

    `shares` are those of each worker's time, as `status` has them. The published tables write a training time as
    02:55:634; `reproduce` reads theirs, and here it is 2 min 56 s.
    """
    lines = [_headline(result), *_lost(result), *_scores(result), *_scored_weights(result)]
    if result["per_class_accuracy"]:
        lines.append(_per_class(result["per_class_accuracy"], classes))
    lines.append(_pace(result))
    if result["workers"] != 1:
        stale = result["staleness"]
        without = " (of the pushes that count)" if result["dropped_pushes"] else ""
        lines.append(f"staleness in updates: mean {stale['mean']:.1f}, max {stale['max']}{without}")
    if result["dropped_pushes"]:
        lines.append(f"dropped: {counted(result['dropped_pushes'], 'push')}")
    if any(shares):
        lines.append(_shares(shares))
    lines += _reported(result)
    if result.get("chosen_on"):
        lines.append(_choice(result))
    lines.append(f"run folder: {folder}")
    return lines


def _headline(result: dict[str, Any]) -> str:
    """Return how the run ended, and what trained on what. The reason of a failure is a sentence of its own."""
    reason = f" ({result['reason']})" if result["reason"] and result["status"] not in FAILED else ""
    own = own_source(result)
    what = printable(own) if own is not None else f"{result.get('model')} on {result.get('dataset')}"
    if result.get("timing_only"):
        what = f"times only, {result['num_parameters']:,} parameters"
    workers = "1 worker" if result["workers"] == 1 else f"{result['workers']} workers"
    return f"{result['status']}{reason}: {what}, {result['strategy']}, {workers}"


def _lost(result: dict[str, Any]) -> list[str]:
    """Return which workers were lost and did not come back.

    >>> _lost({"workers": 3, "lost_workers": [2, 1, 2], "returned_workers": [1]})
    ['1 of 3 workers was lost: worker 2']
    """
    lost = sorted(set(result.get("lost_workers") or ()) - set(result.get("returned_workers") or ()))
    if not lost:
        return []
    which = f"worker{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost[:MAX_NAMED]))}"
    more = f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
    return [f"{len(lost)} of {result['workers']} workers {'was' if len(lost) == 1 else 'were'} lost: {which}{more}"]


def _scores(result: dict[str, Any]) -> list[str]:
    """Return one line for each part of the data, test first, with the values below each other."""
    found = []
    for which in ("test", "validation", "train"):
        accuracy, loss, total = (result[f"{which}_{name}"] for name in ("accuracy", "loss", "total"))
        values = [f"{accuracy:.2f} % ({result[f'{which}_correct']}/{total})"] if accuracy is not None else []
        if loss is not None or total is not None:
            text = loss_text(loss) if loss is not None else _measured(None)
            values.append(f"loss {text}" if values else text)
        values += [f"{name} {_measured(value)}" for name, value in (result.get(f"{which}_metrics") or {}).items()]
        if values and which == "train" and total is not None and total < (whole := result.get("epoch_samples") or 0):
            values.append(f"on {total:,} of {whole:,} samples")
        if values:
            found.append((f"Average {which} {'accuracy' if accuracy is not None else 'loss'}:", ", ".join(values)))
    width = max((len(label) for label, _ in found), default=0)
    return [f"{label:<{width}} {values}" for label, values in found]


def _pace(result: dict[str, Any]) -> str:
    """Return the training time, virtual if the run was simulated, and the work done in it."""
    took = seconds_text(result["train_seconds"])
    if result.get("simulated"):
        took += f" of virtual time, simulated in {seconds_text(result['wall_seconds'])}"
    unit = result.get("unit") or "samples"
    rate = f"{result['samples_per_second']:,.0f} {unit}/s"
    return f"training time: {took}; {result['updates']:,} updates, {result['samples']:,} {unit}, {rate}"


def _scored_weights(result: dict[str, Any]) -> list[str]:
    """Return which weights the scores belong to, and the live weights' scores if they are others and known."""
    part = next((part for part in ("test", "validation", "train") if result.get(f"{part}_loss") is not None), None)
    if part is None:
        return []
    if kind_of(result) == LIVE:
        return ["scored and saved: the live weights"]
    accuracy, loss = result.get(f"live_{part}_accuracy"), result.get(f"live_{part}_loss")
    live = [f"{part} accuracy {accuracy:.2f} %"] if accuracy is not None else []
    live += [f"{part} loss {loss_text(loss)}"] if loss is not None else []
    return ["scored and saved: the averaged weights" + (f" (live weights: {', '.join(live)})" if live else "")]


def _reported(result: dict[str, Any]) -> list[str]:
    """Return the metrics of an own loop: the value that holds, whose it is, and how far those of other workers lie."""
    by_worker: dict[int, list[str]] = {}
    for name, one in read_reported(result).items():
        values = [row[name] for row in result["reported"].values() if name in row]
        finite = [value for value in values if value is not None]
        spread = ""
        text = _measured(one.value)
        if len({_measured(value) for value in values}) > 1 and finite:
            least, most, *held = _alike([min(finite), max(finite), *([one.value] if one.value is not None else [])])
            spread, text = f" ({len(values)} workers: {least} to {most})", held[0] if held else text
        by_worker.setdefault(one.worker, []).append(f"{name} {text}{spread}")
    return [f"reported by worker {worker}: {', '.join(texts)}" for worker, texts in sorted(by_worker.items())]


def _choice(result: dict[str, Any]) -> str:
    """Return what was chosen by which data: scores on the same data are too good for what was chosen by them."""
    best, on_test = result.get("best"), result["chosen_on"] == "test"
    data = "the test set" if on_test else "the validation data"
    hint = ": --validation 0.1 holds out data to choose by" if on_test else ""
    if best:
        optimistic = ", so their score there is too good" if on_test else ""
        what = f"checkpoints/best.safetensors: the best weights (update {best['updates']:,})"
        return f"{what}, chosen on {data}{optimistic}{hint}"
    optimistic = ", whose scores are therefore too good" if on_test else ""
    return f"the end of the run chosen on {data}{optimistic}{hint}"


def _measured(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _alike(values: Sequence[float]) -> list[str]:
    """Return the values to four digits, with as many decimals for all as one of them needs.

    >>> _alike([91.0, 91.33]), _alike([1e-7, 3.0])
    (['91.00', '91.33'], ['1e-07', '3'])
    """
    texts = [_measured(value) for value in values]
    if any("e" in text for text in texts):
        return texts
    decimals = max(len(text.partition(".")[2]) for text in texts)
    return [f"{float(text):.{decimals}f}" for text in texts]


def _shares(shares: Sequence[Mapping[str, float]]) -> str:
    """Return how the workers spent their time, and the least busy one if it is far below the others.

    >>> _shares([{"computing": 0.9, "waiting": 0.1}, {"computing": 0.5, "waiting": 0.2, "server": 0.3}])
    'workers: 70 % computing, 15 % at the server, 15 % waiting; the least busy, worker 1: 50 % computing'
    """
    known = {worker: parts for worker, parts in enumerate(shares) if parts}
    means = {part: 100 * sum(parts.get(part, 0.0) for parts in known.values()) / len(known) for part in PART_NAMES}
    least = min(known, key=lambda worker: known[worker].get("computing", 0.0))
    lowest = 100 * known[least].get("computing", 0.0)
    text = "workers: " + ", ".join(f"{mean:.0f} % {PART_NAMES[part]}" for part, mean in means.items() if mean >= 0.5)
    far = means["computing"] - lowest >= NOTABLE_PERCENT
    return text + (f"; the least busy, worker {least}: {lowest:.0f} % computing" if far else "")


def _per_class(accuracies: list[float | None], classes: tuple[str, ...] | None) -> str:
    names = classes or tuple(str(number) for number in range(len(accuracies)))
    scored = [(name, value) for name, value in zip(names, accuracies, strict=False) if value is not None]
    lowest = sorted(scored, key=lambda one: one[1])
    shown = lowest if len(lowest) <= MAX_CLASSES else lowest[:5]
    more = f" of {len(scored)}" if len(shown) < len(scored) else ""
    return f"Test accuracy by class, worst{more} first: " + ", ".join(f"{name} {value:.1f}" for name, value in shown)


def closing(
    result: dict[str, Any] | None,
    classes: tuple[str, ...] | None,
    folder: str,
    shares: Sequence[Mapping[str, float]],
) -> list[str]:
    """Return the closing lines of the run; empty if its result is incomplete."""
    try:
        return closing_lines(result, classes, folder, shares) if result is not None else []
    except (KeyError, TypeError, ValueError):
        return []


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
