"""A torch module seen as flat vectors: weights, gradient and running statistics, each one block of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.interfaces import Layout, pack


class FlatModule:
    """Binds a module's parameters and buffers to memory that others can read and write as one vector.

    Only parameters that require a gradient (and `trained`, where that is given) are laid out; frozen ones stay with
    the module. A parameter with several names (tied weights) is laid out once, under the first.
    """

    def __init__(
        self,
        module: nn.Module,
        decay: Callable[[str, nn.Parameter], bool] | None = None,
        trained: Callable[[nn.Parameter], bool] | None = None,
    ) -> None:
        self.module = module.float()
        wanted = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._parameters = {name: p for name, p in wanted.items() if trained is None or trained(p)}
        if not self._parameters:
            raise UserError("the model has no parameter that requires a gradient: there is nothing to train")
        self._buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        self.layout: Layout = pack(
            [(name, tuple(p.shape), decay is None or decay(name, p)) for name, p in self._parameters.items()]
        )
        self.state_layout: Layout = pack([(name, tuple(b.shape), False) for name, b in self._buffers.items()])
        self.state_size = self.state_layout.size if self._buffers else 0
        self._gradient = torch.empty(0)
        self._views: list[Tensor] = []
        self.hooks = True
        """Whether backward is to add into the bound gradient; if not, `collect` copies from wherever it added."""
        self.keeps = False
        """Whether it adds to what the last step left there."""

    def initial(self) -> Tensor:
        """A flat copy of the parameters as they are now."""
        first = next(iter(self._parameters.values()))
        flat = torch.zeros(self.layout.size, device=first.device)
        views = self.layout.views(flat)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                views[name].copy_(parameter)
        return flat

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        """Make parameters and buffers views into the given memory; the buffers' values move along."""
        views = self.layout.views(weights)
        for name, parameter in self._parameters.items():
            parameter.data = views[name]
        self._gradient, self._views = gradient, list(self.layout.views(gradient).values())
        if self._buffers:
            self._buffers = dict(self.module.named_buffers())  # new ones, where the module was moved to a device
            for name, view in self.state_layout.views(state).items():
                buffer = self._buffers[name]
                view.copy_(buffer)
                buffer.data = view

    def clear(self) -> None:
        """Zero the bound gradient and hook every parameter to its part of it, so that backward adds in place."""
        if not self.hooks:
            for parameter in self._parameters.values():
                parameter.grad = None
            return
        if not self.keeps:
            self._gradient.zero_()
        for parameter, view in zip(self._parameters.values(), self._views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def collect(self) -> None:
        """After backward: bring in the gradients that somebody unhooked from the bound memory meanwhile.

        `zero_grad()` does that (it sets them to None), and so do sparse embeddings.
        """
        for parameter, view in zip(self._parameters.values(), self._views, strict=True):
            gradient = parameter.grad
            if gradient is not view and gradient is not None:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def tensors(self, weights: Tensor, state: Tensor | None) -> dict[str, Tensor]:
        """Trained parameters and buffers by name, as views into `weights` and `state`."""
        named = self.layout.views(weights)
        if state is not None and self._buffers:
            named |= self.state_layout.views(state)
        return named

    def state_dict(self, weights: Tensor, state: Tensor | None) -> dict[str, Tensor]:
        """What plain `load_state_dict` takes: a copy of every named tensor, the trained ones from flat memory."""
        flat, plain, sources = self.tensors(weights, state), self.module.state_dict(), self.sources()
        merged = {name: flat.get(sources.get(name, ""), tensor) for name, tensor in plain.items()}
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in merged.items()}

    def sources(self) -> dict[str, str]:
        """For each name in the module's state dict, the name under which its tensor is laid out, if it is."""
        buffers = dict(self.module.named_buffers())  # new ones, where the module was moved to a device
        laid_out = {**self._parameters, **{part.name: buffers[part.name] for part in self.state_layout.parameters}}
        first = {id(tensor): name for name, tensor in laid_out.items()}
        plain = self.module.state_dict(keep_vars=True)
        return {name: first[id(tensor)] for name, tensor in plain.items() if id(tensor) in first}

    def kept(self) -> dict[str, Tensor]:
        """What the module's state dict has beside: frozen parameters, whole numbers."""
        laid_out = self.sources()
        return {name: t.detach() for name, t in self.module.state_dict().items() if name not in laid_out}

    def mixture(self, states: list[Tensor]) -> Tensor | None:
        """One set of running statistics for all workers, or None when the module keeps none."""
        return mixture(self.state_layout, states) if states and self._buffers else None


def mixture(layout: Layout, states: list[Tensor]) -> Tensor:
    """The statistics of all workers' data together: mean of means; mean of variances plus the spread of the means."""
    stacked = torch.stack(states)
    combined = stacked.mean(0)
    spread = layout.views(stacked.var(0, correction=0))
    for name, view in layout.views(combined).items():
        if name.endswith("running_var"):
            mean_name = name.removesuffix("running_var") + "running_mean"
            if mean_name in spread:
                view.add_(spread[mean_name])
    return combined
