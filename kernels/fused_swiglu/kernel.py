"""SwiGLU in Triton: `silu(gate) * up`, forward and backward, in tiles of a matrix.

Gate and up are often two halves of one buffer, so every operand is read with its own strides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge.kernels._launch import INTERPRETED, as_matrix, kernel_op, matrix_grid, narrow, wrap_triton
from bridge.kernels._math import read, sigmoid

__all__ = ["INTERPRETED", "swiglu", "swiglu_backward"]


@triton.jit
def swiglu_forward_kernel(
    gate_ptr, up_ptr, y_ptr, rows, columns,
    gate_row, gate_column, up_row, up_column,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of y, which is contiguous."""
    PRECISE: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    # The offset of a row can pass 2^31 elements, and so can that of a column in a transposed matrix.
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    inside = (row < rows) & (column < columns)
    gate = read(gate_ptr + row * gate_row + column * gate_column, inside, PRECISE)
    up = read(up_ptr + row * up_row + column * up_column, inside, PRECISE)
    y = gate * sigmoid(gate, PRECISE) * up
    tl.store(y_ptr + row * columns + column, narrow(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, rows, columns,
    grad_row, grad_column, gate_row, gate_column, up_row, up_column,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of grad_gate and grad_up, both contiguous."""
    PRECISE: tl.constexpr = grad_gate_ptr.dtype.element_ty == tl.float32
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    inside = (row < rows) & (column < columns)
    grad = read(grad_ptr + row * grad_row + column * grad_column, inside, PRECISE)
    gate = read(gate_ptr + row * gate_row + column * gate_column, inside, PRECISE)
    up = read(up_ptr + row * up_row + column * up_column, inside, PRECISE)
    s = sigmoid(gate, PRECISE)
    slope = s * (1.0 + gate * (1.0 - s))
    at = row * columns + column
    tl.store(grad_gate_ptr + at, narrow(grad * up * slope, grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + at, narrow(grad * (gate * s), grad_up_ptr.dtype.element_ty), mask=inside)


@kernel_op("bridge::swiglu")
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Forward.

    Args:
        gate: `[..., columns]`, any strides.
        up: like `gate`.

    Returns:
        `[..., columns]`, contiguous, in the dtype of `gate`.
    """
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    g, u = as_matrix(gate), as_matrix(up)
    rows, columns = g.shape
    if y.numel():
        grid, tile, block, warps = matrix_grid(rows, columns)
        wrap_triton(swiglu_forward_kernel)[grid](
            g, u, y, rows, columns, g.stride(0), g.stride(1), u.stride(0), u.stride(1),
            TILE=tile, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return y


@kernel_op("bridge::swiglu_backward")
def swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backward.

    Args:
        grad: upstream gradient `[..., columns]`, any strides.
        gate: input of the forward, same shape.
        up: input of the forward, same shape.

    Returns:
        grad_gate and grad_up, contiguous, in the dtypes of `gate` and `up`.
    """
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    d, g, u = as_matrix(grad), as_matrix(gate), as_matrix(up)
    rows, columns = g.shape
    if grad_gate.numel():
        grid, tile, block, warps = matrix_grid(rows, columns)
        wrap_triton(swiglu_backward_kernel)[grid](
            d, g, u, grad_gate, grad_up, rows, columns,
            d.stride(0), d.stride(1), g.stride(0), g.stride(1), u.stride(0), u.stride(1),
            TILE=tile, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return grad_gate, grad_up


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return swiglu_backward(grad, *ctx.saved_tensors)


swiglu.register_autograd(_backward, setup_context=_setup_context)
