"""Supervised task: a model, a loss and labelled arrays in memory (the public `paceline.Task`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.data.sampler import Batches
from paceline.errors import UserError
from paceline.interfaces import Batch, Loader, Scores, State
from paceline.randomness import mix64
from paceline.tasks.flat import FlatModule
from paceline.tasks.given_weights import InitialWeights
from paceline.tasks.metrics import ConstantPrediction, Metric, MetricPass, Weight, require_metrics, weigh
from paceline.tasks.nested import Structure, device_of, each, num_samples, rows_of, tensors_of
from paceline.tasks.norm_statistics import MAX_BATCH, MAX_SAMPLES, StatisticsEstimator
from paceline.tasks.own.samples import read_samples, require_alike
from paceline.tasks.own.trial import require_loss, require_metric_values, require_parts, trial_rows
from paceline.tasks.step import StepSettings, TrainingStep

if TYPE_CHECKING:
    from collections.abc import Iterator

Pair = tuple[Structure, Structure]
"""Inputs and targets; each is a tensor, or a tuple or dict of tensors."""
STATISTICS = 1 << 20
"""In place of a worker's number: the order of the batches that statistics are estimated on."""
MAX_EVALUATION_BATCH = 500
MAX_EVALUATION_NBYTES = 16 << 20
"""Size of one evaluation batch's inputs, as floats: 27 images of 224x224."""


class Normalise:
    """Converts a batch of uint8 images to floats of zero mean and unit standard deviation."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        scale = torch.tensor([1.0 / (255.0 * s) for s in std])
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])
        self._scale, self._shift = scale.view(-1, 1, 1), shift.view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:  # uint8 [B, C, H, W] -> float32
        if self._scale.device != images.device:
            self._scale, self._shift = self._scale.to(images.device), self._shift.to(images.device)
        return torch.addcmul(self._shift, images.to(torch.float32), self._scale)


class ArrayLoader:
    """Loads batches of one worker's shard with one gather and one transform per batch."""

    def __init__(
        self,
        data: Pair,
        batches: Batches,
        seed: int,
        worker: int,
        transform: Callable[[Any], Any] | None,
        augment: Callable[[Any, int], Any] | None = None,
        weight: Weight | None = None,
    ) -> None:
        self._inputs, self._targets = data
        self._weight = weight
        self._device, self._batches = device_of(self._inputs), batches
        self._seed, self._worker = seed, worker
        self._transform, self._augment = transform, augment

    def batch(self, number: int) -> Batch:
        return self.batch_of(self._batches.indices(number), number)

    def trial(self) -> Batch:
        """Return a batch for a trial: the first one, with the extreme class numbers of all data in it."""
        return self.batch_of(trial_rows(self._targets, self._batches.indices(0)), 0)

    def batch_of(self, rows: NDArray[np.int64], number: int) -> Batch:
        """Return these rows as batch `number`."""
        indices = torch.from_numpy(rows).to(self._device)
        inputs = each(lambda tensor: tensor.index_select(0, indices), self._inputs)
        generation = (self._batches.generation,) if self._batches.generation else ()
        key = mix64(self._seed, self._worker, number, *generation)
        if self._augment is not None:
            inputs = self._augment(inputs, key)
        if self._transform is not None:
            inputs = self._transform(inputs)
        targets = each(lambda tensor: tensor.index_select(0, indices), self._targets)
        weight = weigh(self._weight, targets, len(indices)) if self._weight is not None else None
        return Batch(inputs, targets, len(indices), key, weight)


class SupervisedTask:
    """Any `torch.nn.Module` with a mean loss `loss(outputs, targets)` over samples in memory.

    `train` and `test` are pairs `(inputs, targets)` of tensors or arrays, or of tuples or dicts of them; or a map-style
    `Dataset` of such samples, which is read once; or a `DataLoader`, whose `dataset` and `collate_fn` are used. The
    model gets a tuple of inputs as arguments and a dict as keyword arguments. `metrics` maps names to functions of
    (outputs, targets), which are averaged over samples, or to objects with `reset`, `update` and `compute` (such as
    those of torchmetrics).

    `transform` is applied to whole batches of inputs (normalising, casting). `augment(inputs, key)` runs before it, on
    training batches only; its random choices must be a function of the batch's key. `decay(name, parameter)` chooses
    the parameters with weight decay (default: all). Accuracy is computed if targets are class numbers.

    If the mean loss counts something else than samples (tokens without padding, say), `weight(targets)` says how many
    of them a batch has: means over batches, of gradients and of losses, are weighted by it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        train: Pair | Dataset[Any] | DataLoader[Any],
        test: Pair | Dataset[Any] | DataLoader[Any] | None = None,
        *,
        metrics: Mapping[str, Metric] | None = None,
        transform: Callable[[Any], Any] | None = None,
        augment: Callable[[Any, int], Any] | None = None,
        decay: Callable[[str, nn.Parameter], bool] | None = None,
        classes: Sequence[str] | None = None,
        weight: Weight | None = None,
    ) -> None:
        require_parts(model, loss)
        self.given = read_samples("train", train)
        """The train data as it was given: a loader's batch size and order are not the run's."""
        self.train: Pair = self.given.pair
        self.test: Pair | None = read_samples("test", test).pair if test is not None else None
        if self.test is not None:
            require_alike(self.train, self.test)
        require_metrics(metrics)
        self.metrics = dict(metrics or {})
        self.flat = FlatModule(model, decay)
        self.model = self.flat.module
        self.forward: nn.Module = self.model
        """The module called in training: the model, or a wrapper such as DDP."""
        self.loss_weight = 1.0
        """Factor on the loss in the gradient."""
        self.loss, self.weight = loss, weight
        self.transform, self.augment = transform, augment
        self.classes = tuple(classes) if classes is not None else None
        self.layout, self.state_size = self.flat.layout, self.flat.state_size
        self.local_state: State = {}
        self.initial_weights: InitialWeights | None = None
        """Which file the weights came from, if they were given."""
        self.initial, self.bind = self.flat.initial, self.flat.bind
        self.mixture, self.state_dict = self.flat.mixture, self.flat.state_dict
        self._statistics = StatisticsEstimator(self.flat, lambda *call: self._step.outputs(*call))
        self._trained_on: tuple[NDArray[np.int64] | None, int, int] = None, 0, 1
        self.configure_step(StepSettings())

    def configure_step(self, settings: StepSettings) -> None:
        """Set precision, compilation and the other options of all later steps and evaluations."""
        if self.weight is not None and settings.capture and settings.accumulate > 1:
            raise UserError("--capture --accumulate: the task's weight of each part would be captured: leave one out")
        self._step = TrainingStep(self.flat, self.loss, settings, self.weight)

    def warm_up(self, loader: Loader) -> None:
        """Compile or capture the step before training starts, and restore the buffers; call it after `bind`."""
        if not self._step.starts_slowly or self.forward is not self.model:
            return
        saved = [buffer.clone() for buffer in self.model.buffers()]
        self.gradient(loader.batch(0))
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), saved, strict=True):
                buffer.copy_(value)

    def require_step(self, batches: Batches, seed: int) -> None:
        """Raise UserError if loss or metrics of one train or test batch cannot be computed. Nothing changes."""

        def outputs(inputs: Structure, model: nn.Module) -> Any:
            return self._step.outputs(inputs, {}, model)

        batch = self.loader(batches, seed, 0).trial()
        part, tried = "train", (batch.inputs, batch.targets)
        require_loss(part, self.model, outputs, self.loss, tried)
        if self.test is not None:
            count = min(batch.samples, evaluation_batch_size(self.test[0]), num_samples(self.test[0]))
            rows = torch.from_numpy(trial_rows(self.test[1], np.arange(count))).to(device_of(self.test))
            inputs, targets = rows_of(self.test[0], rows), rows_of(self.test[1], rows)
            inputs = self.transform(inputs) if self.transform is not None else inputs
            part, tried = "test", (inputs, targets)
            with torch.no_grad():
                require_loss(part, self.model, outputs, self.loss, tried)
        if self.metrics:
            require_metric_values(part, self.metrics, self.model, outputs, tried)

    def to(self, device: torch.device) -> SupervisedTask:
        """Move the model and the data to `device`; call it before `bind`."""
        self.model.to(device)
        self.train = each(lambda tensor: tensor.to(device), self.train)
        self.test = each(lambda tensor: tensor.to(device), self.test)
        return self

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that an evaluation computes."""
        return ("loss", *(("accuracy",) if _are_classes(self.train[1]) else ()), *self.metrics)

    def loader(self, batches: Batches, seed: int, worker: int) -> ArrayLoader:
        """Return the loader of one worker's shard of the train set."""
        return ArrayLoader(self.train, batches, seed, worker, self.transform, self.augment, self.weight)

    def weight_of(self, rows: Tensor) -> float:
        """Return the weight of a batch of these rows of the train set."""
        return weigh(self.weight, rows_of(self.train[1], rows.to(device_of(self.train[1]))), len(rows))

    def train_on(self, rows: NDArray[np.int64], seed: int, batch_size: int = 1) -> None:
        """Say which rows of the train set are not held out, and how many fit at once: `estimated` draws from them."""
        self._trained_on = rows, seed, batch_size

    def estimated(self, weights: Tensor, state: Tensor) -> Tensor:
        """Return `state` with the running statistics of norm layers estimated for `weights`, on training batches.

        The batches are a function of the seed: a permutation of the whole train set, whoever trained on which part.
        """
        rows, seed, batch_size = self._trained_on
        rows = np.arange(num_samples(self.train[0])) if rows is None else rows
        batches, number = statistics_batches(rows, max(evaluation_batch_size(self.train[0]), batch_size), seed)
        if not self._statistics.is_needed or not number:
            return state
        return self._statistics(weights, state, self.loader(batches, seed, STATISTICS), number)

    def gradient(self, batch: Batch) -> float:
        """Compute the bound gradient at the bound weights and return the loss; the batch's key seeds all randomness."""
        torch.default_generator.manual_seed(batch.key)
        if device_of(batch.inputs).type == "cuda":
            torch.cuda.manual_seed(batch.key)
        self.flat.clear()
        loss = self._step(batch, self.forward, self.loss_weight)
        self.flat.collect()
        return loss.item()

    @torch.no_grad()
    def evaluate(
        self,
        weights: Tensor,
        state: Tensor | None,
        data: Pair,
        indices: Tensor | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> Scores:
        """Return loss, accuracy and metrics of `weights` on `data` (or on rows `indices`); bound memory stays as is.

        `on_batch` is called with the number of samples of each batch.
        """
        inputs, targets = data
        total = num_samples(inputs) if indices is None else len(indices)
        tensors = self.flat.tensors(weights, state)
        num_classes = int(targets.max()) + 1 if _are_classes(targets) else 0
        loss_sum, items, hits, seen = 0.0, 0.0, torch.zeros(num_classes), torch.zeros(num_classes)
        metrics = MetricPass(self.metrics)
        chosen = targets if indices is None else rows_of(targets, indices)
        constant = ConstantPrediction(self.loss, chosen) if num_classes else None
        with _evaluating(self.model):
            size = evaluation_batch_size(inputs)
            for start in range(0, total, size):
                rows = slice(start, start + size) if indices is None else indices[start:][:size]
                x, y = rows_of(inputs, rows), rows_of(targets, rows)
                samples = num_samples(x)
                outputs = self._step.outputs(self.transform(x) if self.transform else x, tensors)
                weight = weigh(self.weight, y, samples)
                loss_sum, items = loss_sum + self.loss(outputs, y).item() * weight, items + weight
                metrics.update(outputs, y, samples)
                if num_classes and not _are_scores(outputs, num_classes):
                    num_classes, hits, seen = 0, hits[:0], seen[:0]
                if num_classes and constant is not None:
                    constant.update(outputs, y)
                    right = outputs.argmax(1) == y
                    seen += torch.bincount(y, minlength=num_classes).cpu()
                    hits += torch.bincount(y[right], minlength=num_classes).cpu()
                if on_batch is not None:
                    on_batch(samples)
        per_class = tuple(100.0 * h / s if s else None for h, s in zip(hits.tolist(), seen.tolist(), strict=True))
        scores = Scores(loss_sum / max(items, 1.0), int(hits.sum()), total, per_class, metrics.compute())
        return replace(scores, **constant.result()) if num_classes and constant is not None else scores


def _are_classes(targets: Structure) -> bool:
    """Return whether targets are class numbers, so that accuracy can be computed."""
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64 or targets.dim() != 1 or not len(targets):
        return False
    return int(targets.min()) >= 0


def _are_scores(outputs: Any, num_classes: int) -> bool:
    """Return whether outputs hold a score for each class."""
    return isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] >= num_classes


def statistics_batches(rows: NDArray[np.int64], fitting: int, seed: int) -> tuple[Batches, int]:
    """Return the batches of `rows` that running statistics are estimated on, at most `fitting` in each, and how many.

    There are none of one sample, which has no variance.
    """
    size = min(MAX_BATCH, fitting, len(rows))
    number = min(-(-MAX_SAMPLES // size), len(rows) // size) if size > 1 else 0
    return Batches(rows, max(1, size), seed, STATISTICS), number


def evaluation_batch_size(inputs: Structure) -> int:
    """Return the batch size of evaluations: smaller for large inputs.

    >>> evaluation_batch_size(torch.empty(0, 1, 28, 28)), evaluation_batch_size(torch.empty(0, 3, 224, 224))
    (500, 27)
    """
    floats = sum(math.prod(tensor.shape[1:]) for tensor in tensors_of(inputs))
    return max(1, min(MAX_EVALUATION_BATCH, MAX_EVALUATION_NBYTES // (4 * max(1, floats))))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch the model to evaluation mode; afterwards restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
