"""How good the rows of a family are that have ended: on what they trained on, what they held out, and the test set."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.division import held_out
from paceline.interfaces import Scores
from paceline.lab.family import Family
from paceline.lab.steps import Images


def scores_of(family: Family, ended: list[int], train: Images, test: Images) -> dict[int, dict[str, Scores | None]]:
    """By place in the family; only rows that are no folds are shown the test set."""
    found: dict[int, dict[str, Scores | None]] = {}
    on_train = family.scores(train)
    on_test = family.scores(test) if any(family.rows[number].config.fold is None for number in ended) else None
    labels = train.labels.cpu().numpy()
    on_part: dict[tuple[int, float, str | None], tuple[tuple[Tensor, Tensor, Tensor], int]] = {}
    for number in ended:
        config = family.rows[number].config
        whole = _scores(on_train, number, len(labels))
        found[number] = {"train": whole}
        if on_test is not None and config.fold is None:
            found[number]["test"] = _scores(on_test, number, len(test.labels))
        if config.validation or config.fold is not None:
            address = (config.seed, config.validation, config.fold)
            if address not in on_part:
                part = held_out(labels, config)[1]
                on_part[address] = family.scores(_part(train, part)), len(part)
            held = _scores(on_part[address][0], number, on_part[address][1])
            found[number] |= {"train": _without(whole, held), "validation": held}
    return found


def _scores(sums: tuple[Tensor, Tensor, Tensor], number: int, total: int) -> Scores:
    loss, right, per_class = (tensor[number] for tensor in sums)
    accuracies = tuple(round(100.0 * float(value), 4) for value in per_class)
    return Scores(float(loss), round(float(right) * total), total, accuracies)


def _part(data: Images, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Images:
    chosen = torch.from_numpy(rows).to(data.labels.device)
    return Images(data.images[chosen], data.labels[chosen], data.scale, data.shift)


def _without(whole: Scores, held: Scores) -> Scores:
    """The figures of what was trained on: all but what was held out."""
    total = whole.total - held.total
    loss = (whole.loss * whole.total - held.loss * held.total) / total
    return Scores(loss, whole.correct - held.correct, total, (None,) * len(whole.per_class))
