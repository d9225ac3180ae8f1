"""Metrics other than the loss: functions of (outputs, targets), or objects that see all batches.

An object needs `reset()`, `update(outputs, targets)` and `compute()`, as the metrics of torchmetrics have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import UserError

RESERVED = ("loss", "accuracy")
"""Names of the built-in metrics."""
MIN_COUNT = 0.5
"""Of a class that does not occur, so that its logarithm is finite."""


@runtime_checkable
class WholeSetMetric(Protocol):
    """A metric of the whole data set that is not a mean over batches."""

    def reset(self) -> None: ...

    def update(self, outputs: Any, targets: Any) -> None: ...

    def compute(self) -> float | Tensor: ...


Metric: TypeAlias = Callable[[Any, Any], "float | Tensor"] | WholeSetMetric


Weight: TypeAlias = Callable[[Any], "float | Tensor"]
"""Says how many items the mean loss of a batch counts, from its targets."""


class Perplexity:
    """Perplexity of a language model: exp of the mean negative log-likelihood over all tokens.

    Outputs are scores [..., vocabulary], targets token ids [...]; targets equal to `ignored` (padding) do not count.

    >>> import torch
    >>> metric = Perplexity(ignored=0)
    >>> metric.update(torch.zeros(2, 3, 8), torch.tensor([[1, 2, 0], [3, 0, 0]]))
    >>> round(metric.compute(), 3)
    8.0
    """

    def __init__(self, ignored: int = -100) -> None:
        self._ignored = ignored
        self.reset()

    def reset(self) -> None:
        """Start a new pass over the data."""
        self._sum, self._count = 0.0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch."""
        scores, ids = outputs.float().flatten(0, -2), targets.flatten()
        self._sum += F.cross_entropy(scores, ids, ignore_index=self._ignored, reduction="sum").item()
        self._count += int((ids != self._ignored).sum())

    def compute(self) -> float:
        """Return the perplexity of all batches since `reset`."""
        mean = self._sum / self._count if self._count else math.nan
        return math.exp(mean) if mean < math.log(1e300) else math.inf


class _Mean:
    """The mean of a function over samples."""

    def __init__(self, function: Callable[[Any, Any], float | Tensor]) -> None:
        self._function, self._sum, self._count = function, 0.0, 0

    def update(self, name: str, outputs: Any, targets: Any, samples: int) -> None:
        self._sum += samples * number(name, self._function(outputs, targets))
        self._count += samples

    def compute(self) -> float:
        return self._sum / self._count if self._count else math.nan


class MetricPass:
    """All metrics of a task during one pass over the data."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._means = {
            name: _Mean(metric) for name, metric in metrics.items() if not isinstance(metric, WholeSetMetric)
        }
        self._gathered = {name: metric for name, metric in metrics.items() if isinstance(metric, WholeSetMetric)}
        for metric in self._gathered.values():
            metric.reset()

    def update(self, outputs: Any, targets: Any, samples: int) -> None:
        """Add one batch."""
        for name, mean in self._means.items():
            mean.update(name, outputs, targets, samples)
        for metric in self._gathered.values():
            metric.update(outputs, targets)

    def compute(self) -> dict[str, float]:
        """Return the value of each metric by name."""
        means = {name: mean.compute() for name, mean in self._means.items()}
        return means | {name: number(name, metric.compute()) for name, metric in self._gathered.items()}


class ConstantPrediction:
    """What a prediction that ignores the inputs reaches on labelled data: its correct answers, and its loss.

    The loss is that of the class frequencies as logarithms, which minimise cross entropy among constant outputs. It is
    computed by the task's own loss, batch by batch as the model's, so that both have one scale.

    >>> import torch
    >>> labels = torch.tensor([0, 0, 0, 1])
    >>> constant = ConstantPrediction(F.cross_entropy, labels)
    >>> constant.update(torch.randn(4, 2), labels)
    >>> constant.result()["constant_correct"], round(constant.result()["constant_loss"], 4)
    (3, 0.5623)
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], targets: Tensor) -> None:
        self._loss, self._counts = loss, torch.bincount(targets)
        self._sum: float | None = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch; `outputs` are the model's, for their shape and type."""
        if self._sum is None:
            return
        counts = F.pad(self._counts.float(), (0, outputs.shape[1] - len(self._counts))).clamp(min=MIN_COUNT)
        constant = (counts / counts.sum()).log().to(outputs).repeat(len(outputs), 1)
        try:
            self._sum += self._loss(constant, targets).item() * len(outputs)
        except Exception:  # the user's loss needs outputs of the model itself: its constant is unknown
            self._sum = None

    def result(self) -> dict[str, Any]:
        """Return the fields of `Scores`."""
        total, most = int(self._counts.sum()), int(self._counts.max())
        loss = self._sum / total if self._sum is not None else math.nan
        return {"constant_correct": most, "constant_loss": loss if math.isfinite(loss) else None}


def number(name: str, value: float | Tensor) -> float:
    """Return a metric's value as a float; raise UserError if it is not one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"metric '{name}' returned {what}: return one number, the mean over the batch") from None


def weigh(weight: Weight | None, targets: Any, samples: int) -> float:
    """Return how many items the mean loss of a batch counts: its samples, unless the task says otherwise."""
    if weight is None:
        return samples
    found = number("weight", weight(targets))
    if not 0.0 < found < math.inf:
        raise UserError(
            f"weight(targets) returned {found:g} for a batch of {samples} samples: return how many items its mean loss "
            "counts, above 0"
        )
    return found


def require_metrics(metrics: Mapping[str, Metric] | None) -> None:
    """Raise UserError for a name that `--target` cannot use or a metric that is neither function nor object."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UserError(
            f"metrics is {type(metrics).__name__}: give a dict of names and functions of (outputs, targets), as in "
            '{"error": my_error}'
        )
    for name, metric in (metrics or {}).items():
        if name in RESERVED or not str(name).isidentifier():
            raise UserError(f"metric '{name}': give it a name of letters and digits, other than loss and accuracy")
        if not (callable(metric) or isinstance(metric, WholeSetMetric)):
            raise UserError(f"metric '{name}' is {type(metric).__name__}: give a function of outputs and targets")
