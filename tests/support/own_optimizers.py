"""Optimizers as users write them, which the server imports from here."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Counting(Optimizer):
    """Sign descent whose steps shrink; it counts in a python int, and keeps a text, a list, and later a tensor."""

    def __init__(self, params: Any, lr: float, anything: Any = 0.5) -> None:
        super().__init__(params, {"lr": lr, "anything": anything})
        self.slowest = 3  # an attribute of its own

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["share"] = 1.0 / min(self.slowest, state["count"])
                state["history"] = [*state.get("history", [])[-2:], state["count"]]
                state["kept"] = None if state["count"] < 3 else parameter.clone()
                state["phase"] = "late" if state["count"] > 3 else "early"
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * state["share"])
        return None


class CountingElsewhere(Optimizer):
    """Momentum whose steps depend on what it counts outside of the parameters' state: group, attributes, own key."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_sum": 0.0})
        self.total, self.recent = 0, [0.0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.total += 1
        self.recent.append(1.0 / self.total)
        del self.recent[:-2]
        kept: dict[Any, Any] = self.state
        kept["calls"] = kept.get("calls", 0) + 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["weight_sum"] += group["lr"]
            size = group["lr"] * sum(self.recent) / (group["step"] + kept["calls"] + group["weight_sum"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(momentum, alpha=size)
        return None


class Restless(Optimizer):
    """It changes its own learning rate."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 0.5


class Unsaveable(Optimizer):
    """Its state is an object that only it understands."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["seen"] = {id(parameter)}
                    parameter.sub_(parameter.grad, alpha=group["lr"])


class Failing(Optimizer):
    """It fails in its second step, at length."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        if self.steps > 1:
            raise ValueError("the first line\nand the second")


class Demanding(Optimizer):
    """It cannot step without a closure."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class Wrapping(torch.optim.SGD):
    """It has another optimizer inside."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)


class Described(Optimizer):
    """A setting of it is an object."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "how": object()})
