"""Gradients of ResNet-20 for many runs at once, in a few Triton kernels per layer (GPU); see kernels/residual.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.interfaces import Layout
from paceline.settings.preprocessing import PADDING
from paceline.simulation.lab.inputs import BatchInputs
from paceline.simulation.lab.kernels import residual
from paceline.simulation.lab.nets.layers import EPSILON
from paceline.simulation.lab.nets.resnet20 import block_shapes

PROGRAMS = 1056  # programs that fill a large GPU: eight for each of 132 multiprocessors
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of stored activations, by precision; the others are precisions of products of float32."""
STEM_CHANNELS = 16  # colours, filled up with zeros to what a matrix product takes
TAPS = 9
ELEMENTWISE = 4096  # values of one program
SUMMED = 8192  # sums that one program adds at once


class BlockTile(NamedTuple):
    """Positions of one program, its warps and its pipeline stages."""

    positions: int
    warps: int = 4
    stages: int = 3


FORWARD = {16: BlockTile(256, 8), 32: BlockTile(128), 64: BlockTile(128)}
"""Tiles of a convolution by its outputs."""
TO_INPUTS = {16: BlockTile(256, 8), 32: BlockTile(128), 64: BlockTile(128)}
"""Tiles of the gradient of its inputs, by these."""
TO_WEIGHTS = {16: BlockTile(128), 32: BlockTile(128), 64: BlockTile(64)}
WEIGHT_ROWS = 64


@dataclass(eq=False)
class NormedConvolution:
    """One convolution and its norm: its shape, its places in flat vectors, its outputs before and after the norm."""

    name: str
    height: int  # of its inputs
    width: int
    inputs: int
    outputs: int
    stride: int
    below: Tensor  # its inputs
    offset: int  # of its weights among those of all layers, ordered [taps, inputs, outputs]
    statistics: int  # of its norm's four rows
    weight: int  # places in the flat weights
    gamma: int
    beta: int
    channels: int  # inputs without filling
    shortcut: int = 0  # the stride of the shortcut that ends here, 0 for none
    y: Tensor = field(init=False)
    a: Tensor = field(init=False)

    @property
    def out(self) -> tuple[int, int]:
        return (self.height - 1) // self.stride + 1, (self.width - 1) // self.stride + 1

    @property
    def positions(self) -> int:
        return math.prod(self.out)

    @property
    def size(self) -> int:
        return TAPS * self.inputs * self.outputs

    def constants(self) -> dict[str, Any]:
        return dict(H=self.height, W=self.width, C=self.inputs, O=self.outputs, STRIDE=self.stride)


class FusedResNet20:
    """Computes the gradients and losses of R runs; each push is a group with batch statistics of its own."""

    def __init__(
        self, inputs: BatchInputs, layout: Layout, gradient: Tensor, losses: Tensor, precision: str = "bf16"
    ) -> None:
        self.inputs, self.gradient, self.losses = inputs, gradient, losses
        self.dtype = HALF.get(precision, torch.float32)
        self.precision = "tf32" if precision in HALF else precision
        _, self.runs, samples = inputs.samples.shape
        self.batch = inputs.batch
        self.pushes, self.groups = samples // self.batch, self.runs * (samples // self.batch)
        self.device, self.places = gradient.device, {p.name: p.offset for p in layout.parameters}
        self.size, self.row = layout.size, layout.size + 16
        self.now = torch.zeros(self.runs, self.row, device=self.device)
        self.counts = (inputs.weights.view(-1, self.runs, self.pushes, self.batch) > 0).sum(-1, dtype=torch.int32)
        _, height, width, self.colours = inputs.data.images.shape
        self.images = self._values(height, width, STEM_CHANNELS)
        self.layers = list(self._make_layers(height, width))
        self._place_gradients(layout)
        self._make_buffers()

    def _values(self, *shape: int) -> Tensor:
        return torch.empty(self.groups, self.batch, *shape, device=self.device, dtype=self.dtype)

    def _make_layers(self, height: int, width: int) -> Iterator[NormedConvolution]:
        rows = [("stem", STEM_CHANNELS, 16, 1, 0)]
        for block in block_shapes():
            rows.append((f"{block.name}.conv1", block.inputs, block.width, block.stride, 0))
            rows.append((f"{block.name}.conv2", block.width, block.width, 1, block.stride))
        below, offset, statistics = self.images, 0, 0
        for name, channels, outputs, stride, shortcut in rows:
            at = self.places
            places = at[f"{name}.conv.weight"], at[f"{name}.norm.weight"], at[f"{name}.norm.bias"]
            real = self.colours if name == "stem" else channels
            layer = NormedConvolution(
                name, height, width, channels, outputs, stride, below, offset, statistics, *places, real, shortcut
            )
            height, width = layer.out
            layer.y, layer.a = self._values(height, width, outputs), self._values(height, width, outputs)
            below, offset, statistics = layer.a, offset + layer.size, statistics + 4 * outputs
            yield layer

    def _place_gradients(self, layout: Layout) -> None:
        """Index the weights in the kernels' order, and the gradient's values in `found`; what is missing is zero."""
        last = self.layers[-1]
        self.num_spread, self.stat_row = last.offset + last.size, last.statistics + 4 * last.outputs
        parts = {p.name: p for p in layout.parameters}
        self.head = parts["fc.weight"], parts["fc.bias"]
        self.width = self.num_spread + self.stat_row + self.head[0].size + self.head[1].size + 1
        spread = torch.full((self.num_spread,), self.size, dtype=torch.int64)
        back = torch.full((self.size,), self.width - 1, dtype=torch.int64)
        for one in self.layers:
            order = (
                torch.arange(one.outputs * one.channels * TAPS).view(one.outputs, one.channels, TAPS).permute(2, 1, 0)
            )
            order = order + one.weight  # [taps, channels, outputs]
            ours = torch.arange(one.offset, one.offset + one.size).view(TAPS, one.inputs, one.outputs)
            ours = ours[:, : one.channels]
            spread[ours.flatten()] = order.flatten()
            back[order.flatten()] = ours.flatten()
            each = torch.arange(one.outputs) + self.num_spread + one.statistics
            back[one.gamma : one.gamma + one.outputs] = each
            back[one.beta : one.beta + one.outputs] = each + one.outputs
        place = self.num_spread + self.stat_row
        for part in self.head:
            back[part.offset : part.offset + part.size] = torch.arange(place, place + part.size)
            place += part.size
        self.spread_index, self.back_index = spread.to(self.device), back.to(self.device)

    def _make_buffers(self) -> None:
        def floats(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=self.device)

        largest = max(one.a[0, 0].numel() for one in self.layers)
        self.flows = [self._values(largest) for _ in range(3)]
        self.dy = self._values(largest)
        self.found = floats(self.runs, self.width)
        self.norms = floats(self.groups, self.stat_row)
        self.statistics = floats(self.groups, self.stat_row)
        self.factors = floats(self.groups, 3 * max(one.outputs for one in self.layers))
        self.spread = torch.empty(self.runs, self.num_spread, device=self.device, dtype=self.dtype)
        blocks = [self._blocks(one.positions, FORWARD[one.outputs].positions) * one.outputs for one in self.layers]
        back = [self._back_blocks(one) * one.inputs for one in self.layers]
        self.sums = floats(self.groups, 2 * max(*blocks, *back))
        self.splits = {one.name: self._splits(one) for one in self.layers}
        self.partial = floats(self.groups * max(self.splits[one.name] * one.size for one in self.layers))

    def _blocks(self, positions: int, tile: int) -> int:
        return -(-self.batch * positions // tile)

    def _back_blocks(self, one: NormedConvolution) -> int:
        return self._blocks(one.height * one.width, TO_INPUTS[one.inputs].positions)

    def _splits(self, one: NormedConvolution) -> int:
        rows = -(-TAPS * one.inputs // WEIGHT_ROWS)
        most = max(1, self.batch * one.positions // (4 * TO_WEIGHTS[one.outputs].positions))
        return max(1, min(most, PROGRAMS // (rows * self.groups)))

    @property
    def _group_sizes(self) -> tuple[Tensor, Tensor]:
        return self.counts, self.inputs.at

    def __call__(self) -> None:
        owners = self.inputs.owners_now
        self.now[:, : self.size].copy_(self.inputs.held.index_select(0, owners))
        self.spread.copy_(self.now.index_select(1, self.spread_index))
        self._prepare()
        for number, layer in enumerate(self.layers):
            self._forward(layer, self.layers[number - 2].a if layer.shortcut else layer.below)
        self._backward(self._head())
        torch.sum(
            self.norms.view(self.runs, self.pushes, -1), 1, out=self.found[:, self.num_spread :][:, : self.stat_row]
        )
        self.gradient.copy_(self.found.index_select(1, self.back_index))

    def _prepare(self) -> None:
        inputs, data = self.inputs, self.inputs.data
        _, height, width, colours = data.images.shape
        choices, ways = inputs.choices, inputs.ways
        low, high = choices if choices is not None else (self.counts, self.counts)
        residual.prepare[(self._blocks(height * width, 256), self.groups)](
            data.images, inputs.samples, low, high, data.scale, data.shift, self.images, inputs.at,
            self.runs, self.batch, self.pushes,
            H=height, W=width, C=colours, O=STEM_CHANNELS, PADDING=PADDING, CROP="crop" in ways,
            MIRROR="mirror" in ways, BP=256,
        )  # fmt: skip

    def _forward(self, one: NormedConvolution, shortcut: Tensor) -> None:
        at_row, tile = self.groups, FORWARD[one.outputs]
        blocks = self._blocks(one.positions, tile.positions)
        residual.convolve[(blocks, self.groups)](
            one.below, self.spread, one.y, self.sums, *self._group_sizes, self.batch, self.pushes, at_row,
            self.num_spread, one.offset, blocks,
            **one.constants(), BP=tile.positions, PRECISION=self.precision, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        residual.batch_statistics[(1, self.groups)](
            self.sums, self.now[:, one.gamma :], self.now[:, one.beta :], self.statistics, *self._group_sizes,
            self.pushes, at_row, self.row, self.stat_row, one.statistics, blocks,
            O=one.outputs, POSITIONS=one.positions, EPSILON=EPSILON, BB=SUMMED // one.outputs, num_warps=8,
        )  # fmt: skip
        height, width = one.out
        positions = ELEMENTWISE // one.outputs
        residual.normalise[(self._blocks(one.positions, positions), self.groups)](
            one.y, self.statistics, shortcut, one.a, self.batch, self.stat_row, one.statistics,
            H=height, W=width, O=one.outputs, SHORTCUT=one.shortcut, BP=positions,
        )  # fmt: skip

    def _head(self) -> Tensor:
        """Compute the loss, the gradient of the linear layer, and that of the mean over each image."""
        inputs, last = self.inputs, self.layers[-1]
        place, (weight, bias) = self.num_spread + self.stat_row, self.head
        matrix = self.now[:, weight.offset : weight.offset + weight.size].view(self.runs, *weight.shape)
        pooled = last.a.view(self.runs, self.pushes * self.batch, last.positions, -1).mean(2, dtype=torch.float32)
        shift = self.now[:, None, bias.offset : bias.offset + bias.size]
        found = F.log_softmax(torch.baddbmm(shift, pooled, matrix.transpose(1, 2)), dim=-1)
        labels = inputs.data.labels[inputs.samples.index_select(0, inputs.at)[0]][..., None]
        weights = inputs.weights.index_select(0, inputs.at)[0][..., None]
        torch.sum(-found.gather(-1, labels) * weights, (1, 2), out=self.losses)
        flow = (found.exp() * weights).scatter_add_(-1, labels, -weights)
        self.found[:, place : place + weight.size].copy_(torch.bmm(flow.transpose(1, 2), pooled).flatten(1))
        self.found[:, place + weight.size : -1].copy_(flow.sum(1))
        return torch.bmm(flow, matrix).contiguous()

    def _backward(self, flow: Tensor) -> None:
        last = self.layers[-1]
        above, inner, below = self.flows
        positions = ELEMENTWISE // last.outputs
        blocks = self._blocks(last.positions, positions)
        residual.begin_backward[(blocks, self.groups)](
            flow, last.a, last.y, above, self.sums, self.batch, blocks,
            POSITIONS=last.positions, O=last.outputs, BP=positions,
        )  # fmt: skip
        for number in range(len(self.layers) - 1, 0, -2):
            second, first = self.layers[number], self.layers[number - 1]
            blocks = self._through(second, above, blocks, first, inner, None, 0)
            blocks = self._through(first, inner, blocks, self.layers[number - 2], below, above, second.shortcut)
            above, inner, below = below, above, inner
        self._norm_and_weights(self.layers[0], above, blocks)

    def _norm_and_weights(self, one: NormedConvolution, flow: Tensor, blocks: int) -> None:
        """Compute the gradients of a layer's norm and weights from `flow`, summed in `blocks` blocks."""
        at_row, positions = self.groups, ELEMENTWISE // one.outputs
        residual.norm_gradient[(1, self.groups)](
            self.sums, self.now[:, one.gamma :], self.statistics, self.factors, self.norms, *self._group_sizes,
            self.pushes, at_row, self.row, self.stat_row, one.statistics, blocks,
            O=one.outputs, POSITIONS=one.positions, BB=SUMMED // one.outputs, num_warps=8,
        )  # fmt: skip
        residual.through_norm[(self._blocks(one.positions, positions), self.groups)](
            flow, one.y, self.factors, self.dy, *self._group_sizes, self.batch, at_row,
            POSITIONS=one.positions, O=one.outputs, BP=positions,
        )  # fmt: skip
        tile, splits = TO_WEIGHTS[one.outputs], self.splits[one.name]
        chunk = -(-self.batch * one.positions // (splits * tile.positions)) * tile.positions
        rows = -(-TAPS * one.inputs // WEIGHT_ROWS)
        residual.weight_gradient[(rows * splits, self.groups)](
            one.below, self.dy, self.partial, self.batch, chunk, splits,
            **one.constants(), BP=tile.positions, BK=WEIGHT_ROWS, PRECISION=self.precision, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        residual.gather_weights[(-(-one.size // 256), self.runs)](
            self.partial, self.found, splits * self.pushes, self.width, one.offset, SIZE=one.size, BLOCK=256
        )

    def _through(
        self,
        one: NormedConvolution,
        flow: Tensor,
        blocks: int,
        below: NormedConvolution,
        out: Tensor,
        shortcut: Tensor | None,
        stride: int,
    ) -> int:
        """Carry `flow` to the outputs of the layer below, and return in how many blocks it is summed."""
        self._norm_and_weights(one, flow, blocks)
        tile, blocks = TO_INPUTS[one.inputs], self._back_blocks(one)
        residual.input_gradient[(blocks, self.groups)](
            self.dy, self.spread, flow if shortcut is None else shortcut, below.a, below.y, out, self.sums,
            self.batch, self.pushes, self.num_spread, one.offset, blocks,
            **one.constants(), SHORTCUT=stride, BP=tile.positions, PRECISION=self.precision, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        return blocks
