"""Offset RMSNorm in Triton: forward, and backward for the input and the weight.

Both kernels hold whole rows in a tile, several when rows are short, so each row is read once. The weight
gradient takes two stages: every program sums its own rows in fp32, then a second kernel folds the partial
sums. The split depends on the shape alone, so results repeat from run to run and from GPU to GPU.
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

__all__ = ["INTERPRETED", "MAX_COLUMNS", "offset_rms_norm", "offset_rms_norm_backward"]


@triton.jit
def offset_rms_norm_forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, rows, columns, x_stride, eps,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of rows: y = (1 + weight) * x * rstd, and rstd in fp32 for the backward."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    # A row offset can pass 2^31 elements.
    row64 = row.to(tl.int64)
    x = widen(tl.load(x_ptr + row64[:, None] * x_stride + column[None, :], mask=inside, other=0.0))
    gain = 1.0 + widen(tl.load(weight_ptr + column, mask=column < columns, other=0.0))
    mean_square = tl.sum(x * x, axis=1) / columns
    rstd = tl.div_rn(tl.full([TILE], 1.0, tl.float32), tl.sqrt_rn(mean_square + scalar(eps)))
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = gain[None, :] * (x * rstd[:, None])
    y_at = y_ptr + row64[:, None] * columns + column[None, :]
    tl.store(y_at, narrow(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def offset_rms_norm_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, rstd_ptr, grad_x_ptr, partial_ptr, rows, columns, grad_stride, x_stride,
    TILE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """TILES tiles of rows: grad_x, and this program's row of fp32 partial weight gradients."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    in_columns = column < columns
    gain = 1.0 + widen(tl.load(weight_ptr + column, mask=in_columns, other=0.0))
    total = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    # With more than one stage the rows of the next step are fetched while this one is worked on.
    for step in tl.range(TILES, num_stages=STAGES):
        row = (program * TILES + step) * TILE + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & in_columns[None, :]
        row64 = row.to(tl.int64)
        x = widen(tl.load(x_ptr + row64[:, None] * x_stride + column[None, :], mask=inside, other=0.0))
        grad = widen(
            tl.load(grad_ptr + row64[:, None] * grad_stride + column[None, :], mask=inside, other=0.0)
        )
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        unit = x * rstd[:, None]
        total += grad * unit
        scaled = grad * gain[None, :]
        mean = tl.sum(scaled * unit, axis=1) / columns
        grad_x = (scaled - unit * mean[:, None]) * rstd[:, None]
        grad_x_at = grad_x_ptr + row64[:, None] * columns + column[None, :]
        tl.store(grad_x_at, narrow(grad_x, grad_x_ptr.dtype.element_ty), mask=inside)
    partial = tl.sum(total, axis=0)
    tl.store(partial_ptr + program.to(tl.int64) * columns + column, partial, mask=in_columns)


@kernel_op("bridge::offset_rms_norm")
def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward.

    Args:
        x: `[..., columns]`, any strides.
        weight: `[columns]`.
        eps: added to the mean square, inside the root.

    Returns:
        y `[..., columns]`, contiguous, in the dtype of `x`; rstd `[rows]` in fp32.
    """
    source = as_rows(x)
    rows, columns = source.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows and columns:
        grid, tile, block, warps = row_grid(rows, columns)
        wrap_triton(offset_rms_norm_forward_kernel)[grid](
            source, weight.contiguous(), y, rstd, rows, columns, source.stride(0), eps,
            TILE=tile, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return y, rstd


@kernel_op("bridge::offset_rms_norm_backward")
def offset_rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backward.

    Args:
        grad: upstream gradient `[..., columns]`, any strides.
        x: input of the forward, same shape.
        weight: `[columns]`.
        rstd: `[rows]` fp32, from the forward.

    Returns:
        grad_x like `x`, contiguous; grad_weight like `weight`, summed in fp32.
    """
    source, upstream = as_rows(x), as_rows(grad)
    rows, columns = source.shape
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not rows or not columns:
        return grad_x, torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    split = split_rows(rows, columns, x.element_size() + grad.element_size())
    partial = torch.empty((split.blocks, columns), dtype=torch.float32, device=x.device)
    wrap_triton(offset_rms_norm_backward_kernel)[(split.blocks,)](
        upstream, source, weight.contiguous(), rstd, grad_x, partial, rows, columns,
        upstream.stride(0), source.stride(0),
        TILE=split.tile, TILES=split.tiles, STAGES=split.stages, BLOCK=split.block, num_warps=split.warps,
    )  # fmt: skip
    fold(partial, grad_weight)
    return grad_x, grad_weight


def _setup_context(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _grad_rstd):
    x, weight, rstd = ctx.saved_tensors
    grad_x, grad_weight = offset_rms_norm_backward(grad, x, weight, rstd)
    return grad_x, grad_weight, None


offset_rms_norm.register_autograd(_backward, setup_context=_setup_context)
