"""Evaluate the finished runs of a batch on train, validation and test data, with running statistics of their own."""

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
from paceline.randomness import halves, mix64
from paceline.settings.preprocessing import train_score_of, ways_of
from paceline.simulation.lab.augmentation import hashes_of
from paceline.simulation.lab.batch import RunBatch
from paceline.simulation.lab.gradients import views
from paceline.simulation.lab.inputs import Images
from paceline.simulation.lab.models import BATCHED, NORM_NAMES
from paceline.simulation.lab.nets.layers import Pass
from paceline.tasks.augmentation import PURPOSE
from paceline.tasks.supervised import STATISTICS, evaluation_batch_size, statistics_batches

ALL_PARTS = ("train", "test", "validation")


Statistics = list[tuple[Tensor, Tensor]]
"""Running mean and variance of each norm in the order of a forward pass; empty for a model without batch norm."""


def estimated(config: RunConfig, layout: Layout, weights: Tensor, train: Images) -> Statistics:
    """Return the running statistics of `weights` [P], on the batches that `SupervisedTask.estimated` takes."""
    if config.model not in NORM_NAMES:
        return []
    rows = held_out(train.labels.cpu().numpy(), config)[0]
    fitting = max(evaluation_batch_size(train.images), config.batch_size)
    batches, number = statistics_batches(rows, fitting, config.seed)
    parameters, device, ways = views(layout, weights[None]), weights.device, ways_of(config)
    found: list[Statistics] = []
    with torch.no_grad():
        for place in range(number):
            chosen = torch.from_numpy(batches.indices(place)).to(device)[None]
            key = mix64(mix64(config.seed, STATISTICS, place), PURPOSE)
            low, high = (torch.tensor([[half]], dtype=torch.int32, device=device) for half in halves(key))
            images, _ = train.select(chosen, hashes_of(low, high, chosen.shape[1]) if ways else None, ways)
            how = Pass(None, torch.ones(1, 1, chosen.shape[1], dtype=torch.bool, device=device), measured=[])
            BATCHED[config.model](parameters, images, how)
            assert how.measured is not None
            found.append(how.measured)
    return [_mean_of(norm) for norm in map(list, zip(*found, strict=True))]


def _mean_of(norm: Statistics) -> tuple[Tensor, Tensor]:
    """Return the mean over batches of one norm's statistics [1, 1, C], summed in their order."""
    mean, variance = (sum(each[0, 0].double() for each in kind) / len(norm) for kind in zip(*norm, strict=True))
    return mean.float(), variance.float()


def buffers_of(model: str, statistics: Statistics) -> dict[str, Tensor]:
    """Return running statistics by their names in the model's state dict."""
    found: dict[str, Tensor] = {}
    for name, (mean, variance) in zip(NORM_NAMES.get(model, ()), statistics, strict=True):
        found |= {f"{name}.running_mean": mean.cpu(), f"{name}.running_var": variance.cpu()}
        found[f"{name}.num_batches_tracked"] = torch.tensor(0)
    return found


def scores_of(
    batch: RunBatch,
    statistics: dict[int, tuple[Statistics, Statistics]],
    train: Images,
    test: Images,
    parts: Sequence[str] = ALL_PARTS,
) -> dict[int, dict[str, Scores | None]]:
    """Return the scores of the finished runs by their index in the batch; folds are not scored on the test set.

    If the rule averages, the live weights are scored too, on the test and validation data. `statistics` are those of
    each run's evaluated and live weights.
    """
    found = _scores_of(batch, 0, statistics, train, test, parts)
    live_parts = [part for part in parts if part != "train"]
    if isinstance(batch.rule, Averaged) and live_parts:
        for number, scores in _scores_of(batch, 1, statistics, train, test, live_parts).items():
            found[number] |= {f"live_{part}": score for part, score in scores.items()}
    return found


def _scores_of(
    batch: RunBatch,
    which: int,
    statistics: dict[int, tuple[Statistics, Statistics]],
    train: Images,
    test: Images,
    parts: Sequence[str],
) -> dict[int, dict[str, Scores | None]]:
    weights = torch.stack([batch.final[number][which] for number in batch.ended])
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
            together = _stacked([statistics[number][which] for number in numbers])
            sums = score(config.model, batch.layout, weights[places], data, together)
            for place, number in enumerate(numbers):
                found[number][part] = _scores(sums, place, data.labels)
    return found


def _stacked(each: list[Statistics]) -> Statistics:
    """Return the statistics of several runs as [G, C]."""
    norms = zip(*each, strict=True)
    return [(torch.stack([one[0] for one in norm]), torch.stack([one[1] for one in norm])) for norm in norms]


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


def score(
    model: str, layout: Layout, weights: Tensor, data: Images, statistics: Statistics, chunk: int = 500
) -> tuple[Tensor, Tensor, Tensor]:
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
            found = logits(
                parameters, images.expand(num_rows, *images.shape).contiguous(), Pass(statistics=list(statistics))
            )
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
