"""LayerNorm in Triton: forward, and backward for the input, the weight and the bias.

Both kernels hold whole rows in a tile, several when rows are short. The variance is taken from centred values
(a second pass over registers), because E[x^2] - E[x]^2 loses all digits when the mean is large. For the same
reason the mean is kept in two parts, `mean + shift`: rounded to one, it alone would cost digits. The
parameter gradients take two stages: fp32 partial sums per row block, then a fold in a fixed order.
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
from bridge.kernels._math import scalar
from bridge.kernels._reduce import fold, split_rows

__all__ = ["INTERPRETED", "MAX_COLUMNS", "layer_norm", "layer_norm_backward"]


@triton.jit
def layer_norm_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, shift_ptr, rstd_ptr, rows, columns, x_stride, eps,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of rows: y, and mean, shift and rstd in fp32 for the backward."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    # A row offset can pass 2^31 elements.
    row64 = row.to(tl.int64)
    x = widen(tl.load(x_ptr + row64[:, None] * x_stride + column[None, :], mask=inside, other=0.0))
    mean = tl.sum(x, axis=1) / columns
    # Lanes past the end would count as (0 - mean)^2, so they are cleared again.
    centred = tl.where(inside, x - mean[:, None], 0.0)
    shift = tl.sum(centred, axis=1) / columns
    centred = tl.where(inside, centred - shift[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / columns
    rstd = tl.div_rn(tl.full([TILE], 1.0, tl.float32), tl.sqrt_rn(variance + scalar(eps)))
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(shift_ptr + row, shift, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    weight = widen(tl.load(weight_ptr + column, mask=column < columns, other=0.0))
    bias = widen(tl.load(bias_ptr + column, mask=column < columns, other=0.0))
    y = centred * rstd[:, None] * weight[None, :] + bias[None, :]
    y_at = y_ptr + row64[:, None] * columns + column[None, :]
    tl.store(y_at, narrow(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, mean_ptr, shift_ptr, rstd_ptr, grad_x_ptr,
    partial_weight_ptr, partial_bias_ptr, rows, columns, grad_stride, x_stride,
    TILE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """TILES tiles of rows: grad_x, and this program's row of fp32 partial parameter gradients."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    in_columns = column < columns
    weight = widen(tl.load(weight_ptr + column, mask=in_columns, other=0.0))
    total_weight = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    total_bias = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    # With more than one stage the rows of the next step are fetched while this one is worked on.
    for step in tl.range(TILES, num_stages=STAGES):
        row = (program * TILES + step) * TILE + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & in_columns[None, :]
        row64 = row.to(tl.int64)
        x = widen(tl.load(x_ptr + row64[:, None] * x_stride + column[None, :], mask=inside, other=0.0))
        grad = widen(
            tl.load(grad_ptr + row64[:, None] * grad_stride + column[None, :], mask=inside, other=0.0)
        )
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        shift = tl.load(shift_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        unit = tl.where(inside, ((x - mean[:, None]) - shift[:, None]) * rstd[:, None], 0.0)
        total_weight += grad * unit
        total_bias += grad
        scaled = grad * weight[None, :]
        along = tl.sum(scaled * unit, axis=1) / columns
        level = tl.sum(scaled, axis=1) / columns
        grad_x = (scaled - level[:, None] - unit * along[:, None]) * rstd[:, None]
        grad_x_at = grad_x_ptr + row64[:, None] * columns + column[None, :]
        tl.store(grad_x_at, narrow(grad_x, grad_x_ptr.dtype.element_ty), mask=inside)
    at = program.to(tl.int64) * columns + column
    tl.store(partial_weight_ptr + at, tl.sum(total_weight, axis=0), mask=in_columns)
    tl.store(partial_bias_ptr + at, tl.sum(total_bias, axis=0), mask=in_columns)


@kernel_op("bridge::layer_norm")
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward.

    Args:
        x: `[..., columns]`, any strides.
        weight: `[columns]`.
        bias: `[columns]`.
        eps: added to the variance, inside the root.

    Returns:
        y `[..., columns]`, contiguous, in the dtype of `x`; mean, shift and rstd, each `[rows]` in fp32.
        The mean of a row is mean + shift.
    """
    source = as_rows(x)
    rows, columns = source.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    shift = torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows and columns:
        grid, tile, block, warps = row_grid(rows, columns)
        wrap_triton(layer_norm_forward_kernel)[grid](
            source, weight.contiguous(), bias.contiguous(), y, mean, shift, rstd,
            rows, columns, source.stride(0), eps,
            TILE=tile, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return y, mean, shift, rstd


@kernel_op("bridge::layer_norm_backward")
def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    shift: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward.

    Args:
        grad: upstream gradient `[..., columns]`, any strides.
        x: input of the forward, same shape.
        weight: `[columns]`.
        mean, shift, rstd: `[rows]` fp32, from the forward.

    Returns:
        grad_x like `x`, contiguous; grad_weight and grad_bias in the dtype of `weight`, summed in fp32.
    """
    source, upstream = as_rows(x), as_rows(grad)
    rows, columns = source.shape
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not rows or not columns:
        empty = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        return grad_x, empty, torch.zeros_like(empty)
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    grad_bias = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    split = split_rows(rows, columns, x.element_size() + grad.element_size())
    partial_weight = torch.empty((split.blocks, columns), dtype=torch.float32, device=x.device)
    partial_bias = torch.empty((split.blocks, columns), dtype=torch.float32, device=x.device)
    wrap_triton(layer_norm_backward_kernel)[(split.blocks,)](
        upstream, source, weight.contiguous(), mean, shift, rstd, grad_x, partial_weight, partial_bias,
        rows, columns, upstream.stride(0), source.stride(0),
        TILE=split.tile, TILES=split.tiles, STAGES=split.stages, BLOCK=split.block, num_warps=split.warps,
    )  # fmt: skip
    fold(partial_weight, grad_weight)
    fold(partial_bias, grad_bias)
    return grad_x, grad_weight, grad_bias


def _setup_context(ctx, inputs, output):
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    grad_x, grad_weight, grad_bias = layer_norm_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_weight, grad_bias, None


layer_norm.register_autograd(_backward, setup_context=_setup_context)
