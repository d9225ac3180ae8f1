"""Muon: orthogonal steps for the hidden matrices of a model, and AdamW for all other parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.optimizers import AdamW, GradientTransform, clipped, decay_towards
from paceline.interfaces import Layout, Parameter, State

COEFFICIENTS, ITERATIONS, SMALLEST = (3.4445, -4.7750, 2.0315), 5, 1e-7
RMS = 0.2  # of a step over lr, about that of AdamW, so that both take one lr and one weight decay
TABLES = ("embed", "position", "wte", "wpe")  # what the names of token and position tables contain


def hidden_matrices(layout: Layout) -> list[Parameter]:
    """The parameters with two axes, without embeddings (by their names) and the last matrix, which is the output.

    >>> from paceline.interfaces import pack
    >>> names = ("embedding.weight", "fc1.weight", "fc2.weight", "output.weight")
    >>> [parameter.name for parameter in hidden_matrices(pack([(name, (2, 3), True) for name in names]))]
    ['fc1.weight', 'fc2.weight']
    """
    matrices = [p for p in layout.parameters if len(p.shape) == 2]
    return [p for p in matrices[:-1] if not any(word in p.name.lower() for word in TABLES)]


def orthogonalized(matrices: Tensor) -> Tensor:
    """About U V^T for matrices U S V^T, [..., count, rows, columns]: Newton-Schulz iterations in bfloat16, as torch."""
    found = matrices.bfloat16().flatten(0, -3)
    is_tall = found.shape[-2] > found.shape[-1]
    found = found.mT if is_tall else found
    found = found / torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.mT if is_tall else found).reshape(matrices.shape).to(matrices.dtype)


class Muon(GradientTransform):
    """Muon (Jordan et al. 2024) for hidden matrices, AdamW for the rest, with one lr: like torch.optim.Muon and AdamW.

    v = mu v + (1 - mu) g;  W -= lr decay W;  W -= lr .2 sqrt(max(rows, columns)) orthogonalized(mu v + (1 - mu) g)
    The factor is that of `match_rms_adamw` in torch (arXiv 2502.16982). Reads the layout; gaps between parameters stay
    zero.

    >>> from paceline.interfaces import pack
    >>> layout = pack([("hidden", (1, 1), True), ("output", (1, 1), True)])
    >>> weights, muon = torch.zeros(layout.size), Muon(layout)
    >>> muon.step(weights, muon.start(weights), torch.ones(layout.size), torch.tensor(1.0))
    >>> round(weights[0].item(), 2), round(weights[16].item(), 2)
    (-0.14, -1.0)
    """

    def __init__(
        self,
        layout: Layout,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        weight_decay: float = 0.0,
        clip: float | None = None,
        decay_mask: Tensor | None = None,
    ) -> None:
        super().__init__(weight_decay, clip, decay_mask)
        self.momentum, self._others = momentum, AdamW(betas)
        hidden = hidden_matrices(layout)
        self._by_shape: dict[tuple[int, ...], list[slice]] = {}
        for p in hidden:
            self._by_shape.setdefault(p.shape, []).append(slice(p.offset, p.offset + p.size))
        rest = [torch.arange(p.offset, p.offset + p.size) for p in layout.parameters if p not in hidden]
        self._rest = torch.cat(rest) if rest else torch.empty(0, dtype=torch.int64)

    def start(self, weights: Tensor) -> State:
        self.move_to(weights.device)
        self._rest = self._rest.to(weights.device)
        return {"velocity": torch.zeros_like(weights), **self._others.start(weights.index_select(-1, self._rest))}

    def step(self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor, share: float | Tensor = 1.0) -> None:
        if self.clip is not None:
            gradient = clipped(gradient, self.clip)
        if self._decay is not None:
            weights.mul_(1.0 - lr * self._decay)
        rest = weights.index_select(-1, self._rest)
        self._others.step(rest, state, gradient.index_select(-1, self._rest), lr, share)
        weights.index_copy_(-1, self._rest, rest)
        velocity = state["velocity"]
        for shape, spans in self._by_shape.items():
            for span in spans:
                decay_towards(velocity[..., span], gradient[..., span], self.momentum**share)
            directions = [torch.lerp(gradient[..., span], velocity[..., span], self.momentum) for span in spans]
            matrices = torch.stack(directions, -2)
            steps = orthogonalized(matrices.view(*matrices.shape[:-1], *shape)).flatten(-2)
            lrs = lr * (RMS * max(shape) ** 0.5)
            for span, step in zip(spans, steps.unbind(-2), strict=True):
                weights[..., span].addcmul_(step, lrs, value=-1.0)
