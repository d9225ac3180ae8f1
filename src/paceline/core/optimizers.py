"""Optimizers over one flat vector: in place, elementwise over [..., P]. lr and momentum may be broadcast tensors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.interfaces import Layout, State


class Optimizer(Protocol):
    """Makes one step along a gradient."""

    def start(self, weights: Tensor) -> State: ...

    def step(self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor) -> None: ...


class RoundOptimizer(Optimizer, Protocol):
    """An optimizer whose moments can decay by the round: a step that is a `share` of one takes decays to this power.

    A gradient that stays the same moves the weights as far per step as with a share of 1.
    """

    def step(
        self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor, share: float | Tensor = 1.0
    ) -> None: ...


def _of_share(momentum: Tensor, share: float | Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """The momentum of a step that is a share of a round, and the step length that moves as far as without a share."""
    decay = momentum.double() ** share
    return decay.to(momentum.dtype), (length * (1.0 - decay) / (1.0 - momentum.double())).to(momentum.dtype)


def decay_towards(mean: Tensor, value: Tensor, decay: float | Tensor) -> None:
    """mean = decay mean + (1 - decay) value"""
    mean.lerp_(value, (1.0 - decay).to(mean.dtype) if isinstance(decay, Tensor) else 1.0 - decay)


def decay_square(square: Tensor, gradient: Tensor, decay: float | Tensor) -> None:
    """square = decay square + (1 - decay) gradient^2"""
    if isinstance(decay, Tensor):
        decay_towards(square, gradient * gradient, decay)
    else:
        square.mul_(decay).addcmul_(gradient, gradient, value=1.0 - decay)


def clipped(gradient: Tensor, max_norm: float) -> Tensor:
    """Scale the gradient down to a Euclidean norm of at most `max_norm`.

    >>> clipped(torch.tensor([3.0, 4.0]), 1.0).norm().item() <= 1.0
    True
    """
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    scale: Tensor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return gradient * scale


class GradientTransform:
    """Transforms a gradient before a step: clips it, then adds the weight decay."""

    def __init__(self, weight_decay: float = 0.0, clip: float | None = None, decay_mask: Tensor | None = None) -> None:
        self.clip = clip
        self.changes_nothing = clip is None and not weight_decay
        self._decay: Tensor | None = None
        if weight_decay:
            self._decay = (torch.ones(()) if decay_mask is None else decay_mask) * weight_decay

    def move_to(self, device: torch.device) -> None:
        """Move the decay to the device of the weights, once."""
        self._decay = self._decay.to(device) if self._decay is not None else None

    def prepare(self, weights: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient to step along; the given one is only read."""
        if self.clip is not None:
            gradient = clipped(gradient, self.clip)
        if self._decay is not None:
            gradient = torch.addcmul(gradient, weights, self._decay)
        return gradient


class Sgd(GradientTransform):
    """Stochastic gradient descent with momentum, like torch.optim.SGD.

    v = momentum v + g;  weights -= lr v   (Nesterov: weights -= lr (g + momentum v))
    With a share s of a round, the momentum is momentum^s, and lr is multiplied by (1 - momentum^s)/(1 - momentum).
    Nesterov's difference to v then counts s times, as the newest gradient is of one worker.
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
        self.move_to(weights.device)
        self.momentum = self.momentum.to(weights.device)
        return {"velocity": torch.zeros_like(weights)} if self._moving else {}

    def step(self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor, share: float | Tensor = 1.0) -> None:
        if not self.changes_nothing:
            gradient = self.prepare(weights, gradient)
        if self._moving:
            velocity, momentum = state["velocity"], self.momentum
            if isinstance(share, Tensor) or share != 1.0:
                momentum, counts = _of_share(momentum, share, torch.ones_like(momentum))
                torch.addcmul(gradient, velocity, momentum, out=velocity)
                direction = velocity
                if self.nesterov:
                    direction = velocity + (torch.addcmul(gradient, velocity, momentum) - velocity) * share
                gradient = (direction * counts).to(weights.dtype)
            else:
                torch.addcmul(gradient, velocity, momentum, out=velocity)
                gradient = torch.addcmul(gradient, velocity, momentum) if self.nesterov else velocity
        weights.addcmul_(gradient, lr, value=-1.0)


class Adam(GradientTransform):
    """Adam (arXiv 1412.6980) with bias correction, like torch.optim.Adam.

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
        self.betas, self.eps = betas, eps
        self._scratch = torch.empty(0)

    def start(self, weights: Tensor) -> State:
        self.move_to(weights.device)
        self._scratch = torch.empty_like(weights)
        count = torch.zeros((*weights.shape[:-1], 1), dtype=torch.float64, device=weights.device)
        return {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights), "count": count}

    def step(self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor, share: float | Tensor = 1.0) -> None:
        if not self.changes_nothing:
            gradient = self.prepare(weights, gradient)
        (beta1, beta2), count = self.betas, state["count"]
        mean, square = state["mean"], state["square"]
        count += share  # in rounds, so that beta^count is the product of all decays
        decay_towards(mean, gradient, beta1**share)
        decay_square(square, gradient, beta2**share)
        step = torch.sqrt(square, out=self._scratch)
        step.mul_((1.0 - beta2**count).rsqrt().to(weights.dtype)).add_(self.eps)
        torch.div(mean, step, out=step)
        weights.addcmul_(step, (lr / (1.0 - beta1**count)).to(weights.dtype), value=-1.0)


class AdamW(Adam):
    """Adam with decoupled weight decay (arXiv 1711.05101), like torch.optim.AdamW.

    weights -= lr decay weights, then a step of Adam.
    """

    def prepare(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return gradient if self.clip is None else clipped(gradient, self.clip)

    def step(self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor, share: float | Tensor = 1.0) -> None:
        if self._decay is not None:
            weights.mul_(1.0 - lr * self._decay)
        super().step(weights, state, gradient, lr, share)


class RmsProp(GradientTransform):
    """RMSprop (Tieleman and Hinton 2012) with momentum, like torch.optim.RMSprop.

    s = alpha s + (1 - alpha) g^2;  v = momentum v + g / (sqrt(s) + eps);  weights -= lr v
    With a share of a round, s is scaled to grow from zero as it does alone, where the first steps are long enough.
    """

    def __init__(
        self,
        momentum: float = 0.0,
        *,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip: float | None = None,
        decay_mask: Tensor | None = None,
    ) -> None:
        super().__init__(weight_decay, clip, decay_mask)
        self.momentum, self.alpha, self.eps = momentum, alpha, eps
        self._scratch = torch.empty(0)

    def start(self, weights: Tensor) -> State:
        self.move_to(weights.device)
        self._scratch = torch.empty_like(weights)
        counts = torch.zeros((*weights.shape[:-1], 2), dtype=torch.float64, device=weights.device)
        return {"square": torch.zeros_like(weights), "velocity": torch.zeros_like(weights), "counts": counts}

    def step(self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor, share: float | Tensor = 1.0) -> None:
        """`counts` of the state holds the rounds and the updates so far."""
        if not self.changes_nothing:
            gradient = self.prepare(weights, gradient)
        square, velocity, counts = state["square"], state["velocity"], state["counts"]
        rounds, updates = counts[..., :1], counts[..., 1:]
        rounds += share
        updates += 1.0
        decay_square(square, gradient, self.alpha**share)
        grown = ((1.0 - self.alpha**updates) / (1.0 - self.alpha**rounds)).sqrt()
        direction = torch.sqrt(square, out=self._scratch).mul_(grown.to(weights.dtype)).add_(self.eps)
        torch.div(gradient, direction, out=direction)
        decay = self.momentum**share
        velocity.mul_(decay.to(weights.dtype) if isinstance(decay, Tensor) else decay).add_(direction)
        weights.addcmul_(velocity, (lr * ((1.0 - decay) / (1.0 - self.momentum))).to(weights.dtype), value=-1.0)


TRUST = 0.001


class Lars(GradientTransform):
    """LARS (arXiv 1708.03888): SGD with momentum; the step of each weight matrix is proportional to its norm.

    r = .001 |w| / (|g| + decay |w|) of each parameter; 1 if it has fewer than 2 axes (biases, norms) or is all zeros
    v = momentum v + lr r (g + decay w);  w -= v.  Reads the layout; gaps between parameters stay zero.
    With a share s of a round: v decays by momentum^s, and what is added counts (1 - momentum^s)/(1 - momentum).

    >>> from paceline.interfaces import pack
    >>> layout = pack([("a", (1, 2), True)])
    >>> weights, lars = torch.zeros(layout.size), Lars(layout)
    >>> weights[:2] = torch.tensor([3.0, 4.0])
    >>> lars.step(weights, lars.start(weights), weights / 5, torch.tensor(100.0))
    >>> weights[:2].tolist()
    [2.700000047683716, 3.5999999046325684]
    """

    def __init__(
        self,
        layout: Layout,
        momentum: float | Tensor = 0.0,
        *,
        weight_decay: float = 0.0,
        clip: float | None = None,
        decay_mask: Tensor | None = None,
    ) -> None:
        super().__init__(weight_decay, clip, decay_mask)
        self.momentum = torch.as_tensor(momentum, dtype=torch.float32)
        self._spans = [slice(p.offset, p.offset + p.size) for p in layout.parameters]
        starts = [*(p.offset for p in layout.parameters[1:]), layout.size]
        self._owner = torch.zeros(layout.size, dtype=torch.int64)  # for every float, the number of its parameter
        for number, (span, end) in enumerate(zip(self._spans, starts, strict=False)):
            self._owner[span.start : end] = number
        self._weight_decay = torch.tensor([weight_decay * p.decay for p in layout.parameters])
        self._adapted = torch.tensor([len(p.shape) > 1 for p in layout.parameters], dtype=torch.bool)

    def start(self, weights: Tensor) -> State:
        device = weights.device
        self.move_to(device)
        self.momentum, self._owner = self.momentum.to(device), self._owner.to(device)
        self._weight_decay, self._adapted = self._weight_decay.to(device), self._adapted.to(device)
        return {"velocity": torch.zeros_like(weights)}

    def step(self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor, share: float | Tensor = 1.0) -> None:
        if self.clip is not None:
            gradient = clipped(gradient, self.clip)
        norms, slopes = self._norms(weights), self._norms(gradient)
        found = TRUST * norms / (slopes + self._weight_decay * norms).clamp(min=1e-30)
        ratios = torch.where((norms > 0) & self._adapted, found, 1.0)
        if self._decay is not None:
            gradient = torch.addcmul(gradient, weights, self._decay)
        velocity, decay = state["velocity"], self.momentum
        if isinstance(share, Tensor) or share != 1.0:
            decay, lr = _of_share(self.momentum, share, lr)
        velocity.mul_(decay).addcmul_(gradient, (ratios * lr).index_select(-1, self._owner))
        weights.sub_(velocity)

    def _norms(self, flat: Tensor) -> Tensor:
        """The Euclidean norm of every parameter: [..., parameters]."""
        return torch.stack([torch.linalg.vector_norm(flat[..., span], dim=-1) for span in self._spans], -1)
