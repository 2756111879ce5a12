"""Small Triton kernels of bench_localisation: right (FAULT = 0), or wrong in one way. A tile of rows each."""

from __future__ import annotations

import triton
import triton.language as tl

#: Faults of the kernels below, as their FAULT argument has them.
RIGHT, FP16_OFFSET, EPS_OUTSIDE, PADDING, NO_OFFSET_GRAD, TAIL_LOST, TRUNCATED, STRIDE = range(8)
ONE_PASS, ZERO_PAD, IN_PLACE, FIRST_ROW = range(8, 12)


@triton.jit
def rms_forward(
    x_ptr, w_ptr, y_ptr, r_ptr, rows, cols, eps, FAULT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    col = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row[:, None] * cols + col[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    w = tl.load(w_ptr + col, mask=col < cols, other=0.0)
    count = cols
    if FAULT == 3:
        count = BLOCK
    mean = tl.sum(x * x, axis=1) / count
    if FAULT == 2:
        inverse = 1.0 / (tl.sqrt(mean) + tl.sqrt(eps + 0.0 * mean))
    else:
        inverse = 1.0 / tl.sqrt(mean + eps)
    gain = 1.0 + w
    if FAULT == 1:
        gain = (w.to(tl.float16) + 1.0).to(tl.float16).to(tl.float32)
    y = x * inverse[:, None] * gain[None, :]
    if FAULT == 6:
        y = (y.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    tl.store(y_ptr + at, y, mask=inside)
    tl.store(r_ptr + row, inverse, mask=row < rows)


@triton.jit
def rms_backward(
    g_ptr,
    x_ptr,
    w_ptr,
    r_ptr,
    dx_ptr,
    part_ptr,
    rows,
    cols,
    stride,
    FAULT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    col = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row[:, None] * cols + col[None, :]
    step = stride
    if FAULT == 7:
        step = cols
    g = tl.load(g_ptr + row[:, None] * step + col[None, :], mask=inside, other=0.0)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    w = tl.load(w_ptr + col, mask=col < cols, other=0.0)
    r = tl.load(r_ptr + row, mask=row < rows, other=0.0)
    gain = 1.0 + w
    if FAULT == 4:
        gain = w
    unit = x * r[:, None]
    scaled = g * gain[None, :]
    mean = tl.sum(scaled * unit, axis=1) / cols
    tl.store(dx_ptr + at, (scaled - unit * mean[:, None]) * r[:, None], mask=inside)
    tl.store(part_ptr + tl.program_id(0) * cols + col, tl.sum(g * unit, axis=0), mask=col < cols)


@triton.jit
def layer_forward(
    x_ptr, y_ptr, rows, cols, eps, FAULT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    col = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row[:, None] * cols + col[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    mean = tl.sum(x, axis=1) / cols
    centred = x - mean[:, None]
    if FAULT != 3:
        centred = tl.where(inside, centred, 0.0)
    variance = tl.sum(centred * centred, axis=1) / cols
    if FAULT == 8:
        variance = tl.sum(x * x, axis=1) / cols - mean * mean
    tl.store(y_ptr + at, centred / tl.sqrt(variance + eps)[:, None], mask=inside)


@triton.jit
def softmax_forward(x_ptr, y_ptr, rows, cols, FAULT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    col = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row[:, None] * cols + col[None, :]
    if FAULT == 9:
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
    else:
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf"))
    high = tl.max(x, axis=1)
    power = tl.where(inside, tl.exp(x - high[:, None]), 0.0)
    tl.store(y_ptr + at, power / tl.sum(power, axis=1)[:, None], mask=inside)


@triton.jit
def double_backward(g_ptr, dx_ptr, rows, cols, FAULT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    col = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row[:, None] * cols + col[None, :]
    source = at
    if FAULT == 11:
        source = 0 * row[:, None] + col[None, :]
    g = tl.load(g_ptr + source, mask=inside, other=0.0)
    tl.store(dx_ptr + at, 2.0 * g, mask=inside)
