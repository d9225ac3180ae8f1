"""Evaluate the finished runs of a batch on train, validation and test data."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.assembly.work import held_out, scored_train
from paceline.config import RunConfig
from paceline.core.rules.averaged import Averaged
from paceline.interfaces import Layout, Scores
from paceline.settings.preprocessing import train_score_of
from paceline.simulation.lab.batch import RunBatch
from paceline.simulation.lab.gradients import views
from paceline.simulation.lab.inputs import Images
from paceline.simulation.lab.models import BATCHED

ALL_PARTS = ("train", "test", "validation")


def scores_of(
    batch: RunBatch, train: Images, test: Images, parts: Sequence[str] = ALL_PARTS
) -> dict[int, dict[str, Scores | None]]:
    """Return the scores of the finished runs by their index in the batch; folds are not scored on the test set.

    If the rule averages, the live weights are scored too, on the test and validation data.
    """
    found = _scores_of(batch, 0, train, test, parts)
    live_parts = [part for part in parts if part != "train"]
    if isinstance(batch.rule, Averaged) and live_parts:
        for number, scores in _scores_of(batch, 1, train, test, live_parts).items():
            found[number] |= {f"live_{part}": score for part, score in scores.items()}
    return found


def _scores_of(
    batch: RunBatch, place_of_weights: int, train: Images, test: Images, parts: Sequence[str]
) -> dict[int, dict[str, Scores | None]]:
    weights = torch.stack([batch.final[number][place_of_weights] for number in batch.ended])
    labels = train.labels.cpu().numpy()
    found: dict[int, dict[str, Scores | None]] = {number: {} for number in batch.ended}
    for part in parts:
        groups: dict[Hashable, list[int]] = {}
        for place, number in enumerate(batch.ended):
            if (address := _address(part, batch.rows[number].config)) is not None:
                groups.setdefault(address, []).append(place)
        for places in groups.values():
            numbers = [batch.ended[place] for place in places]
            config = batch.rows[numbers[0]].config
            data = test if part == "test" else _rows_of(train, _chosen(part, labels, config))
            sums = score(config.model, batch.layout, weights[places], data)
            for place, number in enumerate(numbers):
                found[number][part] = _scores(sums, place, data.labels)
    return found


def _address(part: str, config: RunConfig) -> Hashable:
    """Return what decides which samples of a part are scored; None if a run does not score it."""
    held = (config.seed, config.validation, config.fold) if config.validation or config.fold is not None else ()
    match part:
        case "test":
            return () if config.fold is None else None
        case "validation":
            return held or None
        case _:
            number = train_score_of(config)
            return None if number == 0 else (held, number, config.seed if number is not None else None)


def _chosen(part: str, labels: NDArray[np.int64], config: RunConfig) -> NDArray[np.int64]:
    train, validation = held_out(labels, config)
    return validation if part == "validation" else scored_train(train, config)


def _rows_of(data: Images, rows: NDArray[np.int64]) -> Images:
    if len(rows) == len(data.labels):
        return data
    chosen = torch.from_numpy(rows).to(data.labels.device)
    return Images(data.images[chosen], data.labels[chosen], data.scale, data.shift)


def score(model: str, layout: Layout, weights: Tensor, data: Images, chunk: int = 500) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean loss, accuracy and accuracy per class of every row of `weights` [G, P] on `data`."""
    total, num_rows, device = len(data.labels), len(weights), data.labels.device
    num_classes = int(data.labels.max()) + 1
    loss = torch.zeros(num_rows, device=device)
    right = torch.zeros(num_rows, num_classes, device=device)
    seen = torch.bincount(data.labels, minlength=num_classes)
    logits, parameters = BATCHED[model], views(layout, weights)
    with torch.no_grad():
        for start in range(0, total, chunk):
            rows = torch.arange(start, min(start + chunk, total), device=device, dtype=torch.int32)
            images, labels = data.select(rows)
            found = logits(parameters, images.expand(num_rows, *images.shape).contiguous(), None)
            every = labels.expand(num_rows, -1)
            loss -= found.gather(-1, every[..., None]).sum((1, 2))
            right.scatter_add_(1, every, (found.argmax(-1) == every).float())
    return loss / total, right.sum(1) / total, right / seen


def _scores(sums: tuple[Tensor, Tensor, Tensor], number: int, labels: Tensor) -> Scores:
    loss, right, per_class = (tensor[number] for tensor in sums)
    counts = torch.bincount(labels)
    pairs = zip(per_class.tolist(), counts.tolist(), strict=True)
    accuracies = tuple(round(100.0 * value, 4) if count else None for value, count in pairs)
    scores = Scores(float(loss), round(float(right) * len(labels)), len(labels), accuracies)
    return replace(scores, constant_correct=int(counts.max()), constant_loss=_entropy(counts))


def _entropy(counts: Tensor) -> float:
    """Return the mean loss of predicting the class frequencies."""
    shares = counts.double() / counts.sum()
    return -float(torch.special.xlogy(shares, shares).sum())
