"""Triton kernels for convolutions of many runs at once, each run with its own weights.

Activations are [R, S, H, W, C] for R runs of S samples, padding included; patches are never written to memory, their
values are ordered k = (ky SIZE + kx) C + c. A convolution can pool 2 x 2 windows by maximum, apply ReLU and dropout. It
also writes the `winner` of each value: the index of the maximum in its window, or LOST if no gradient passes. The flow,
the gradient of the output, has the unpooled shape and a margin of zeros, so that every product reads plain memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.simulation.lab.kernels.masks import kept

LOST = tl.constexpr(4)
VARIABLE = ("R", "S", "batch", "owner_step", "bias_step", "chunk", "splits")  # vary between batches: do not recompile


@triton.jit
def _within_patch(k, W: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr):
    """Return the offset of value k of a patch from its first."""
    tap = k // C
    return ((tap // SIZE) * W + tap % SIZE) * C + k % C


@triton.jit
def _read(pointers, k, K: tl.constexpr, BK: tl.constexpr):
    """Load a tile of patches; values past a patch may belong to another run, even be NaN, and read as zero."""
    if K % BK == 0:
        return tl.load(pointers)
    return tl.load(pointers, mask=(k < K)[None, :], other=0.0)


@triton.jit
def _samples_begin(samples, at, r, s, R, S, SIZE: tl.constexpr, FIRST: tl.constexpr):
    """Return the start of each sample's input: in the data set for the FIRST layer, else in the layer below."""
    if FIRST:
        return tl.load(samples + (at * R + r) * S + s).to(tl.int64) * SIZE
    return (r.to(tl.int64) * S + s) * SIZE


@triton.jit
def _larger(best, won, other, number):
    take = (other > best) | (other != other)
    return tl.where(take, other, best), tl.where(take, number, won)


@triton.jit(do_not_specialize=VARIABLE)
def forward(
    x, samples, w, owner, bias, bias_owner, y, winner, low, high, at_pointer,
    R, S, batch, owner_step, bias_step, w_row, w_k, w_o, bias_row,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, SIZE: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, RELU: tl.constexpr, DROPPED: tl.constexpr, THRESHOLD: tl.constexpr,
    RAISED: tl.constexpr, FLAT: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one block of outputs of one run; FLAT writes them channels first, as torch flattens images."""
    PH: tl.constexpr = (H - SIZE + 1) // STEP
    PW: tl.constexpr = (W - SIZE + 1) // STEP
    K: tl.constexpr = SIZE * SIZE * C
    at = tl.load(at_pointer)
    r = tl.program_id(1)
    place = tl.program_id(0) * BP + tl.arange(0, BP)
    ok = place < S * PH * PW
    s = tl.minimum(place // (PH * PW), S - 1)
    oy = ((place // PW) % PH) * STEP
    ox = (place % PW) * STEP
    x += (_samples_begin(samples, at, r, s, R, S, H * W * C, FIRST) + (oy * W + ox) * C)[:, None]
    o = tl.arange(0, BN)
    w += tl.load(owner + at * owner_step + r).to(tl.int64) * w_row
    bias += tl.load(bias_owner + at * bias_step + r).to(tl.int64) * bias_row
    sum0 = tl.zeros((BP, BN), tl.float32)
    if STEP == 2:
        sum1 = tl.zeros((BP, BN), tl.float32)
        sum2 = tl.zeros((BP, BN), tl.float32)
        sum3 = tl.zeros((BP, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        wide = (k < K)[:, None] & (o < O)[None, :]
        weights = tl.load(w + k[:, None] * w_k + o[None, :] * w_o, mask=wide, other=0.0)
        there = x + _within_patch(k, W, C, SIZE)[None, :]
        sum0 = tl.dot(_read(there, k, K, BK), weights, sum0, input_precision=PRECISION)
        if STEP == 2:
            sum1 = tl.dot(_read(there + C, k, K, BK), weights, sum1, input_precision=PRECISION)
            sum2 = tl.dot(_read(there + W * C, k, K, BK), weights, sum2, input_precision=PRECISION)
            sum3 = tl.dot(_read(there + W * C + C, k, K, BK), weights, sum3, input_precision=PRECISION)
    best = sum0
    won = tl.zeros((BP, BN), tl.int32)
    if STEP == 2:
        best, won = _larger(best, won, sum1, 1)
        best, won = _larger(best, won, sum2, 2)
        best, won = _larger(best, won, sum3, 3)
    best += tl.load(bias + o, mask=o < O, other=0.0)[None, :]
    if RELU:
        won = tl.where(best <= 0.0, LOST, won)
        best = tl.where(best <= 0.0, 0.0, best)  # keeps NaN
    if DROPPED:
        push = (at * R + r) * (S // batch) + s // batch
        counter = ((s % batch) * O)[:, None] * (PH * PW) + o[None, :] * (PH * PW) + (place % (PH * PW))[:, None]
        keep = kept(counter, tl.load(low + push)[:, None], tl.load(high + push)[:, None], THRESHOLD)
        won = tl.where(keep, won, LOST)
        best = tl.where(keep, best * RAISED, 0.0)
    there = ok[:, None] & (o < O)[None, :]
    out = (r.to(tl.int64) * S * PH * PW + place)[:, None] * O + o[None, :]
    tl.store(winner + out, won.to(tl.int8), mask=there)
    if FLAT:
        out = (r.to(tl.int64) * S + s)[:, None] * (O * PH * PW) + o[None, :] * (PH * PW) + (place % (PH * PW))[:, None]
    tl.store(y + out, best, mask=there)


@triton.jit
def flow_back(
    flow, winner, sample, py, px, channel, value, there,
    PW: tl.constexpr, O: tl.constexpr, POSITIONS: tl.constexpr, STEP: tl.constexpr, MARGIN: tl.constexpr,
    FH: tl.constexpr, FW: tl.constexpr, RAISED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of pooled values to the winners of their windows, and zero to the others."""
    won = tl.load(winner + sample * (POSITIONS * O) + (py * PW + px) * O + channel, mask=there, other=LOST)
    first = sample * (FH * FW * O) + ((py * STEP + MARGIN) * FW + px * STEP + MARGIN) * O + channel
    for member in tl.static_range(STEP * STEP):
        handed = tl.where(won == member, value * RAISED, 0.0)
        tl.store(flow + first + ((member // 2) * FW + member % 2) * O, handed, mask=there)


@triton.jit(do_not_specialize=VARIABLE)
def weight_gradient(
    x, samples, flow, partial, at_pointer, R, S, chunk, splits,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, SIZE: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, MARGIN: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows of patches^T flow over one part of the positions; row K (patch = 1) is the bias."""
    OH: tl.constexpr = (H - SIZE + 1) // STEP * STEP
    OW: tl.constexpr = (W - SIZE + 1) // STEP * STEP
    FH: tl.constexpr = OH + 2 * MARGIN
    FW: tl.constexpr = OW + 2 * MARGIN
    K: tl.constexpr = SIZE * SIZE * C
    at = tl.load(at_pointer)
    split, r = tl.program_id(1), tl.program_id(2)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    x += _within_patch(k, W, C, SIZE)[None, :]
    one = (k == K)[None, :]
    o = tl.arange(0, BN)
    total = tl.zeros((BK, BN), tl.float32)
    last = tl.minimum(split * chunk + chunk, S * OH * OW)
    for start in range(split * chunk, last, BP):
        place = start + tl.arange(0, BP)
        s = tl.minimum(place // (OH * OW), S - 1)
        oy = (place // OW) % OH
        ox = place % OW
        begin = _samples_begin(samples, at, r, s, R, S, H * W * C, FIRST) + (oy * W + ox) * C
        there = (place < last)[:, None] & (o < O)[None, :]
        address = (r.to(tl.int64) * S + s) * (FH * FW * O) + ((oy + MARGIN) * FW + ox + MARGIN) * O
        flows = tl.load(flow + address[:, None] + o[None, :], mask=there, other=0.0)
        patch = tl.where(one, 1.0, tl.load(x + begin[:, None]))  # rows past K + 1 are not stored
        total = tl.dot(tl.trans(patch), flows, total, input_precision=PRECISION)
    out = ((r * splits + split) * (K + 1) + k)[:, None] * O + o[None, :]
    tl.store(partial + out, total, mask=(k <= K)[:, None] & (o < O)[None, :])


@triton.jit(do_not_specialize=VARIABLE)
def gather_gradient(
    partial, gradient, splits, row, weight_offset, bias_offset,
    C: tl.constexpr, O: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a weight gradient into the flat vector ([O, C, taps], then the bias)."""
    K: tl.constexpr = TAPS * C
    r = tl.program_id(1)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_weight = e < O * K
    o = tl.where(is_weight, e // K, e - O * K)
    k = tl.where(is_weight, (e % TAPS) * C + (e // TAPS) % C, K)
    there = e < O * (K + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(partial + ((r * splits + split) * (K + 1) + k) * O + o, mask=there, other=0.0)
    target = tl.where(is_weight, weight_offset + e, bias_offset + o)
    tl.store(gradient + r.to(tl.int64) * row + target, total, mask=there)


@triton.jit(do_not_specialize=VARIABLE)
def spread_weights(
    w, owner, out, turned, at_pointer, owner_step, row, offset,
    C: tl.constexpr, O: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reorder the weights [O, C, taps] of every run to [taps, C, O] (forward) and [reversed taps, O, C] (backward)."""
    r = tl.program_id(1)
    own = tl.load(owner + tl.load(at_pointer) * owner_step + r).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = e < O * C * TAPS
    o, c, tap = e % O, (e // O) % C, e // (O * C)
    value = tl.load(w + own * row + offset + (o * C + c) * TAPS + tap, mask=there, other=0.0)
    tl.store(out + r.to(tl.int64) * (O * C * TAPS) + e, value, mask=there)
    tl.store(turned + r.to(tl.int64) * (O * C * TAPS) + ((TAPS - 1 - tap) * O + o) * C + c, value, mask=there)


@triton.jit(do_not_specialize=VARIABLE)
def input_gradient(
    flow, w, below, winner, S,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    BELOW_STEP: tl.constexpr, BELOW_RAISED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of inputs of one run: `flow` convolved with the reversed weights."""
    MARGIN: tl.constexpr = SIZE - 1
    FH: tl.constexpr = (H - SIZE + 1) // STEP * STEP + 2 * MARGIN
    FW: tl.constexpr = (W - SIZE + 1) // STEP * STEP + 2 * MARGIN
    K: tl.constexpr = SIZE * SIZE * O
    r = tl.program_id(1)
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    s = tl.minimum(place // (H * W), S - 1)
    iy = (place // W) % H
    ix = place % W
    sample = r.to(tl.int64) * S + s
    flow += (sample * (FH * FW * O) + (tl.minimum(iy, FH - SIZE) * FW + tl.minimum(ix, FW - SIZE)) * O)[:, None]
    c = tl.arange(0, BN)
    w += r.to(tl.int64) * (SIZE * SIZE * C * O)
    total = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        weights = tl.load(w + k[:, None] * C + c[None, :], mask=(k < K)[:, None] & (c < C)[None, :], other=0.0)
        flows = _read(flow + _within_patch(k, FW, O, SIZE)[None, :], k, K, BK)
        total = tl.dot(flows, weights, total, input_precision=PRECISION)
    there = (place < S * H * W)[:, None] & (c < C)[None, :]
    flow_back(
        below, winner, sample[:, None], iy[:, None], ix[:, None], c[None, :], total, there,
        W, C, H * W, BELOW_STEP, 0, H * BELOW_STEP, W * BELOW_STEP, BELOW_RAISED,
    )  # fmt: skip
