"""Triton kernels for the linear layers and the loss of many runs at once, forward and backward.

Values are flattened channels first, as in torch; their gradient goes to the convolution below, weight gradients go
into the flat vector. The samples of a run are split into blocks; each block has its own row in `out`, to be summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.simulation.lab.kernels.convolution import flow_back
from paceline.simulation.lab.kernels.masks import kept

VARIABLE = ("R", "S", "batch", "owner_step", "out_row", "out_block", "SHIFT", "tiles", "splits")
"""Arguments that differ between batches and must not cause a recompilation."""


@triton.jit
def _loss_gradient(logits, n, ok, s, r, at, labels, samples, sample_weights, losses, R, S, N: tl.constexpr):
    """Add the block's loss to `losses` and return the gradient of the logits."""
    number = tl.load(samples + (at * R + r) * S + s, mask=ok, other=0)
    weight = tl.load(sample_weights + (at * R + r) * S + s, mask=ok, other=0.0)
    hit = n[None, :] == tl.load(labels + number, mask=ok, other=0)[:, None]
    logits = tl.where((n < N)[None, :], logits, -float("inf"))
    shifted = logits - tl.max(logits, 1)[:, None]
    raised = tl.exp(shifted)
    total = tl.sum(raised, 1)
    right = tl.sum(tl.where(hit, shifted, 0.0), 1) - tl.log(total)
    tl.store(losses + r * tl.num_programs(0) + tl.program_id(0), -tl.sum(right * weight, 0))
    return (raised / total[:, None] - tl.where(hit, 1.0, 0.0)) * weight[:, None]


@triton.jit(do_not_specialize=VARIABLE)
def lenet_head(
    x, below, winner, labels, samples, sample_weights, w, owner, out, losses, at_pointer,
    R, S, w_row, owner_step, out_row, out_block, W1, B1, W2, B2, W3, B3, SHIFT,
    PH: tl.constexpr, PW: tl.constexpr, CHANNELS: tl.constexpr, MARGIN: tl.constexpr,
    N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    BS: tl.constexpr, BJ: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute three linear layers with ReLU, the loss, and all their gradients for one block of samples."""
    J: tl.constexpr = PH * PW * CHANNELS
    at = tl.load(at_pointer)
    r = tl.program_id(1)
    s = tl.program_id(0) * BS + tl.arange(0, BS)
    ok = s < S
    first = (r.to(tl.int64) * S + s)[:, None] * J
    w += tl.load(owner + at * owner_step + r).to(tl.int64) * w_row
    out += r.to(tl.int64) * out_row + tl.program_id(0) * out_block - SHIFT
    n1, n2, n3 = tl.arange(0, P1), tl.arange(0, P2), tl.arange(0, P3)
    h1 = tl.zeros((BS, P1), tl.float32)
    for j0 in range(0, J, BJ):
        j = j0 + tl.arange(0, BJ)
        there = ok[:, None] & (j < J)[None, :]
        value = tl.load(x + first + j[None, :], mask=there, other=0.0)
        wide = (n1 < N1)[:, None] & (j < J)[None, :]
        w1 = tl.load(w + W1 + n1[:, None] * J + j[None, :], mask=wide, other=0.0)
        h1 = tl.dot(value, tl.trans(w1), h1, input_precision=PRECISION)
    h1 += tl.load(w + B1 + n1, mask=n1 < N1, other=0.0)[None, :]
    h1 = tl.where(h1 <= 0.0, 0.0, h1)
    inner = (n2 < N2)[:, None] & (n1 < N1)[None, :]
    w2 = tl.load(w + W2 + n2[:, None] * N1 + n1[None, :], mask=inner, other=0.0)
    h2 = tl.dot(h1, tl.trans(w2), input_precision=PRECISION)
    h2 += tl.load(w + B2 + n2, mask=n2 < N2, other=0.0)[None, :]
    h2 = tl.where(h2 <= 0.0, 0.0, h2)
    last = (n3 < N3)[:, None] & (n2 < N2)[None, :]
    w3 = tl.load(w + W3 + n3[:, None] * N2 + n2[None, :], mask=last, other=0.0)
    logits = tl.dot(h2, tl.trans(w3), input_precision=PRECISION)
    logits += tl.load(w + B3 + n3, mask=n3 < N3, other=0.0)[None, :]
    d3 = _loss_gradient(logits, n3, ok, s, r, at, labels, samples, sample_weights, losses, R, S, N3)
    found = tl.dot(tl.trans(d3), h2, input_precision=PRECISION)
    tl.store(out + W3 + n3[:, None] * N2 + n2[None, :], found, mask=last)
    tl.store(out + B3 + n3, tl.sum(d3, 0), mask=n3 < N3)
    d2 = tl.dot(d3, w3, input_precision=PRECISION)
    d2 = tl.where(h2 > 0.0, d2, 0.0)
    found = tl.dot(tl.trans(d2), h1, input_precision=PRECISION)
    tl.store(out + W2 + n2[:, None] * N1 + n1[None, :], found, mask=inner)
    tl.store(out + B2 + n2, tl.sum(d2, 0), mask=n2 < N2)
    d1 = tl.dot(d2, w2, input_precision=PRECISION)
    d1 = tl.where(h1 > 0.0, d1, 0.0)
    tl.store(out + B1 + n1, tl.sum(d1, 0), mask=n1 < N1)
    for j0 in range(0, J, BJ):
        j = j0 + tl.arange(0, BJ)
        there = ok[:, None] & (j < J)[None, :]
        value = tl.load(x + first + j[None, :], mask=there, other=0.0)
        wide = (n1 < N1)[:, None] & (j < J)[None, :]
        w1 = tl.load(w + W1 + n1[:, None] * J + j[None, :], mask=wide, other=0.0)
        tl.store(
            out + W1 + n1[:, None] * J + j[None, :], tl.dot(tl.trans(d1), value, input_precision=PRECISION), mask=wide
        )
        position = (j % (PH * PW))[None, :]
        flow_back(
            below, winner, (r.to(tl.int64) * S + s)[:, None], position // PW, position % PW, (j // (PH * PW))[None, :],
            tl.dot(d1, w1, input_precision=PRECISION), there,
            PW, CHANNELS, PH * PW, 2, MARGIN, 2 * PH + 2 * MARGIN, 2 * PW + 2 * MARGIN, 1.0,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARIABLE)
def project(
    x, w, owner, partial, at_pointer, S, owner_step, tiles, w_row, W1,
    J: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a partial sum of a wide linear layer over `tiles` blocks of its inputs."""
    split, r = tl.program_id(0), tl.program_id(2)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    n = tl.arange(0, BN)
    w += tl.load(owner + tl.load(at_pointer) * owner_step + r).to(tl.int64) * w_row + W1
    first = (r.to(tl.int64) * S + s)[:, None] * J
    total = tl.zeros((BS, BN), tl.float32)
    for number in range(split * tiles, split * tiles + tiles):
        j = number * BJ + tl.arange(0, BJ)
        value = tl.load(x + first + j[None, :], mask=(s < S)[:, None] & (j < J)[None, :], other=0.0)
        weights = tl.load(w + n[:, None] * J + j[None, :], mask=(n < N)[:, None] & (j < J)[None, :], other=0.0)
        total = tl.dot(value, tl.trans(weights), total, input_precision=PRECISION)
    out = ((r * tl.num_programs(0) + split).to(tl.int64) * S + s)[:, None] * N + n[None, :]
    tl.store(partial + out, total, mask=(s < S)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=VARIABLE)
def cnn_head(
    partial, dh, labels, samples, sample_weights, w, owner, out, losses, low, high, at_pointer,
    R, S, batch, splits, w_row, owner_step, out_row, out_block, B1, W2, B2, SHIFT,
    N1: tl.constexpr, N2: tl.constexpr, BS: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    THRESHOLD: tl.constexpr, RAISED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ReLU, dropout, the last layer, the loss and the gradients from the wide layer's partial sums."""
    at = tl.load(at_pointer)
    r = tl.program_id(1)
    s = tl.program_id(0) * BS + tl.arange(0, BS)
    ok = s < S
    w += tl.load(owner + at * owner_step + r).to(tl.int64) * w_row
    out += r.to(tl.int64) * out_row + tl.program_id(0) * out_block - SHIFT
    n1, n2 = tl.arange(0, P1), tl.arange(0, P2)
    there = ok[:, None] & (n1 < N1)[None, :]
    h = tl.zeros((BS, P1), tl.float32)
    for split in range(splits):
        where = ((r * splits + split).to(tl.int64) * S + s)[:, None] * N1 + n1[None, :]
        h += tl.load(partial + where, mask=there, other=0.0)
    h += tl.load(w + B1 + n1, mask=n1 < N1, other=0.0)[None, :]
    push = (at * R + r) * (S // batch) + s // batch
    keys_low, keys_high = tl.load(low + push, mask=ok, other=0), tl.load(high + push, mask=ok, other=0)
    counter = ((s % batch) * N1)[:, None] + n1[None, :]
    alive = kept(counter, keys_low[:, None], keys_high[:, None], THRESHOLD) & ((h > 0.0) | (h != h))
    h = tl.where(alive, h * RAISED, 0.0)
    last = (n2 < N2)[:, None] & (n1 < N1)[None, :]
    w2 = tl.load(w + W2 + n2[:, None] * N1 + n1[None, :], mask=last, other=0.0)
    logits = tl.dot(h, tl.trans(w2), input_precision=PRECISION)
    logits += tl.load(w + B2 + n2, mask=n2 < N2, other=0.0)[None, :]
    d2 = _loss_gradient(logits, n2, ok, s, r, at, labels, samples, sample_weights, losses, R, S, N2)
    found = tl.dot(tl.trans(d2), h, input_precision=PRECISION)
    tl.store(out + W2 + n2[:, None] * N1 + n1[None, :], found, mask=last)
    tl.store(out + B2 + n2, tl.sum(d2, 0), mask=n2 < N2)
    d1 = tl.where(alive, tl.dot(d2, w2, input_precision=PRECISION) * RAISED, 0.0)
    tl.store(out + B1 + n1, tl.sum(d1, 0), mask=n1 < N1)
    tl.store(dh + (r.to(tl.int64) * S + s)[:, None] * N1 + n1[None, :], d1, mask=there)


@triton.jit(do_not_specialize=VARIABLE)
def project_back(
    x, dh, below, winner, w, owner, gradient, at_pointer, S, owner_step, w_row, row, W1,
    PH: tl.constexpr, PW: tl.constexpr, CHANNELS: tl.constexpr, MARGIN: tl.constexpr, RAISED: tl.constexpr,
    N: tl.constexpr,
    BS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BQ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a wide linear layer's inputs and weights for BC channels at BQ positions."""
    POSITIONS: tl.constexpr = PH * PW
    J: tl.constexpr = POSITIONS * CHANNELS
    r = tl.program_id(1)
    n = tl.arange(0, BN)
    across = tl.cdiv(POSITIONS, BQ)
    channel = (tl.program_id(0) // across) * BC + tl.arange(0, BC)
    position = (tl.program_id(0) % across) * BQ + tl.arange(0, BQ)
    there = (channel < CHANNELS)[:, None] & (position < POSITIONS)[None, :]
    flat = channel[:, None] * POSITIONS + position[None, :]  # [BC, BQ]
    wide = (n < N)[:, None, None] & there[None]
    w += tl.load(owner + tl.load(at_pointer) * owner_step + r).to(tl.int64) * w_row + W1
    cut = n[:, None, None] * J + flat[None]
    weights = tl.reshape(tl.load(w + cut, mask=wide, other=0.0), (BN, BC * BQ))
    total = tl.zeros((BN, BC * BQ), tl.float32)
    py, px = (position // PW)[None, :, None], (position % PW)[None, :, None]
    for start in range(0, S, BS):
        s = start + tl.arange(0, BS)
        sample = r.to(tl.int64) * S + s
        flow = tl.load(dh + sample[:, None] * N + n[None, :], mask=(s < S)[:, None] & (n < N)[None, :], other=0.0)
        inside = (s < S)[:, None, None] & there[None]
        value = tl.load(x + sample[:, None, None] * J + flat[None], mask=inside, other=0.0)
        value = tl.reshape(value, (BS, BC * BQ))
        total = tl.dot(tl.trans(flow), value, total, input_precision=PRECISION)
        back = tl.reshape(tl.dot(flow, weights, input_precision=PRECISION), (BS, BC, BQ))
        turned = (s < S)[:, None, None] & tl.trans(there)[None]
        flow_back(
            below, winner, sample[:, None, None], py, px, channel[None, None, :], tl.permute(back, (0, 2, 1)), turned,
            PW, CHANNELS, POSITIONS, 2, MARGIN, 2 * PH + 2 * MARGIN, 2 * PW + 2 * MARGIN, RAISED,
        )  # fmt: skip
    tl.store(gradient + r.to(tl.int64) * row + W1 + cut, tl.reshape(total, (BN, BC, BQ)), mask=wide)
