"""Optimizers over one flat vector: in place, elementwise over [..., P], state of tensors only.

The learning rate and the momentum may be tensors that broadcast, so that many runs can step as one.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.interfaces import State


class Optimizer(Protocol):
    """One step of descent."""

    def start(self, weights: Tensor) -> State: ...

    def step(self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor) -> None: ...


def clipped(gradient: Tensor, max_norm: float) -> Tensor:
    """The gradient scaled down to at most `max_norm` in its Euclidean norm.

    >>> clipped(torch.tensor([3.0, 4.0]), 1.0).norm().item() <= 1.0
    True
    """
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    scale: Tensor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return gradient * scale


class Prepared:
    """What is done to a gradient first, by an optimizer or a rule that steps on its own: clip it, add the decay."""

    def __init__(self, weight_decay: float = 0.0, clip: float | None = None, decay_mask: Tensor | None = None) -> None:
        self.clip = clip
        self._decay: Tensor | None = None
        if weight_decay:
            mask = torch.ones(()) if decay_mask is None else decay_mask
            self._decay = mask * weight_decay

    def prepare(self, weights: Tensor, gradient: Tensor) -> Tensor:
        if self.clip is not None:
            gradient = clipped(gradient, self.clip)
        if self._decay is not None:
            self._decay = self._decay.to(weights.device)
            gradient = torch.addcmul(gradient, weights, self._decay)
        return gradient


class Sgd(Prepared):
    """Stochastic gradient descent with momentum, as torch.optim.SGD has it.

    v = momentum v + g;  weights -= lr v   (Nesterov: weights -= lr (g + momentum v))
    """

    def __init__(
        self,
        momentum: float | Tensor = 0.0,
        *,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        clip: float | None = None,
        decay_mask: Tensor | None = None,
    ) -> None:
        super().__init__(weight_decay, clip, decay_mask)
        self.momentum = torch.as_tensor(momentum, dtype=torch.float32)
        self.nesterov = nesterov
        self._moving = bool((self.momentum != 0).any())

    def start(self, weights: Tensor) -> State:
        self.momentum = self.momentum.to(weights.device)
        return {"velocity": torch.zeros_like(weights)} if self._moving else {}

    def step(self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor) -> None:
        gradient = self.prepare(weights, gradient)
        if self._moving:
            velocity = state["velocity"]
            torch.addcmul(gradient, velocity, self.momentum, out=velocity)
            gradient = torch.addcmul(gradient, velocity, self.momentum) if self.nesterov else velocity
        weights.addcmul_(gradient, lr, value=-1.0)


class Adam(Prepared):
    """Adam (arXiv 1412.6980) with bias correction, as torch.optim.Adam has it.

    m = b1 m + (1 - b1) g;  s = b2 s + (1 - b2) g^2;  weights -= lr m' / (sqrt(s') + eps)
    """

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip: float | None = None,
        decay_mask: Tensor | None = None,
    ) -> None:
        super().__init__(weight_decay, clip, decay_mask)
        self.betas = betas
        self.eps = eps
        self._scratch = torch.empty(0)

    def start(self, weights: Tensor) -> State:
        self._scratch = torch.empty_like(weights)
        count = torch.zeros((*weights.shape[:-1], 1), dtype=torch.float64, device=weights.device)
        return {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights), "count": count}

    def step(self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor) -> None:
        gradient = self.prepare(weights, gradient)
        beta1, beta2 = self.betas
        count, mean, square = state["count"], state["mean"], state["square"]
        count += 1.0
        mean.lerp_(gradient, 1.0 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        step = torch.sqrt(square, out=self._scratch)
        step.mul_((1.0 - beta2**count).rsqrt().to(weights.dtype)).add_(self.eps)
        torch.div(mean, step, out=step)
        weights.addcmul_(step, (lr / (1.0 - beta1**count)).to(weights.dtype), value=-1.0)
