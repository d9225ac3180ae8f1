"""Gradients of LeNet5 and the CNN for many runs at once, in a few Triton kernels per step (GPU)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from paceline.interfaces import Layout
from paceline.simulation.lab.inputs import BatchInputs, Gradients
from paceline.simulation.lab.kernels import convolution, dense

PROGRAMS = 528  # triton programs that fill a large GPU: four for each of 132 multiprocessors


def _tile_size(number: int, least: int = 16) -> int:
    """Return the next power of two, the size of a kernel's tile."""
    return max(least, 1 << (number - 1).bit_length())


def _blocks(number: int, size: int) -> int:
    return -(-number // size)


class Tile(NamedTuple):
    """Tile of a product per Triton program, with its warps and pipeline stages."""

    positions: int
    depth: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Shape:
    """Shape of one convolution over padded inputs, and its tiles for the three kernels."""

    height: int
    width: int
    channels: int
    outputs: int
    size: int
    pooled: bool = True
    relu: bool = True
    dropped: float = 0.0
    flat: bool = False
    forward: Tile = Tile(64, 32)
    to_weights: Tile = Tile(64, 32)
    to_inputs: Tile = Tile(128, 32)

    @property
    def step(self) -> int:
        return 2 if self.pooled else 1

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the output."""
        return (self.height - self.size + 1) // self.step, (self.width - self.size + 1) // self.step

    @property
    def positions(self) -> int:
        return self.out[0] * self.out[1]

    @property
    def patch(self) -> int:
        return self.size * self.size * self.channels

    @property
    def raised(self) -> float:
        return 1.0 / (1.0 - self.dropped)

    def constants(self) -> dict[str, Any]:
        """Return the compile-time constants of all three kernels."""
        return dict(H=self.height, W=self.width, C=self.channels, O=self.outputs, SIZE=self.size, STEP=self.step)


class Convolution:
    """One convolution layer: its buffers, forward and backward pass."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        inputs: BatchInputs,
        layout: Layout,
        gradient: Tensor,
        below: Convolution | Tensor,
        keys: tuple[Tensor, Tensor] | None = None,
        precision: str = "tf32",
    ) -> None:
        self.shape, self.inputs, self.below, self.gradient = shape, inputs, below, gradient
        at = {p.name: p.offset for p in layout.parameters}
        self.weight, self.bias, self.row = at[f"{name}.weight"], at[f"{name}.bias"], layout.size
        _, self.runs, self.samples = inputs.samples.shape
        device, each = gradient.device, self.runs * self.samples
        self.values = _with_spare_memory((each, *shape.out, shape.outputs), device)
        self.winner = torch.empty(each * shape.positions * shape.outputs, dtype=torch.int8, device=device)
        self.margin = 0 if isinstance(below, Tensor) else shape.size - 1
        sides = (side * shape.step + 2 * self.margin for side in shape.out)
        self.flow = _with_spare_memory((each, *sides, shape.outputs), device)
        self.spread = torch.empty(self.runs, shape.patch, shape.outputs, device=device)
        self.turned = torch.empty_like(self.spread)
        self.everyone = torch.arange(self.runs, device=device)
        self.low, self.high = keys if keys is not None else (self.everyone, self.everyone)
        self.precision = precision
        self.places = self.samples * shape.positions * shape.step**2
        most = _blocks(self.places, 4 * shape.to_weights.positions)
        k_blocks = _blocks(shape.patch + 1, shape.to_weights[1])
        self.splits = max(1, min(most, PROGRAMS // (self.runs * k_blocks)))
        self.partial = torch.empty(self.runs, self.splits, shape.patch + 1, shape.outputs, device=device)

    @property
    def _source(self) -> tuple[Tensor, Tensor]:
        """The input tensor, and the sample indices for the first layer."""
        return self.below if isinstance(self.below, Tensor) else self.below.values, self.inputs.samples

    @property
    def _owner_step(self) -> int:
        return 0 if len(self.inputs.owner) == 1 else self.runs

    def forward(self) -> None:
        inputs, shape = self.inputs, self.shape
        number = shape.patch * shape.outputs
        if shape.channels > 1:
            convolution.spread_weights[(_blocks(number, 1024), self.runs)](
                inputs.held, inputs.owner, self.spread, self.turned, inputs.at, self._owner_step, self.row, self.weight,
                C=shape.channels, O=shape.outputs, TAPS=shape.size**2, BLOCK=1024,
            )  # fmt: skip
            weights, owner, strides, step = self.spread, self.everyone, (number, shape.outputs, 1), 0
        else:
            weights, owner = inputs.held[:, self.weight :], inputs.owner
            strides, step = (self.row, 1, shape.patch), self._owner_step
        positions, depth, warps, stages = shape.forward
        grid = (_blocks(self.samples * shape.positions, positions), self.runs)
        convolution.forward[grid](
            *self._source, weights, owner, inputs.held[:, self.bias :], inputs.owner, self.values, self.winner,
            self.low, self.high, inputs.at, self.runs, self.samples, inputs.batch, step, self._owner_step,
            *strides, self.row,
            **shape.constants(), RELU=shape.relu, FIRST=isinstance(self.below, Tensor), DROPPED=shape.dropped > 0.0,
            THRESHOLD=threshold(shape.dropped), RAISED=shape.raised, FLAT=shape.flat,
            BP=positions, BN=_tile_size(shape.outputs), BK=depth, PRECISION=self.precision,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def backward(self) -> None:
        """Compute the weight gradient from `flow`, the output gradient, and then the flow of the layer below."""
        inputs, shape = self.inputs, self.shape
        positions, depth, warps, stages = shape.to_weights
        chunk = _blocks(_blocks(self.places, self.splits), positions) * positions
        convolution.weight_gradient[(_blocks(shape.patch + 1, depth), self.splits, self.runs)](
            *self._source, self.flow, self.partial, inputs.at, self.runs, self.samples, chunk, self.splits,
            **shape.constants(), FIRST=isinstance(self.below, Tensor), MARGIN=self.margin,
            BP=positions, BN=_tile_size(shape.outputs), BK=depth, PRECISION=self.precision,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        convolution.gather_gradient[(_blocks((shape.patch + 1) * shape.outputs, 256), self.runs)](
            self.partial, self.gradient, self.splits, self.row, self.weight, self.bias,
            C=shape.channels, O=shape.outputs, TAPS=shape.size**2, BLOCK=256,
        )  # fmt: skip
        if isinstance(self.below, Tensor):
            return
        positions, depth, warps, stages = shape.to_inputs
        convolution.input_gradient[(_blocks(self.samples * shape.height * shape.width, positions), self.runs)](
            self.flow, self.turned, self.below.flow, self.below.winner, self.samples,
            **shape.constants(), BELOW_STEP=self.below.shape.step, BELOW_RAISED=self.below.shape.raised,
            BM=positions, BN=_tile_size(shape.channels), BK=depth, PRECISION=self.precision, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip


def _with_spare_memory(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return zeros with spare memory behind them, for a tile that reads past the last patch."""
    number, behind = math.prod(shape), 8 * shape[-1] * shape[-2] + 1024
    return torch.zeros(number + behind, device=device)[:number].view(shape)


def threshold(probability: float) -> int:
    """Return the smallest int32 that `models.dropout.keep_mask` keeps."""
    return -(1 << 31) + round(probability * (1 << 32))


class _Fused:
    """Shared by both models: two convolutions, and per-block gradients that are summed at the end."""

    first: Convolution
    second: Convolution

    def __init__(self, inputs: BatchInputs, layout: Layout, gradient: Tensor, losses: Tensor, first: str) -> None:
        self.inputs, self.gradient, self.losses = inputs, gradient, losses
        _, self.runs, self.samples = inputs.samples.shape
        self.at = {p.name: p.offset for p in layout.parameters}
        self.row, self.start = layout.size, self.at[first]
        self.block = min(_tile_size(self.samples), 32)
        self.blocks = _blocks(self.samples, self.block)
        self.block_losses = torch.zeros(self.runs, self.blocks, device=gradient.device)
        width = layout.size - self.start
        self.parts = gradient[:, None] if self.blocks == 1 else gradient.new_zeros(self.runs, self.blocks, width)
        self.owner_step = 0 if len(inputs.owner) == 1 else self.runs
        self.place = (self.row, 0, 0) if self.blocks == 1 else (self.blocks * width, width, self.start)

    def __call__(self) -> None:
        self.first.forward()
        self.second.forward()
        self.linear_layers()
        self.second.backward()
        self.first.backward()
        if self.blocks > 1:
            torch.sum(self.parts, 1, out=self.gradient[:, self.start :])
        torch.sum(self.block_losses, 1, out=self.losses)

    def linear_layers(self) -> None:
        """Compute the loss, the gradients of the linear layers and the second convolution's flow."""
        raise NotImplementedError


class FusedLeNet5(_Fused):
    HEAD: ClassVar = {"BJ": 64, "num_warps": 8, "num_stages": 3}

    def __init__(
        self, inputs: BatchInputs, layout: Layout, gradient: Tensor, losses: Tensor, precision: str = "tf32"
    ) -> None:
        super().__init__(inputs, layout, gradient, losses, "fc1.weight")
        self.precision = precision
        images = inputs.data.padded(2)
        _, height, width, channels = images.shape
        first = Shape(height, width, channels, 6, 5, forward=Tile(64, 32, 2, 2), to_weights=Tile(128, 32, 4, 1))
        self.first = Convolution("conv1", first, inputs, layout, gradient, images, precision=precision)
        height, width = (height - 4) // 2, (width - 4) // 2
        second = Shape(
            height, width, 6, 16, 5, flat=True,
            forward=Tile(32, 32, 2, 2), to_weights=Tile(64, 64, 4, 1), to_inputs=Tile(64, 32, 2),
        )  # fmt: skip
        self.second = Convolution("conv2", second, inputs, layout, gradient, self.first, precision=precision)

    def linear_layers(self) -> None:
        inputs, data, second = self.inputs, self.inputs.data, self.second
        places = [self.at[f"{layer}.{kind}"] for layer in ("fc1", "fc2", "fc3") for kind in ("weight", "bias")]
        row, block, shift = self.place
        dense.lenet_head[(self.blocks, self.runs)](
            second.values, second.flow, second.winner, data.labels, inputs.samples, inputs.weights,
            inputs.held, inputs.owner, self.parts, self.block_losses, inputs.at,
            self.runs, self.samples, self.row, self.owner_step, row, block, *places, shift,
            PH=second.shape.out[0], PW=second.shape.out[1], CHANNELS=16, MARGIN=second.margin, N1=120, N2=84, N3=10,
            BS=self.block, P1=128, P2=128, P3=16, PRECISION=self.precision, **self.HEAD,
        )  # fmt: skip


class FusedCnn(_Fused):
    PROJECT: ClassVar = {"BJ": 128, "num_warps": 4, "num_stages": 3}
    BACK: ClassVar = {"BC": 8, "BQ": 16, "num_warps": 4, "num_stages": 1}

    def __init__(
        self, inputs: BatchInputs, layout: Layout, gradient: Tensor, losses: Tensor, precision: str = "tf32"
    ) -> None:
        super().__init__(inputs, layout, gradient, losses, "fc1.bias")
        self.precision = precision
        images = inputs.data.padded(0)
        _, height, width, channels = images.shape
        first = Shape(
            height, width, channels, 32, 3, pooled=False, forward=Tile(128, 16), to_weights=Tile(256, 16, 4, 2)
        )
        self.first = Convolution("conv1", first, inputs, layout, gradient, images, precision=precision)
        second = Shape(
            height - 2, width - 2, 32, 64, 3, relu=False, dropped=0.25, flat=True,
            forward=Tile(32, 64, 2, 2), to_weights=Tile(32, 64, 2), to_inputs=Tile(128, 32, 2),
        )  # fmt: skip
        self.second = Convolution("conv2", second, inputs, layout, gradient, self.first, inputs.keys[0], precision)
        self.width = second.positions * second.outputs
        self.tiles = 8 if self.runs * self.blocks >= 12 else 2
        self.splits = _blocks(self.width, self.PROJECT["BJ"] * self.tiles)
        self.partial = gradient.new_empty(self.runs, self.splits, self.samples, 128)
        self.flow = gradient.new_empty(self.runs, self.samples, 128)

    def linear_layers(self) -> None:
        self._project()
        self._head()
        self._project_back()

    def _project(self) -> None:
        inputs, second, weight = self.inputs, self.second, self.at["fc1.weight"]
        dense.project[(self.splits, self.blocks, self.runs)](
            second.values, inputs.held, inputs.owner, self.partial, inputs.at, self.samples, self.owner_step,
            self.tiles, self.row, weight,
            J=self.width, N=128, BS=self.block, BN=128, PRECISION=self.precision, **self.PROJECT,
        )  # fmt: skip

    def _head(self) -> None:
        inputs, data = self.inputs, self.inputs.data
        row, block, shift = self.place
        dense.cnn_head[(self.blocks, self.runs)](
            self.partial, self.flow, data.labels, inputs.samples, inputs.weights, inputs.held, inputs.owner, self.parts,
            self.block_losses, *inputs.keys[1], inputs.at, self.runs, self.samples, inputs.batch, self.splits,
            self.row, self.owner_step, row, block, self.at["fc1.bias"], self.at["fc2.weight"], self.at["fc2.bias"],
            shift,
            N1=128, N2=10, BS=self.block, P1=128, P2=16, THRESHOLD=threshold(0.5), RAISED=2.0,
            PRECISION=self.precision, num_warps=4,
        )  # fmt: skip

    def _project_back(self) -> None:
        inputs, second, weight = self.inputs, self.second, self.at["fc1.weight"]
        positions, channels = second.shape.positions, second.shape.outputs
        squares = _blocks(positions, self.BACK["BQ"]) * _blocks(channels, self.BACK["BC"])
        dense.project_back[(squares, self.runs)](
            second.values, self.flow, second.flow, second.winner, inputs.held, inputs.owner, self.gradient, inputs.at,
            self.samples, self.owner_step, self.row, self.row, weight,
            PH=second.shape.out[0], PW=second.shape.out[1], CHANNELS=channels, MARGIN=second.margin,
            RAISED=second.shape.raised, N=128, BS=self.block, BN=128,
            PRECISION=self.precision, **self.BACK,
        )  # fmt: skip


FUSED: dict[str, Callable[[BatchInputs, Layout, Tensor, Tensor], Gradients]] = {"lenet5": FusedLeNet5, "cnn": FusedCnn}
