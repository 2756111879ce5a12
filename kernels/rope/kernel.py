"""Rotary position embedding in Triton. The backward is the same kernel turning the other way.

Rows are heads of tokens; each looks up its token's position and that position's cos and sin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge.kernels._launch import (
    INTERPRETED,
    column_block,
    kernel_op,
    narrow,
    rows_per_tile,
    warps_for,
    widen,
    wrap_triton,
)
from bridge.kernels._math import deepen, read

__all__ = ["INTERPRETED", "rope"]


@triton.jit
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, y_ptr,
    rows, heads, columns, pairs, table, x_token, x_head, x_column, table_row, table_column,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of rows; y is contiguous."""
    PRECISE: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    # An offset can pass 2^31 elements, that of a column too where x is transposed.
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    token = row // heads
    position = tl.load(positions_ptr + token, mask=row < rows, other=0)
    pair = tl.arange(0, BLOCK).to(tl.int64)
    inside = (row < rows)[:, None] & (pair < pairs)[None, :]
    # A position outside the table reads nothing and shows as NaN.
    known = inside & ((position >= 0) & (position < table))[:, None]
    at = position.to(tl.int64)[:, None] * table_row + pair[None, :] * table_column
    c = deepen(widen(tl.load(cos_ptr + at, mask=known, other=float("nan"))), PRECISE)
    s = deepen(widen(tl.load(sin_ptr + at, mask=known, other=float("nan"))), PRECISE)
    if INVERSE:
        s = -s
    x_row = x_ptr + (token * x_token + (row % heads) * x_head)[:, None]
    y_row = y_ptr + (row * columns)[:, None]
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if INTERLEAVED:
        # Both of a pair come in one wide load: every other column would waste half of what memory delivers.
        column = tl.arange(0, 2 * BLOCK).to(tl.int64)
        rotated = (row < rows)[:, None] & (column < 2 * pairs)[None, :]
        both = read(x_row + column[None, :] * x_column, rotated, PRECISE)
        first, second = tl.split(tl.reshape(both, (TILE, BLOCK, 2)))
        turned = tl.join(first * c - second * s, second * c + first * s)
        tl.store(y_row + column[None, :], narrow(tl.reshape(turned, (TILE, 2 * BLOCK)), dtype), mask=rotated)
    else:
        first_at = pair[None, :]
        second_at = first_at + pairs
        first = read(x_row + first_at * x_column, inside, PRECISE)
        second = read(x_row + second_at * x_column, inside, PRECISE)
        tl.store(y_row + first_at, narrow(first * c - second * s, dtype), mask=inside)
        tl.store(y_row + second_at, narrow(second * c + first * s, dtype), mask=inside)
    if REST > 0:
        column = (2 * pairs + tl.arange(0, REST)).to(tl.int64)
        beyond = (row < rows)[:, None] & (column < columns)[None, :]
        kept = tl.load(x_row + column[None, :] * x_column, mask=beyond, other=0.0)
        tl.store(y_row + column[None, :], kept, mask=beyond)


@kernel_op("bridge::rope")
def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    inverse: bool,
) -> torch.Tensor:
    """Rotate.

    Args:
        x: `[..., heads, columns]`, any strides.
        cos: `[table, pairs]`, any strides.
        sin: like `cos`, same strides.
        positions: `[...]` integers; one outside the table makes its row NaN.
        interleaved: a pair is columns (2 i, 2 i + 1) rather than (i, i + pairs).
        inverse: turn the other way, as the backward does.

    Returns:
        `[..., heads, columns]`, contiguous, in the dtype of `x`.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads, columns = x.shape[-2:]
    pairs = cos.shape[1]
    rows = y.numel() // max(columns, 1)
    if y.numel():
        source = x.reshape(rows // heads, heads, columns)
        block = column_block(pairs)
        tile = rows_per_tile(block, elements=1024)
        rest = columns - 2 * pairs
        wrap_triton(rope_kernel)[(triton.cdiv(rows, tile),)](
            source, cos, sin, positions.contiguous(), y, rows, heads, columns, pairs, cos.shape[0],
            source.stride(0), source.stride(1), source.stride(2), cos.stride(0), cos.stride(1),
            INTERLEAVED=interleaved, INVERSE=inverse, REST=column_block(rest) if rest else 0,
            TILE=tile, BLOCK=block, num_warps=warps_for(2 * tile * block),
        )  # fmt: skip
    return y


def _setup_context(ctx, inputs, output):
    _, cos, sin, positions, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx, grad):
    grad_x = rope(grad, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse)
    return grad_x, None, None, None, None, None


rope.register_autograd(_backward, setup_context=_setup_context)
