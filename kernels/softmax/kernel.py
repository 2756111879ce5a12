"""Softmax over the last axis in Triton, forward and backward.

A tile holds whole rows. The backward computes the probabilities again from the input and two fp32 numbers a
row, so that it never sees them rounded to 16 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge.kernels._launch import (
    INTERPRETED,
    MAX_COLUMNS,
    as_rows,
    kernel_op,
    narrow,
    row_grid,
    widen,
    wrap_triton,
)
from bridge.kernels._math import exp

__all__ = ["INTERPRETED", "MAX_COLUMNS", "softmax", "softmax_backward"]


@triton.jit
def softmax_forward_kernel(
    x_ptr, y_ptr, peak_ptr, scale_ptr, rows, columns, x_stride,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of rows: y = exp(x - peak) * scale; peak and scale in fp32 for the backward."""
    PRECISE: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    # A row offset can pass 2^31 elements.
    row64 = row.to(tl.int64)
    x = widen(tl.load(x_ptr + row64[:, None] * x_stride + column[None, :], mask=inside, other=0.0))
    # Lanes past the end must lose against any value; a 0 there would win over a row of negative ones.
    x = tl.where((column < columns)[None, :], x, float("-inf"))
    peak = tl.max(x, axis=1)
    e = exp(x - peak[:, None], PRECISE)
    total = tl.sum(e, axis=1)
    scale = tl.div_rn(tl.zeros_like(total) + 1.0, total)
    tl.store(peak_ptr + row, peak, mask=row < rows)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    if PRECISE:
        y = tl.div_rn(e, tl.broadcast_to(total[:, None], (TILE, BLOCK)))
    else:
        y = e * scale[:, None]
    y_at = y_ptr + row64[:, None] * columns + column[None, :]
    tl.store(y_at, narrow(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_kernel(
    grad_ptr, x_ptr, peak_ptr, scale_ptr, grad_x_ptr, rows, columns, grad_stride, x_stride,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of rows: grad_x = p * (grad - sum(grad * p))."""
    PRECISE: tl.constexpr = grad_x_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    row64 = row.to(tl.int64)
    x = widen(tl.load(x_ptr + row64[:, None] * x_stride + column[None, :], mask=inside, other=0.0))
    x = tl.where((column < columns)[None, :], x, float("-inf"))
    grad = widen(tl.load(grad_ptr + row64[:, None] * grad_stride + column[None, :], mask=inside, other=0.0))
    peak = tl.load(peak_ptr + row, mask=row < rows, other=0.0)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    p = exp(x - peak[:, None], PRECISE) * scale[:, None]
    along = tl.sum(grad * p, axis=1)
    grad_x = p * (grad - along[:, None])
    grad_x_at = grad_x_ptr + row64[:, None] * columns + column[None, :]
    tl.store(grad_x_at, narrow(grad_x, grad_x_ptr.dtype.element_ty), mask=inside)


@kernel_op("bridge::softmax")
def softmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward over the last axis.

    Args:
        x: `[..., columns]`, any strides.

    Returns:
        y `[..., columns]`, contiguous, in the dtype of `x`; peak and scale, both `[rows]` in fp32.
    """
    source = as_rows(x)
    rows, columns = source.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    peak = torch.empty(rows, dtype=torch.float32, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows and columns:
        grid, tile, block, warps = row_grid(rows, columns)
        wrap_triton(softmax_forward_kernel)[grid](
            source, y, peak, scale, rows, columns, source.stride(0),
            TILE=tile, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return y, peak, scale


@kernel_op("bridge::softmax_backward")
def softmax_backward(
    grad: torch.Tensor, x: torch.Tensor, peak: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Backward.

    Args:
        grad: upstream gradient `[..., columns]`, any strides.
        x: input of the forward, same shape.
        peak, scale: `[rows]` fp32, from the forward.

    Returns:
        grad_x like `x`, contiguous.
    """
    source, upstream = as_rows(x), as_rows(grad)
    rows, columns = source.shape
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows and columns:
        grid, tile, block, warps = row_grid(rows, columns)
        wrap_triton(softmax_backward_kernel)[grid](
            upstream, source, peak, scale, grad_x, rows, columns, upstream.stride(0), source.stride(0),
            TILE=tile, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return grad_x


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx, grad, *_):
    return softmax_backward(grad, *ctx.saved_tensors)


softmax.register_autograd(_backward, setup_context=_setup_context)
