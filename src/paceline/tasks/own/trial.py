"""One forward pass of a user's own task before training starts, so that a mistake is one line and not a traceback."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.settings.imports import in_a_line
from paceline.tasks.flat import sharing_parameters
from paceline.tasks.metrics import Metric, MetricPass, WholeSetMetric
from paceline.tasks.nested import Structure, each, num_samples, tensors_of
from paceline.tasks.own.samples import describe

_BROADCASTS = "Using a target size"  # how torch warns that a loss compares every output with every target


def require_parts(model: Any, loss: Any) -> None:
    """Raise UserError unless `model` is a module and `loss` can be called, both made and not their classes."""
    if isinstance(model, type):
        raise UserError(f"the model is the class {model.__name__}: give an instance, {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise UserError(f"the model is {type(model).__name__}: give a torch.nn.Module")
    if isinstance(loss, type):
        raise UserError(f"the loss is the class {loss.__name__}: give an instance, {loss.__name__}()")
    if not callable(loss):
        raise UserError(f"the loss is {type(loss).__name__}: give a function of (outputs, targets)")


def trial_rows(targets: Structure, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the rows of a trial batch: `rows`, of which two are replaced by those with the extreme class numbers."""
    if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point() or len(rows) < 2:
        return rows
    return np.concatenate([[int(targets.argmax()), int(targets.argmin())], rows[2:]])


def require_loss(
    part: str,
    model: nn.Module,
    outputs_of: Callable[[Structure, nn.Module], Any],
    loss: Callable[[Any, Any], Any],
    batch: tuple[Structure, Structure],
) -> None:
    """Compute the loss of one batch on a copy of the model; raise UserError if training on it would fail."""
    try:
        copy = sharing_parameters(model)
    except Exception:  # a model that cannot be copied is not tried: its buffers would change
        return
    inputs, targets = batch
    name, outputs = type(model).__name__, None
    with _generators_kept(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copy.train(part == "train")
        try:
            outputs = outputs_of(inputs, copy)
        except Exception as error:
            what = f"model {name} cannot compute on the {part} inputs, {describe(inputs)}"
            raise UserError(f"{what}: {in_a_line(error)}{_hint(inputs, targets, error)}") from error
        try:
            value = loss(outputs, targets)
        except Exception as error:
            what = f"the loss of outputs {describe(outputs)} and {part} targets {describe(targets)}{_range(targets)}"
            few = _too_few_classes(name, outputs, targets) if isinstance(error, IndexError) else None
            if few is not None:
                raise UserError(f"{what} fails: {few}") from error
            raise UserError(f"{what} fails: {in_a_line(error)}") from error
    if any(str(warning.message).startswith(_BROADCASTS) for warning in caught):
        what = f"the loss compares outputs {describe(outputs)} with {part} targets {describe(targets)}"
        raise UserError(f"{what}, every one with every other: give both the same shape, as in targets.unsqueeze(1)")
    if not isinstance(value, Tensor):
        raise UserError(f"the loss returned {type(value).__name__}: return a tensor with one number, the mean")
    if value.numel() != 1:
        what = f"the loss returned a tensor of shape {list(value.shape)}"
        raise UserError(f"{what}: return one number, the mean over the batch (reduction='mean')")
    if part == "train" and not value.requires_grad:
        raise UserError(
            f"the loss of model {name} does not depend on its trained parameters: compute it from the outputs, without "
            "detach(), item() or no_grad()"
        )
    if part == "train" and not _is_finite(value):
        raise UserError(_why_not_finite(name, inputs, outputs, targets, float(value.detach())))
    if part == "train" and _is_sum(loss, outputs, targets, float(value.detach())):
        raise UserError(
            "the loss of a batch is a sum over its samples, as that of all of them twice is twice as large: return the "
            "mean (reduction='mean', or divide by the samples); for steps as long, multiply lr by the batch size"
        )


def require_metric_values(
    part: str,
    metrics: Mapping[str, Metric],
    model: nn.Module,
    outputs_of: Callable[[Structure, nn.Module], Any],
    batch: tuple[Structure, Structure],
) -> None:
    """Compute each metric of one batch on a copy of the model, as an evaluation does; raise UserError if that fails."""
    try:
        copy = sharing_parameters(model)
    except Exception:
        return
    inputs, targets = batch
    with _generators_kept(), torch.no_grad():
        outputs = outputs_of(inputs, copy.eval())
        for name, metric in metrics.items():
            tried = MetricPass({name: metric})
            try:
                tried.update(outputs, targets, num_samples(inputs))
            except UserError:
                raise
            except Exception as error:
                what = f"metric '{name}' of outputs {describe(outputs)} and {part} targets {describe(targets)}"
                raise UserError(f"{what} fails: {in_a_line(error)}") from error
            try:
                tried.compute()
            except UserError:
                raise
            except Exception:  # a metric of the whole set may need more samples than these
                pass
            if isinstance(metric, WholeSetMetric):
                metric.reset()


def _is_sum(loss: Callable[[Any, Any], Any], outputs: Any, targets: Structure, value: float) -> bool:
    """Whether the loss of every sample twice is twice as large; not if the loss cannot be computed of those."""
    twice = each(lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor, (outputs, targets))
    try:
        with _generators_kept(), torch.no_grad():
            found = float(loss(*twice))
    except Exception:  # it is made for batches of one size: nothing can be said
        return False
    return value != 0.0 and math.isclose(found, 2.0 * value, rel_tol=1e-4)


def _why_not_finite(name: str, inputs: Structure, outputs: Any, targets: Structure, value: float) -> str:
    """Say whose fault it is that the loss of the first weights is a NaN or an infinity."""
    for what, data in (("inputs", inputs), ("targets", targets)):
        if not _is_finite(data):
            return f"the train {what} of one batch, {describe(data)}, hold a NaN or infinity: remove or replace those"
    if not _is_finite(outputs):
        return f"model {name} gives a NaN or infinity for finite train inputs: check its first weights and operations"
    return f"the loss of finite outputs and train targets is {value:g}: check for a logarithm of zero or a division"


def _is_finite(data: Structure) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_of(data))


def _hint(inputs: Structure, targets: Structure, error: Exception) -> str:
    if isinstance(inputs, Mapping) and isinstance(error, TypeError) and "keyword argument" in str(error):
        pairs = "; if one of them is the target, let samples be pairs (input, target)" if targets is None else ""
        return f"; a dict of inputs becomes keyword arguments of forward(): {', '.join(map(str, inputs))}{pairs}"
    doubles = any(tensor.dtype == torch.float64 for tensor in tensors_of(inputs))
    return "; weights are float32: give inputs.float()" if doubles else ""


def _too_few_classes(name: str, outputs: Any, targets: Structure) -> str | None:
    """Say that labels are not numbers of the model's classes; None if they are, or outputs are no scores of classes."""
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or not _range(targets):
        return None
    classes = outputs.shape[1]
    if int(targets.min()) >= 0 and int(targets.max()) < classes:
        return None
    return f"model {name} scores {classes} classes, so give labels from 0 to {classes - 1}, or the model more outputs"


def _range(targets: Structure) -> str:
    if not isinstance(targets, Tensor) or targets.is_floating_point() or not targets.numel():
        return ""
    return f" (from {int(targets.min())} to {int(targets.max())})"


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the random generators that a model may draw from."""
    ours, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(ours)
    np.random.set_state(numpys)
