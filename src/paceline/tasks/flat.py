"""Bind a torch module to flat vectors: weights, gradient and running statistics, each one block of memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.interfaces import Layout, pack


class FlatModule:
    """Makes a module's parameters and buffers views into flat memory that the transports share.

    Only parameters that require a gradient get a place in the layout, and must be float32; frozen ones stay in the
    module as they are, and so do buffers of another type. A parameter with several names (tied weights) has one place,
    under its first name. With `parameters`, these get the places, and with buffers may be of any floating type.
    """

    def __init__(
        self,
        module: nn.Module,
        decay: Callable[[str, nn.Parameter], bool] | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.module = module
        given, casts = parameters, parameters is not None
        named = module.named_parameters()
        self._parameters: dict[str, Any] = dict(given or {}) if casts else {n: p for n, p in named if p.requires_grad}
        if not self._parameters:
            raise UserError("the model has no parameter that requires a gradient: there is nothing to train")
        for name, parameter in self._parameters.items() if not casts else ():
            if parameter.dtype != torch.float32:
                what = f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, and weights are trained as"
                instead = "call model.float() before, with autocast for a faster forward pass, or freeze the parameter"
                raise UserError(f"{what} float32: {instead}")
        if empty := [name for name, one in (*module.named_parameters(), *module.named_buffers()) if one.is_meta]:
            instead = "make the model without torch.device('meta'), or give it values first (to_empty, then initialise)"
            raise UserError(f"{empty[0]} is on device meta, which holds no values: {instead}")
        buffers = module.named_buffers()
        self._buffers = {n: b for n, b in buffers if b.dtype == torch.float32 or (casts and b.is_floating_point())}
        self._counts = self._integer_buffers()
        self.layout: Layout = pack(
            [(name, tuple(p.shape), decay is None or decay(name, p)) for name, p in self._parameters.items()]
        )
        self.state_layout: Layout = pack([(name, tuple(b.shape), False) for name, b in self._buffers.items()])
        self.state_size = self.state_layout.size if self._buffers else 0
        self._gradient = torch.empty(0)
        self._views: list[Tensor] = []
        self.grad_in_place = True
        """Whether backward adds directly into the bound gradient; if not, `collect` copies each `.grad` into it."""
        self.accumulates = False  # whether backward adds to the bound gradient of the last step instead of to zeros

    def initial(self) -> Tensor:
        """Return a flat copy of the current parameters."""
        flat = torch.zeros(self.layout.size, device=next(iter(self._parameters.values())).device)
        views = self.layout.views(flat)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                views[name].copy_(parameter)
        return flat

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace some tensors of the module's state dict; call it before `bind`."""
        self.module.load_state_dict({**self.module.state_dict(), **tensors})
        self._counts = self._integer_buffers()

    def _integer_buffers(self) -> dict[str, Tensor]:
        return {name: b.clone() for name, b in self.module.named_buffers() if not b.is_floating_point()}

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        """Make parameters and buffers views into the given memory; copy the buffers' values into it."""
        views = self.layout.views(weights)
        for name, parameter in self._parameters.items():
            parameter.data = views[name]
        self._gradient, self._views = gradient, list(self.layout.views(gradient).values())
        if self._buffers:
            self._buffers = dict(self.module.named_buffers())  # new objects if the module was moved to a device
            for name, view in self.state_layout.views(state).items():
                buffer = self._buffers[name]
                view.copy_(buffer)
                buffer.data = view

    def clear(self) -> None:
        """Zero the bound gradient and point each `.grad` at its part, so that backward adds in place."""
        if not self.grad_in_place:
            for parameter in self._parameters.values():
                parameter.grad = None
            return
        if not self.accumulates:
            self._gradient.zero_()
        for parameter, view in zip(self._parameters.values(), self._views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def collect(self) -> None:
        """Copy gradients that backward wrote outside the bound memory into it.

        This happens after `zero_grad()`, which sets `.grad` to None, and for sparse embeddings.
        """
        for parameter, view in zip(self._parameters.values(), self._views, strict=True):
            gradient = parameter.grad
            if gradient is not view and gradient is not None:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def tensors(self, weights: Tensor, state: Tensor | None) -> dict[str, Tensor]:
        """Return the trained parameters and buffers by name, as views into `weights` and `state`."""
        named = self.layout.views(weights)
        if state is not None and self._buffers:
            named |= self.state_layout.views(state)
        return named

    def state_dict(self, weights: Tensor, state: Tensor | None) -> dict[str, Tensor]:
        """Return a state dict for plain `load_state_dict`: copies, with the trained tensors from flat memory.

        Integer buffers (how many batches a norm has seen) are those of the start: each worker counts its own.
        """
        flat, plain, sources = self.tensors(weights, state), self.module.state_dict(), self.sources()
        merged = {name: flat.get(sources.get(name, ""), self._counts.get(name, t)) for name, t in plain.items()}
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in merged.items()}

    def sources(self) -> dict[str, str]:
        """Map each name in the module's state dict to the name of its tensor in the layout, if it has one."""
        buffers = dict(self.module.named_buffers())  # new objects if the module was moved to a device
        laid_out = {**self._parameters, **{part.name: buffers[part.name] for part in self.state_layout.parameters}}
        first = {id(tensor): name for name, tensor in laid_out.items()}
        plain = self.module.state_dict(keep_vars=True)
        return {name: first[id(tensor)] for name, tensor in plain.items() if id(tensor) in first}

    def frozen(self) -> dict[str, Tensor]:
        """Return the state dict's tensors that have no place in the layout: frozen parameters, integer buffers."""
        laid_out = self.sources()
        return {name: t.detach() for name, t in self.module.state_dict().items() if name not in laid_out}

    def mixture(self, states: list[Tensor], samples: Sequence[int] | None = None) -> Tensor | None:
        """Combine the running statistics of workers, or return None if the module has none."""
        return mixture(self.state_layout, states, samples) if states and self._buffers else None


def mixture(layout: Layout, states: list[Tensor], samples: Sequence[int] | None = None) -> Tensor:
    """Combine statistics of workers, weighted by their samples (default: equally).

    Means are averaged; a variance is the mean of the variances plus the variance of the means.
    """
    if len(states) == 1:
        return states[0].clone()
    total, stacked = sum(samples or ()), torch.stack(states)
    shares = [count / total for count in samples] if samples and total else [1.0 / len(states)] * len(states)
    weights = torch.tensor(shares, dtype=stacked.dtype, device=stacked.device).unsqueeze(1)
    combined = (weights * stacked).sum(0)
    spread = layout.views((weights * (stacked - combined).square()).sum(0))
    for name, view in layout.views(combined).items():
        if name.endswith("running_var"):
            mean_name = name.removesuffix("running_var") + "running_mean"
            if mean_name in spread:
                view.add_(spread[mean_name])
    return combined


def sharing_parameters(module: nn.Module) -> nn.Module:
    """Copy a module for another thread: `functional_call` changes modules temporarily. Parameters are not copied.

    A deep copy of a buffer that is a view would copy all the memory it is a view of.
    """
    kept = {id(parameter): parameter for parameter in module.parameters()}
    return copy.deepcopy(module, kept | {id(buffer): buffer.clone() for buffer in module.buffers()})
