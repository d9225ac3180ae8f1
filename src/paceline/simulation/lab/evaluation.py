"""Evaluate the finished runs of a batch on train, validation and test data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.assembly.work import held_out
from paceline.core.rules.averaged import Averaged
from paceline.interfaces import Layout, Scores
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
    configs = [batch.rows[number].config for number in batch.ended]

    def on(data: Images) -> tuple[Tensor, Tensor, Tensor]:
        return score(configs[0].model, batch.layout, weights, data)

    found: dict[int, dict[str, Scores | None]] = {number: {} for number in batch.ended}
    on_train = on(train) if "train" in parts else None
    on_test = on(test) if "test" in parts and any(config.fold is None for config in configs) else None
    labels = train.labels.cpu().numpy()
    on_part: dict[tuple[int, float, str | None], tuple[tuple[Tensor, Tensor, Tensor], Tensor]] = {}
    for place, (number, config) in enumerate(zip(batch.ended, configs, strict=True)):
        scores = found[number]
        if on_train is not None:
            scores["train"] = _scores(on_train, place, train.labels)
        if on_test is not None and config.fold is None:
            scores["test"] = _scores(on_test, place, test.labels)
        if "validation" in parts and (config.validation or config.fold is not None):
            address = (config.seed, config.validation, config.fold)
            if address not in on_part:
                part = torch.from_numpy(held_out(labels, config)[1]).to(train.labels.device)
                chosen = Images(train.images[part], train.labels[part], train.scale, train.shift)
                on_part[address] = on(chosen), chosen.labels
            held = scores["validation"] = _scores(on_part[address][0], place, on_part[address][1])
            if on_train is not None:
                scores["train"] = _without(_scores(on_train, place, train.labels), held)
    return found


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
    accuracies, counts = tuple(round(100.0 * float(value), 4) for value in per_class), torch.bincount(labels)
    scores = Scores(float(loss), round(float(right) * len(labels)), len(labels), accuracies)
    return replace(scores, constant_correct=int(counts.max()), constant_loss=_entropy(counts))


def _entropy(counts: Tensor) -> float:
    """Return the mean loss of predicting the class frequencies."""
    shares = counts.double() / counts.sum()
    return -float(torch.special.xlogy(shares, shares).sum())


def _without(whole: Scores, held: Scores) -> Scores:
    """Return the scores of the whole set without the held-out samples."""
    total = whole.total - held.total
    loss = (whole.loss * whole.total - held.loss * held.total) / total
    scores = Scores(loss, whole.correct - held.correct, total, (None,) * len(whole.per_class))
    correct = whole.constant_correct - held.constant_correct
    return replace(scores, constant_correct=correct, constant_loss=whole.constant_loss)  # classes are held out evenly
