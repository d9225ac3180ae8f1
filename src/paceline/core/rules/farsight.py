"""Rule `farsight`: step along the newest gradient, and send weights of the time a push counts, foreseen from all."""

from __future__ import annotations

from torch import Tensor

from paceline.core.rules.foresight import Foresight
from paceline.core.rules.scalars import Scalar, add_scaled, scale
from paceline.interfaces import State


class Farsight(Foresight):
    """As `foresight`, but the memory of every worker only looks ahead; the step is along the gradient that came.

    v = gamma_u v + g;  weights -= lr_u v;  worker i is sent  weights - lr_u (K v + (m_i - K)/(1 - gamma_u) u)
    with u the mean of every worker's latest gradient, and gamma_u, lr_u, K and m_i as there. Old gradients are good
    enough to tell where the others will have gone, and too old to go along oneself. Paceline's own. No other optimizer
    can be inside. Touches 5 tensors: g, c_i, total, v, the weights.

    >>> import torch
    >>> from paceline.interfaces import Arrival
    >>> weights, rule = torch.zeros(1), Farsight(0.0, places=2)
    >>> state, sent = rule.start(weights), torch.zeros(1)
    >>> for worker in (0, 1):
    ...     rule.apply(weights, state, torch.ones(1), Arrival(worker, 1, torch.tensor(1.0), 2))
    >>> rule.weights_for(weights, state, 1, sent)
    >>> weights.item(), sent.item()
    (-2.0, -3.5)
    """

    name = "farsight"

    def accelerate(self, state: State, gradient: Tensor, decay: Scalar, share: Scalar, interval: Scalar) -> None:
        add_scaled(gradient, state["velocity"], decay, out=state["velocity"])


class FairFarsight(Farsight):
    """`farsight` with v = gamma_u v + (tau_i/n) g: every worker's data counts alike, however often it comes.

    tau_i, the updates from one arrival of worker i to its next, is n where all are equally fast. Where the slow ones
    hold labels of their own, it gives those their due; on even data it only makes the stalest gradients count most.

    >>> import torch
    >>> from paceline.interfaces import Arrival
    >>> weights, rule = torch.zeros(1), FairFarsight(0.0, places=2)
    >>> state = rule.start(weights)
    >>> rule.apply(weights, state, torch.ones(1), Arrival(0, 5, torch.tensor(1.0), 2))
    >>> round(weights.item(), 6)
    -1.2
    """

    name = "farsight-fair"

    def accelerate(self, state: State, gradient: Tensor, decay: Scalar, share: Scalar, interval: Scalar) -> None:
        scale(state["velocity"], decay)
        add_scaled(state["velocity"], gradient, interval * share)
