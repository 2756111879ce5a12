"""GeGLU in Triton: `gelu(gate) * up`, forward and backward, in tiles of a matrix.

`(1 + erf) / 2` and `(1 + tanh) / 2` lose all digits for negative gates, so the first is computed as erfc
there and the second as a sigmoid. Every operand is read with its own strides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge.kernels._launch import INTERPRETED, as_matrix, kernel_op, matrix_grid, narrow, wrap_triton
from bridge.kernels._math import exp, read, sigmoid

__all__ = ["INTERPRETED", "geglu", "geglu_backward"]


@triton.jit
def normal_cdf(x, PRECISE: tl.constexpr):
    """Share of the standard normal below x, with full relative accuracy in the left tail, and its density.

    The share below -a is exp(-a^2 / 2), which the density has too, times a function that falls slowly from
    1/2: a polynomial in 1 / (1 + 0.275 a), right to 6e-8.
    """
    bell = exp(-0.5 * x * x, PRECISE)
    if PRECISE:
        below = double_cdf(x)
    else:
        t = 1.0 / (1.0 + 0.275 * tl.abs(x))
        p = 0.027167358
        p = p * t - 0.11067285
        p = p * t + 0.13016614
        p = p * t - 0.035157814
        p = p * t + 0.088005057
        p = p * t + 0.078936731
        p = p * t + 0.1021903
        p = p * t + 0.10965437
        p = p * t + 0.10971069
        tail = bell * (p * t)
        below = tl.where(x < 0.0, tail, 1.0 - tail)
    return below, 0.3989422804014327 * bell


@triton.jit
def double_cdf(x):
    """The same in fp64, right to fp32.

    The far tail is a rational-exponential fit of erfc (relative error 1.2e-7, Numerical Recipes 6.2.2).
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.5 * z)
    p = 0.17087277
    p = p * t - 0.82215223
    p = p * t + 1.48851587
    p = p * t - 1.13520398
    p = p * t + 0.27886807
    p = p * t - 0.18628806
    p = p * t + 0.09678418
    p = p * t + 0.37409196
    p = p * t + 1.00002368
    p = p * t - 1.26551223
    tail = 0.5 * t * tl.exp(p - z * z)
    # The plain form has digits enough down to here.
    return tl.where(x < -5.5, tail, 0.5 + 0.5 * tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_and_slope(x, TANH: tl.constexpr, PRECISE: tl.constexpr):
    """gelu(x) and its derivative."""
    if TANH:
        # (1 + tanh(u)) / 2 is sigmoid(2 u).
        square = x * x
        s = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square), PRECISE)
        slope = s + x * s * (1.0 - s) * (1.5957691216057308 * (1.0 + 0.134145 * square))
        return x * s, slope
    else:  # noqa: RET505  (Triton compiles what follows a return as well)
        phi, density = normal_cdf(x, PRECISE)
        return x * phi, phi + x * density


@triton.jit
def geglu_forward_kernel(
    gate_ptr, up_ptr, y_ptr, rows, columns,
    gate_row, gate_column, up_row, up_column,
    TANH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of y, which is contiguous."""
    PRECISE: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    # The offset of a row can pass 2^31 elements, and so can that of a column in a transposed matrix.
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    inside = (row < rows) & (column < columns)
    gate = read(gate_ptr + row * gate_row + column * gate_column, inside, PRECISE)
    up = read(up_ptr + row * up_row + column * up_column, inside, PRECISE)
    value, _ = gelu_and_slope(gate, TANH, PRECISE)
    tl.store(y_ptr + row * columns + column, narrow(value * up, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def geglu_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, rows, columns,
    grad_row, grad_column, gate_row, gate_column, up_row, up_column,
    TANH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of grad_gate and grad_up, both contiguous."""
    PRECISE: tl.constexpr = grad_gate_ptr.dtype.element_ty == tl.float32
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    inside = (row < rows) & (column < columns)
    grad = read(grad_ptr + row * grad_row + column * grad_column, inside, PRECISE)
    gate = read(gate_ptr + row * gate_row + column * gate_column, inside, PRECISE)
    up = read(up_ptr + row * up_row + column * up_column, inside, PRECISE)
    value, slope = gelu_and_slope(gate, TANH, PRECISE)
    at = row * columns + column
    tl.store(grad_gate_ptr + at, narrow(grad * up * slope, grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + at, narrow(grad * value, grad_up_ptr.dtype.element_ty), mask=inside)


@kernel_op("bridge::geglu")
def geglu(gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor:
    """Forward.

    Args:
        gate: `[..., columns]`, any strides.
        up: like `gate`.
        tanh: the tanh approximation in place of the exact gelu.

    Returns:
        `[..., columns]`, contiguous, in the dtype of `gate`.
    """
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    g, u = as_matrix(gate), as_matrix(up)
    rows, columns = g.shape
    if y.numel():
        grid, tile, block, warps = matrix_grid(rows, columns)
        wrap_triton(geglu_forward_kernel)[grid](
            g, u, y, rows, columns, g.stride(0), g.stride(1), u.stride(0), u.stride(1),
            TANH=tanh, TILE=tile, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return y


@kernel_op("bridge::geglu_backward")
def geglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backward.

    Args:
        grad: upstream gradient `[..., columns]`, any strides.
        gate: input of the forward, same shape.
        up: input of the forward, same shape.
        tanh: as in the forward.

    Returns:
        grad_gate and grad_up, contiguous, in the dtypes of `gate` and `up`.
    """
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    d, g, u = as_matrix(grad), as_matrix(gate), as_matrix(up)
    rows, columns = g.shape
    if grad_gate.numel():
        grid, tile, block, warps = matrix_grid(rows, columns)
        wrap_triton(geglu_backward_kernel)[grid](
            d, g, u, grad_gate, grad_up, rows, columns,
            d.stride(0), d.stride(1), g.stride(0), g.stride(1), u.stride(0), u.stride(1),
            TANH=tanh, TILE=tile, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return grad_gate, grad_up


def _setup_context(ctx, inputs, output):
    gate, up, ctx.tanh = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, grad):
    grad_gate, grad_up = geglu_backward(grad, *ctx.saved_tensors, ctx.tanh)
    return grad_gate, grad_up, None


geglu.register_autograd(_backward, setup_context=_setup_context)
