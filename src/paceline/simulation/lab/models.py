"""The models of the lab for G runs at once, each with its own weights and batch."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from paceline.simulation.lab.nets.layers import Pass, convolve, dropout, flat, linear, pool
from paceline.simulation.lab.nets.resnet20 import norm_names, resnet20

Logits = Callable[[dict[str, Tensor], Tensor, Pass], Tensor]
"""(parameters by name [G, ...], images [G, S, H, W, C], how) -> log-probabilities [G, S, classes]"""


def lenet5(p: dict[str, Tensor], images: Tensor, how: Pass) -> Tensor:
    x = pool(convolve(F.pad(images, (0, 0, 2, 2, 2, 2)), p["conv1.weight"], p["conv1.bias"]).relu())
    x = pool(convolve(x, p["conv2.weight"], p["conv2.bias"]).relu())
    x = linear(flat(x), p["fc1.weight"], p["fc1.bias"]).relu()
    x = linear(x, p["fc2.weight"], p["fc2.bias"]).relu()
    return F.log_softmax(linear(x, p["fc3.weight"], p["fc3.bias"]), dim=-1)


def cnn(p: dict[str, Tensor], images: Tensor, how: Pass) -> Tensor:
    x = convolve(images, p["conv1.weight"], p["conv1.bias"]).relu()
    x = flat(pool(convolve(x, p["conv2.weight"], p["conv2.bias"])))
    if how.keys is not None:
        x = dropout(x, how.keys[0], 0.25)
    x = linear(x, p["fc1.weight"], p["fc1.bias"]).relu()
    if how.keys is not None:
        x = dropout(x, how.keys[1], 0.5)
    return F.log_softmax(linear(x, p["fc2.weight"], p["fc2.bias"]), dim=-1)


BATCHED: dict[str, Logits] = {"lenet5": lenet5, "cnn": cnn, "resnet20": resnet20}
DROPOUT_LAYERS: dict[str, tuple[int, ...]] = {"lenet5": (), "cnn": (1, 2), "resnet20": ()}
AUGMENTED = ("resnet20",)  # models whose images the lab can augment
NORM_NAMES = {"resnet20": norm_names()}  # the batch norms of each model, in the order of a forward pass
