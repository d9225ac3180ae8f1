"""A script's model in memory that the server shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.buffers import BufferSizes
from paceline.core.own_loop.compression import LoopCompression, as_it_is
from paceline.errors import UserError
from paceline.interfaces import Layout
from paceline.runtimes.scripts.watching.recent_inputs import ForwardHook, RecentInputs
from paceline.runtimes.scripts.watching.weight_watch import WeightWatch
from paceline.tasks.flat import FlatModule
from paceline.transports.shared_memory import SharedBuffers


def copy_on_device(parameters: Sequence[Tensor], weights: Tensor, update: Tensor) -> tuple[Tensor, Tensor] | None:
    """Copy weights and update to the device of the parameters, for one transfer each; None if that does not fit."""
    device = parameters[0].device
    fits = all(parameter.device == device and parameter.dtype == torch.float32 for parameter in parameters)
    return (weights.to(device), update.to(device)) if fits and device.type != "cpu" else None


class BoundModel:
    """The models of a script bound to shared buffers: the server writes their weights and reads their gradients.

    Parameters that are float32 and on the CPU are views of these buffers; if all are float32 on one GPU, of one copy of
    the buffers there. Others are copied one by one after every reply: the server has float32 weights for them. If the
    script steps the weights itself (`steps_here`), all are copies, and the server reads their drift. With a push
    codec, gradients are collected in private memory, and the server reads what `compression` makes of them.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        parameters: Mapping[str, Tensor],
        loop_size: int,
        steps_here: bool = False,
        make_compression: Callable[[Layout], LoopCompression] = as_it_is,
    ) -> None:
        self._steps_here = steps_here
        container = models[0] if len(models) == 1 else nn.ModuleList(models)
        self.flat = flat = FlatModule(container, None, parameters)
        self.inputs = {model: RecentInputs(model) for model in models}
        self.on_forward: Callable[[Any], None] | None = None  # called with the inputs of a model that is trained
        hook = ForwardHook(self._forward)
        self._hooks = [model.register_forward_pre_hook(hook, with_kwargs=True) for model in models]
        self.compression = compression = make_compression(flat.layout)
        sizes = BufferSizes(flat.layout.size, flat.state_size, *compression.capacities, loop=loop_size)
        self.slot = slot = SharedBuffers.create(sizes)
        self._gradient = compression.bind(slot)
        slot.weights.copy_(flat.initial())
        self.parameters, self._buffers = list(parameters.values()), dict(container.named_buffers())
        self._device_copy = None if steps_here else copy_on_device(self.parameters, slot.weights, self._gradient)
        own_weights, own_update = self._device_copy or (slot.weights, self._gradient)
        weights, self._gradients = flat.layout.views(own_weights), list(flat.layout.views(own_update).values())
        self._copied: list[tuple[Tensor, Tensor]] = []  # parameters and their weights
        self._copied_buffers: list[tuple[Tensor, Tensor]] = []
        self._buffer_places: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        """Where each buffer is in its module, the tensor there, and its place in memory."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, weights.values(), strict=True):
                if steps_here:
                    self._copied.append((parameter, view))
                elif self._device_copy is not None:
                    parameter.data = view
                else:
                    self._bind(parameter, view, self._copied)
            for name, view in flat.state_layout.views(slot.state).items() if flat.state_size else ():
                view.copy_(self._buffers[name])
                self._bind(self._buffers[name], view, self._copied_buffers)
                owner = container.get_submodule(name.rpartition(".")[0])
                self._buffer_places.append((owner._buffers, name.rpartition(".")[2], self._buffers[name], view))
        self._names = list(parameters)
        self._known = {id(one): one for one in container.parameters()}  # kept, so that no id is given twice
        memory = own_weights if self._device_copy is not None or not self._copied else None
        self._watch = None if steps_here else WeightWatch(parameters, flat.layout, memory)
        self._compares_fully = False

    @staticmethod
    def _bind(tensor: Tensor, view: Tensor, copied: list[tuple[Tensor, Tensor]]) -> None:
        if tensor.dtype == torch.float32 and tensor.device.type == "cpu":
            tensor.data = view
        else:
            copied.append((tensor, view))

    @property
    def converted(self) -> list[str]:
        """Names of parameters of another type than float32, which the server trains as float32."""
        named = zip(self._names, self.parameters, strict=True)
        return [name for name, parameter in named if parameter.dtype != torch.float32]

    def collect(self, members: range | None = None, scale: float | None = None) -> list[float]:
        """Copy gradients and running statistics to where the server reads them. Return a flag for each gradient.

        `members` are the numbers of the parameters (default: all). Gradients are divided by `scale`.
        """
        numbers = members if members is not None else range(len(self.parameters))
        gradients = [self.parameters[number].grad for number in numbers]
        views = [self._gradients[number] for number in numbers]
        with torch.no_grad():
            dense = [one for one in gradients if one is not None and one.layout is torch.strided]
            if len(dense) < len(gradients):
                views, dense = self._collect_others(numbers, gradients)
            if dense:
                torch._foreach_copy_(views, dense)
                if scale is not None:
                    torch._foreach_div_(views, scale)
            if self._device_copy is not None:
                self._gradient.copy_(self._device_copy[1])
            self.send_state()
        return [float(gradient is not None) for gradient in gradients]

    def collect_drift(self) -> None:
        """Write how far the script has moved the weights since the last reply to where the server reads it.

        Weights of another type are compared with what they were rounded to.
        """
        with torch.no_grad():
            for (parameter, sent), view in zip(self._copied, self._gradients, strict=True):
                view.copy_(sent.to(parameter.device, parameter.dtype).sub_(parameter))
            self.send_state()

    def _collect_others(self, numbers: range, gradients: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """Write the gradients that are missing or sparse; return the places of the others, and these."""
        views, dense = [], []
        for number, gradient in zip(numbers, gradients, strict=True):
            view = self._gradients[number]
            if gradient is None:
                view.zero_()
            else:
                views.append(view)
                dense.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
        return views, dense

    def clear(self) -> None:
        """Remove the gradients, so that the next backward starts from zero."""
        for parameter in self.parameters:
            parameter.grad = None

    def zero_gradients(self) -> None:
        """Send zeros in place of the gradients of a step that was skipped."""
        self._gradient.zero_()

    def renew(self, fully: bool) -> None:
        """After a reply: compute on the weights that the server wrote, and watch them, all of them if `fully`."""
        self.load_weights()
        self._compares_fully = fully
        if self._watch is not None:
            self._watch.renew(fully)

    def require_unchanged(self) -> None:
        """Raise UserError if the script has changed weights that the server steps."""
        if self._watch is not None:
            self._watch.require_unchanged()

    def require_same_layers(self, at_once: bool = False) -> None:
        """Raise UserError if the model has got a parameter to train since `prepare`; looked for at some steps."""
        for name, one in self.flat.module.named_parameters() if self._compares_fully or at_once else ():
            if one.requires_grad and id(one) not in self._known:
                what = f"parameter {name} came into the model after session.prepare(...)"
                raise UserError(f"{what}, so it is not trained: give the whole model, and freeze what waits")

    def _forward(self, model: nn.Module, arguments: Any, named: Any) -> None:
        self.inputs[model].record(arguments, named)
        if self.on_forward is not None:
            self.on_forward([arguments, named])

    def release(self) -> None:
        """Leave the models as plain ones: training is over."""
        if self._watch is not None:
            self._watch.release()
        for hook in self._hooks:
            hook.remove()

    def load_weights(self) -> None:
        """Use the weights that the server wrote."""
        if self._device_copy is not None:
            self._device_copy[0].copy_(self.slot.weights)
        with torch.no_grad():
            for parameter, view in self._copied:
                parameter.detach().data.copy_(view)

    def send_state(self) -> None:
        """Copy the running statistics to where the server reads them."""
        self._bind_replaced()
        for buffer, view in self._copied_buffers:
            view.copy_(buffer)

    def load_state(self) -> None:
        """Use the running statistics that the server wrote."""
        self._bind_replaced(keeps_value=False)
        for buffer, view in self._copied_buffers:
            buffer.copy_(view)

    def _bind_replaced(self, keeps_value: bool = True) -> None:
        """Bind buffers that the script has replaced by new tensors instead of writing to them."""
        for number, (owner, name, known, view) in enumerate(self._buffer_places):
            found = owner.get(name)
            if found is known or found is None:
                continue
            self._copied_buffers = [(tensor, place) for tensor, place in self._copied_buffers if tensor is not known]
            if keeps_value:
                view.copy_(found)
            self._bind(found, view, self._copied_buffers)
            self._buffer_places[number] = (owner, name, found, view)

    def record_inputs(self, records: bool) -> None:
        """Keep the inputs of the batches from now on, or stop it."""
        for inputs in self.inputs.values():
            inputs.records = records

    def push_inputs(self) -> None:
        """Note that gradients are pushed, and stop to keep inputs."""
        for inputs in self.inputs.values():
            inputs.push()

    def estimate_statistics(self) -> bool:
        """Replace the running statistics by those of the current weights; False if no inputs are known."""
        return all([inputs.estimate() for inputs in self.inputs.values() if inputs.has_statistics])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Whatever happens inside: weights, buffers and modes are afterwards as they were."""
        model, weights = self.flat.module, self.slot.weights.clone()
        own = [parameter.detach().clone() for parameter, _ in self._copied] if self._steps_here else []
        with ExitStack() as after:
            for part in model.modules():
                after.callback(setattr, part, "training", part.training)
            for buffer in model.buffers():
                after.callback(buffer.data.copy_, buffer.clone())
            after.callback(self._restore_weights, weights, own)
            yield

    def _restore_weights(self, weights: Tensor, own: list[Tensor]) -> None:
        self.slot.weights.copy_(weights)
        self.renew(self._compares_fully)
        for (parameter, _), value in zip(self._copied, own, strict=False):
            parameter.detach().copy_(value)
