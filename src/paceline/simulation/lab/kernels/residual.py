"""Triton kernels for residual nets with batch norm of many runs at once, forward and backward.

A group is one push of one run: B samples with batch statistics of their own. Activations are [G, B, H, W, C], float32
or bfloat16; sums are float32 and in a fixed order. Convolutions are 3x3 with a border of zeros and a stride of 1 or 2.
Every producer of values to be summed over a group writes one row of sums per block of positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.simulation.lab.kernels.masks import chosen

VARIABLE = ("B", "R", "pushes", "w_row", "stat_row", "blocks", "chunk", "splits", "at_row", "row", "offset")
"""Arguments that differ between batches and layers and must not cause a recompilation."""
MEAN, DEVIATION, SCALE, SHIFT = (tl.constexpr(number) for number in range(4))  # rows of a norm's statistics


@triton.jit
def _group_size(counts, at_pointer, at_row):
    """Return the number of samples of the program's group in the current update; the others are padding."""
    return tl.load(counts + tl.load(at_pointer) * at_row + tl.program_id(1))


@triton.jit(do_not_specialize=VARIABLE)
def prepare(
    images, samples, low, high, scale, shift, out, at_pointer, R, B, pushes,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, PADDING: tl.constexpr, CROP: tl.constexpr,
    MIRROR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Write augmented, normalised images of one group with O channels, those past C zero."""
    at = tl.load(at_pointer)
    g = tl.program_id(1)
    place = tl.program_id(0) * BP + tl.arange(0, BP)
    ok = place < B * H * W
    s = place // (H * W)
    y, x = (place // W) % H, place % W
    if CROP or MIRROR:
        keys_low = tl.load(low + at * R * pushes + g)
        keys_high = tl.load(high + at * R * pushes + g)
    if MIRROR:
        mirrored = chosen(3 * s + 2, keys_low, keys_high, 2) == 1
    if CROP:
        y += chosen(3 * s, keys_low, keys_high, 2 * PADDING + 1) - PADDING
        x += chosen(3 * s + 1, keys_low, keys_high, 2 * PADDING + 1) - PADDING
    if MIRROR:
        x = tl.where(mirrored, W - 1 - x, x)
    inside = ok & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    number = tl.load(samples + (at * R * pushes + g) * B + s, mask=ok, other=0).to(tl.int64)
    c = tl.arange(0, O)
    colour = (c < C)[None, :]
    first = ((number * H + y) * W + x) * C
    value = tl.load(images + first[:, None] + c[None, :], mask=inside[:, None] & colour, other=0).to(tl.float32)
    value = value * tl.load(scale + c, mask=c < C, other=0.0)[None, :]
    value = value + tl.load(shift + c, mask=c < C, other=0.0)[None, :]
    there = (g.to(tl.int64) * B * H * W + place)[:, None] * O + c[None, :]
    tl.store(out + there, value.to(out.dtype.element_ty), mask=ok[:, None])


@triton.jit
def _store_sums(sums, first, second, blocks, O: tl.constexpr):
    """Write the block's two sums per channel."""
    o = tl.arange(0, O)
    row = sums + (tl.program_id(1) * blocks + tl.program_id(0)) * 2 * O
    tl.store(row + o, tl.sum(first, 0))
    tl.store(row + O + o, tl.sum(second, 0))


@triton.jit(do_not_specialize=VARIABLE)
def convolve(
    x, w, y, sums, counts, at_pointer, B, pushes, at_row, w_row, offset, blocks,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, STRIDE: tl.constexpr,
    BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolve one block of positions of one group, and sum the outputs and their squares over real samples."""
    OH: tl.constexpr = (H - 1) // STRIDE + 1
    OW: tl.constexpr = (W - 1) // STRIDE + 1
    g = tl.program_id(1)
    place = tl.program_id(0) * BP + tl.arange(0, BP)
    ok = place < B * OH * OW
    s = place // (OH * OW)
    top, left = ((place // OW) % OH) * STRIDE - 1, (place % OW) * STRIDE - 1
    c, o = tl.arange(0, C), tl.arange(0, O)
    x += (g.to(tl.int64) * B * H * W) * C
    w += (g // pushes) * w_row + offset
    total = tl.zeros((BP, O), tl.float32)
    for tap in range(9):
        iy, ix = top + tap // 3, left + tap % 3
        inside = ok & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
        values = tl.load(x + (((s * H + iy) * W + ix) * C)[:, None] + c[None, :], mask=inside[:, None], other=0.0)
        weights = tl.load(w + tap * C * O + c[:, None] * O + o[None, :])
        total = tl.dot(values, weights, total, input_precision=PRECISION)
    rounded = total.to(y.dtype.element_ty)
    tl.store(y + (g.to(tl.int64) * B * OH * OW + place)[:, None] * O + o[None, :], rounded, mask=ok[:, None])
    real = (s < _group_size(counts, at_pointer, at_row))[:, None]
    value = tl.where(real, rounded.to(tl.float32), 0.0)
    _store_sums(sums, value, value * value, blocks, O)


@triton.jit(do_not_specialize=VARIABLE)
def batch_statistics(
    sums, gammas, betas, statistics, counts, at_pointer, pushes, at_row, w_row, stat_row, offset, blocks,
    O: tl.constexpr, POSITIONS: tl.constexpr, EPSILON: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Turn the sums of one group into the mean, deviation, scale and shift of its norm."""
    r, o = tl.program_id(1) // pushes, tl.arange(0, O)
    first, second = _gathered(sums, blocks, O, BB)
    number = tl.maximum(_group_size(counts, at_pointer, at_row) * POSITIONS, 1).to(tl.float32)
    mean = first / number
    deviation = tl.rsqrt(tl.maximum(second / number - mean * mean, 0.0) + EPSILON)
    scale = tl.load(gammas + r * w_row + o) * deviation
    out = statistics + tl.program_id(1) * stat_row + offset + o
    tl.store(out + MEAN * O, mean)
    tl.store(out + DEVIATION * O, deviation)
    tl.store(out + SCALE * O, scale)
    tl.store(out + SHIFT * O, tl.load(betas + r * w_row + o) - mean * scale)


@triton.jit
def _gathered(sums, blocks, O: tl.constexpr, BB: tl.constexpr):
    """Return both sums of the program's group over all its blocks."""
    b, o = tl.arange(0, BB), tl.arange(0, O)
    first = tl.zeros((BB, O), tl.float32)
    second = tl.zeros((BB, O), tl.float32)
    for start in range(0, blocks, BB):
        row = (tl.program_id(1) * blocks + start + b)[:, None] * 2 * O + o[None, :]
        there = (start + b < blocks)[:, None]
        first += tl.load(sums + row, mask=there, other=0.0)
        second += tl.load(sums + row + O, mask=there, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit(do_not_specialize=VARIABLE)
def normalise(
    y, statistics, below, out, B, stat_row, offset,
    H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, SHORTCUT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Write relu(norm(y) + shortcut); SHORTCUT is the stride of the block's shortcut, 0 for none."""
    g = tl.program_id(1)
    place = tl.program_id(0) * BP + tl.arange(0, BP)
    ok = (place < B * H * W)[:, None]
    o = tl.arange(0, O)
    row = statistics + g * stat_row + offset + o
    there = (g.to(tl.int64) * B * H * W + place)[:, None] * O + o[None, :]
    value = tl.load(y + there, mask=ok, other=0.0).to(tl.float32)
    value = value * tl.load(row + SCALE * O)[None, :] + tl.load(row + SHIFT * O)[None, :]
    if SHORTCUT == 1:
        value += tl.load(below + there, mask=ok, other=0.0).to(tl.float32)
    if SHORTCUT == 2:
        C: tl.constexpr = O // 2
        c = o - C // 2
        passes = ok & ((c >= 0) & (c < C))[None, :]
        s, py, px = place // (H * W), (place // W) % H, place % W
        source = (((g.to(tl.int64) * B + s) * (2 * H) + 2 * py) * (2 * W) + 2 * px)[:, None] * C + c[None, :]
        value += tl.load(below + source, mask=passes, other=0.0).to(tl.float32)
    value = tl.where(value <= 0.0, 0.0, value)  # keeps NaN
    tl.store(out + there, value.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=VARIABLE)
def begin_backward(
    flow, a, y, out, sums, B, blocks,
    POSITIONS: tl.constexpr, O: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Spread the gradient of each sample's mean over its positions, pass it through the ReLU, and sum it."""
    g = tl.program_id(1)
    place = tl.program_id(0) * BP + tl.arange(0, BP)
    ok = (place < B * POSITIONS)[:, None]
    o = tl.arange(0, O)
    there = (g.to(tl.int64) * B * POSITIONS + place)[:, None] * O + o[None, :]
    value = tl.load(flow + (g * B + place // POSITIONS)[:, None] * O + o[None, :], mask=ok, other=0.0) / POSITIONS
    value = tl.where(tl.load(a + there, mask=ok, other=0.0).to(tl.float32) > 0.0, value, 0.0)
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + there, rounded, mask=ok)
    value = rounded.to(tl.float32)
    _store_sums(sums, value, value * tl.load(y + there, mask=ok, other=0.0).to(tl.float32), blocks, O)


@triton.jit(do_not_specialize=VARIABLE)
def norm_gradient(
    sums, gammas, statistics, factors, found, counts, at_pointer, pushes, at_row, w_row, stat_row, offset, blocks,
    O: tl.constexpr, POSITIONS: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Turn sums of a gradient into those of the norm's scale and shift, and dy = f0 dz + f1 y + f2 per channel."""
    r, o = tl.program_id(1) // pushes, tl.arange(0, O)
    first, second = _gathered(sums, blocks, O, BB)
    row = statistics + tl.program_id(1) * stat_row + offset + o
    mean, deviation = tl.load(row + MEAN * O), tl.load(row + DEVIATION * O)
    to_gamma = deviation * (second - mean * first)
    number = tl.maximum(_group_size(counts, at_pointer, at_row) * POSITIONS, 1).to(tl.float32)
    slope = tl.load(gammas + r * w_row + o) * deviation
    out = factors + tl.program_id(1) * 3 * O + o
    tl.store(out, slope)
    tl.store(out + O, -slope * deviation * to_gamma / number)
    tl.store(out + 2 * O, slope * (mean * deviation * to_gamma - first) / number)
    place = found + tl.program_id(1) * stat_row + offset + o
    tl.store(place, to_gamma)
    tl.store(place + O, first)


@triton.jit(do_not_specialize=VARIABLE)
def through_norm(
    flow, y, factors, out, counts, at_pointer, B, at_row,
    POSITIONS: tl.constexpr, O: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a convolution's outputs; that of padding samples is zero."""
    g = tl.program_id(1)
    place = tl.program_id(0) * BP + tl.arange(0, BP)
    ok = (place < B * POSITIONS)[:, None]
    o = tl.arange(0, O)
    there = (g.to(tl.int64) * B * POSITIONS + place)[:, None] * O + o[None, :]
    row = factors + g * 3 * O + o
    value = tl.load(flow + there, mask=ok, other=0.0).to(tl.float32) * tl.load(row)[None, :]
    value += tl.load(y + there, mask=ok, other=0.0).to(tl.float32) * tl.load(row + O)[None, :]
    value += tl.load(row + 2 * O)[None, :]
    real = (place // POSITIONS < _group_size(counts, at_pointer, at_row))[:, None]
    tl.store(out + there, tl.where(real, value, 0.0).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=VARIABLE)
def weight_gradient(
    x, dy, partial, B, chunk, splits,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, STRIDE: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows (tap, channel) of patches^T dy over one part of a group's positions."""
    OH: tl.constexpr = (H - 1) // STRIDE + 1
    OW: tl.constexpr = (W - 1) // STRIDE + 1
    split, g = tl.program_id(0) % splits, tl.program_id(1)
    k = (tl.program_id(0) // splits) * BK + tl.arange(0, BK)
    tap = k // C
    down, right = tap // 3 - 1, tap % 3 - 1
    o = tl.arange(0, O)
    x += g.to(tl.int64) * B * H * W * C
    dy += g.to(tl.int64) * B * OH * OW * O
    last = tl.minimum(split * chunk + chunk, B * OH * OW)
    total = tl.zeros((BK, O), tl.float32)
    for start in range(split * chunk, last, BP):
        place = start + tl.arange(0, BP)
        ok = place < last
        s = place // (OH * OW)
        iy = (((place // OW) % OH) * STRIDE)[:, None] + down[None, :]
        ix = ((place % OW) * STRIDE)[:, None] + right[None, :]
        inside = ok[:, None] & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W) & (tap < 9)[None, :]
        patch = tl.load(x + ((s[:, None] * H + iy) * W + ix) * C + (k % C)[None, :], mask=inside, other=0.0)
        flows = tl.load(dy + place[:, None] * O + o[None, :], mask=ok[:, None], other=0.0)
        total = tl.dot(tl.trans(patch), flows, total, input_precision=PRECISION)
    out = ((g * splits + split) * (9 * C) + k)[:, None] * O + o[None, :]
    tl.store(partial + out, total, mask=(tap < 9)[:, None])


@triton.jit(do_not_specialize=VARIABLE)
def gather_weights(partial, found, splits, row, offset, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the parts of a convolution's weight gradient over the splits of all pushes of a run."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(partial + (tl.program_id(1) * splits + split) * SIZE + e, mask=e < SIZE, other=0.0)
    tl.store(found + tl.program_id(1) * row + offset + e, total, mask=e < SIZE)


@triton.jit(do_not_specialize=VARIABLE)
def input_gradient(
    dy, w, shortcut, a, y, out, sums, B, pushes, w_row, offset, blocks,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, STRIDE: tl.constexpr, SHORTCUT: tl.constexpr,
    BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a convolution's inputs, add that of the shortcut, pass the ReLU below, and sum it."""
    OH: tl.constexpr = (H - 1) // STRIDE + 1
    OW: tl.constexpr = (W - 1) // STRIDE + 1
    g = tl.program_id(1)
    place = tl.program_id(0) * BP + tl.arange(0, BP)
    ok = place < B * H * W
    s = place // (H * W)
    iy, ix = (place // W) % H, place % W
    c, o = tl.arange(0, C), tl.arange(0, O)
    first = g.to(tl.int64) * B * OH * OW * O
    w += (g // pushes) * w_row + offset
    total = tl.zeros((BP, C), tl.float32)
    for tap in range(9):
        down, right = iy + 1 - tap // 3, ix + 1 - tap % 3
        inside = ok & (down >= 0) & (right >= 0)
        if STRIDE == 2:
            inside = inside & (down % 2 == 0) & (right % 2 == 0)
        down, right = down // STRIDE, right // STRIDE
        inside = inside & (down < OH) & (right < OW)
        source = first + (((s * OH + down) * OW + right) * O)[:, None] + o[None, :]
        flows = tl.load(dy + source, mask=inside[:, None], other=0.0)
        weights = tl.load(w + tap * C * O + c[:, None] * O + o[None, :])
        total = tl.dot(flows, tl.trans(weights), total, input_precision=PRECISION)
    there = (g.to(tl.int64) * B * H * W + place)[:, None] * C + c[None, :]
    if SHORTCUT == 1:
        total += tl.load(shortcut + there, mask=ok[:, None], other=0.0).to(tl.float32)
    if SHORTCUT == 2:
        even = ok & (iy % 2 == 0) & (ix % 2 == 0)
        above = first + (((s * OH + iy // 2) * OW + ix // 2) * O + C // 2)[:, None] + c[None, :]
        total += tl.load(shortcut + above, mask=even[:, None], other=0.0).to(tl.float32)
    total = tl.where(tl.load(a + there, mask=ok[:, None], other=0.0).to(tl.float32) > 0.0, total, 0.0)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + there, rounded, mask=ok[:, None])
    value = rounded.to(tl.float32)
    _store_sums(sums, value, value * tl.load(y + there, mask=ok[:, None], other=0.0).to(tl.float32), blocks, C)
