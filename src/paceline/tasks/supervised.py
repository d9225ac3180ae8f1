"""A model, a loss and labelled arrays: what most people train. `paceline.Task` is this class."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.data.sampler import Batches
from paceline.interfaces import Batch, Loader, Scores, State
from paceline.randomness import mix64
from paceline.tasks.flat import FlatModule
from paceline.tasks.metrics import Measuring, Metric, require_metrics
from paceline.tasks.nested import Structure, device_of, each, num_samples, require_samples, rows_of, tensors_of
from paceline.tasks.step import Step, StepSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

Pair = tuple[Structure, Structure]
"""Inputs and targets: a tensor each, or tuples or dicts of tensors."""
EVALUATION_BATCH = 500
EVALUATION_NBYTES = 16 << 20
"""Inputs of one evaluation batch, as floats, take at most this much: 27 images of 224x224."""


class Normalise:
    """Bytes to floats of zero mean and unit deviation, a whole batch at a time."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        scale = torch.tensor([1.0 / (255.0 * s) for s in std])
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])
        self._scale, self._shift = scale.view(-1, 1, 1), shift.view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:  # uint8 [B, C, H, W] -> float32
        if self._scale.device != images.device:
            self._scale, self._shift = self._scale.to(images.device), self._shift.to(images.device)
        return torch.addcmul(self._shift, images.to(torch.float32), self._scale)


class ArrayLoader:
    """Batches of one worker's shard: one index and one transform each, no per-item Python."""

    def __init__(
        self,
        data: Pair,
        batches: Batches,
        seed: int,
        worker: int,
        transform: Callable[[Any], Any] | None,
        augment: Callable[[Any, int], Any] | None = None,
    ) -> None:
        self._inputs, self._targets = data
        self._device = device_of(self._inputs)
        self._batches = batches
        self._seed, self._worker = seed, worker
        self._transform, self._augment = transform, augment

    def batch(self, number: int) -> Batch:
        indices = torch.from_numpy(self._batches.indices(number)).to(self._device)
        inputs = each(lambda tensor: tensor.index_select(0, indices), self._inputs)
        dealt = (self._batches.generation,) if self._batches.generation else ()
        key = mix64(self._seed, self._worker, number, *dealt)
        if self._augment is not None:
            inputs = self._augment(inputs, key)
        if self._transform is not None:
            inputs = self._transform(inputs)
        targets = each(lambda tensor: tensor.index_select(0, indices), self._targets)
        return Batch(inputs, targets, len(indices), key)


class SupervisedTask:
    """Any `torch.nn.Module` with a mean loss `loss(outputs, targets)` over in-memory `(inputs, targets)` pairs.

    Inputs and targets are tensors, or tuples or dicts of tensors: a tuple of inputs is the model's arguments, a dict
    its named ones. `metrics` are functions of (outputs, targets), by name, whose means over samples are shown beside
    the loss, or objects with `reset`, `update` and `compute` (torchmetrics' are such).

    `transform` is applied to whole batches of inputs (normalising, casting). `augment(inputs, key)` comes before it, on
    training batches alone; what it draws must be a function of the batch's key. `decay(name, parameter)` says which
    parameters weight decay touches (all, unless given). Accuracy is counted when targets are class numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        train: Pair,
        test: Pair | None = None,
        *,
        metrics: Mapping[str, Metric] | None = None,
        transform: Callable[[Any], Any] | None = None,
        augment: Callable[[Any, int], Any] | None = None,
        decay: Callable[[str, nn.Parameter], bool] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        for name, pair in (("train", train), ("test", test)):
            if pair is not None:
                require_samples(name, *pair)
        self.metrics = dict(metrics or {})
        require_metrics(self.metrics)
        self.flat = FlatModule(model, decay)
        self.model = self.flat.module
        self.forward: nn.Module = self.model
        """What computes outputs in training: the model, or something around it."""
        self.loss_weight = 1.0
        """What the loss counts for in the gradient."""
        self.loss = loss
        self.train, self.test = train, test
        self.transform, self.augment = transform, augment
        self.classes = tuple(classes) if classes is not None else None
        self.layout, self.state_size = self.flat.layout, self.flat.state_size
        self.own: State = {}
        self.initial, self.bind = self.flat.initial, self.flat.bind
        self.mixture, self.state_dict = self.flat.mixture, self.flat.state_dict
        self.step_by(StepSettings())

    def step_by(self, settings: StepSettings) -> None:
        """How steps and evaluations are computed from now on."""
        self._step = Step(self.flat, self.loss, settings)

    def warm_up(self, loader: Loader) -> None:
        """After `bind`, before the clock runs: compile or capture the step, and leave everything as it was."""
        if not self._step.starts_slowly or self.forward is not self.model:
            return
        kept = [buffer.clone() for buffer in self.model.buffers()]
        self.gradient(loader.batch(0))
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), kept, strict=True):
                buffer.copy_(value)

    def to(self, device: torch.device) -> SupervisedTask:
        """Move the model and the data to `device`; before `bind`."""
        self.model.to(device)
        self.train = each(lambda tensor: tensor.to(device), self.train)
        self.test = each(lambda tensor: tensor.to(device), self.test)
        return self

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of what an evaluation finds."""
        accuracy = ("accuracy",) if _are_classes(self.train[1]) else ()
        return ("loss", *accuracy, *self.metrics)

    def loader(self, batches: Batches, seed: int, worker: int) -> ArrayLoader:
        """The batches of one worker's shard of the train set."""
        return ArrayLoader(self.train, batches, seed, worker, self.transform, self.augment)

    def gradient(self, batch: Batch) -> float:
        """Fill the bound gradient from the bound weights; all randomness comes from the batch's key."""
        torch.default_generator.manual_seed(batch.key)
        if device_of(batch.inputs).type == "cuda":
            torch.cuda.manual_seed(batch.key)
        self.flat.clear()
        loss = self._step(batch, self.forward, self.loss_weight)
        self.flat.collect()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, weights: Tensor, state: Tensor | None, data: Pair, indices: Tensor | None = None) -> Scores:
        """Loss, accuracy and metrics of `weights` on `data` (or some rows of it); the bound memory is not touched."""
        inputs, targets = data
        total = num_samples(inputs) if indices is None else len(indices)
        tensors = self.flat.tensors(weights, state)
        num_classes = int(targets.max()) + 1 if _are_classes(targets) else 0
        loss_sum, hits, seen = 0.0, torch.zeros(num_classes), torch.zeros(num_classes)
        measuring = Measuring(self.metrics)
        with _evaluating(self.model):
            size = evaluation_batch(inputs)
            for start in range(0, total, size):
                rows = slice(start, start + size) if indices is None else indices[start:][:size]
                x, y = rows_of(inputs, rows), rows_of(targets, rows)
                samples = num_samples(x)
                outputs = self._step.outputs(self.transform(x) if self.transform else x, tensors)
                loss_sum += self.loss(outputs, y).item() * samples
                measuring.look(outputs, y, samples)
                if num_classes and not _are_scores(outputs, num_classes):
                    num_classes, hits, seen = 0, hits[:0], seen[:0]
                if num_classes:
                    right = outputs.argmax(1) == y
                    seen += torch.bincount(y, minlength=num_classes).cpu()
                    hits += torch.bincount(y[right], minlength=num_classes).cpu()
        per_class = tuple(100.0 * h / s if s else None for h, s in zip(hits.tolist(), seen.tolist(), strict=True))
        return Scores(loss_sum / max(total, 1), int(hits.sum()), total, per_class, measuring.found())


def _are_classes(targets: Structure) -> bool:
    """Whether targets are class numbers, so that right answers can be counted."""
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64 or targets.dim() != 1 or not len(targets):
        return False
    return int(targets.min()) >= 0


def _are_scores(outputs: Any, num_classes: int) -> bool:
    """Whether a model says of every class how likely it is."""
    return isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] >= num_classes


def evaluation_batch(inputs: Structure) -> int:
    """How many of `inputs` are evaluated together: fewer where they are large.

    >>> evaluation_batch(torch.empty(0, 1, 28, 28)), evaluation_batch(torch.empty(0, 3, 224, 224))
    (500, 27)
    """
    floats = sum(math.prod(tensor.shape[1:]) for tensor in tensors_of(inputs))
    return max(1, min(EVALUATION_BATCH, EVALUATION_NBYTES // (4 * max(1, floats))))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards every module back in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
