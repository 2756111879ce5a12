"""An OffsetRMSNorm kernel with one deliberate fault, for the demo: its backward forgets the `1 +`.

The forward is the good kernel, so the loss of the first step is right. The gradient of the input is
computed with the gain `weight` where it must be `1 + weight`: it points the wrong way and is about
ten times too small, so training leaves the baseline within a few steps.

    bridge verify --kernel broken_kernel.py --from capture/
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from bridge.kernels.offset_rmsnorm import kernel as good
from bridge.kernels.offset_rmsnorm.spec import SPEC as GOOD_SPEC


@triton.jit
def broken_grad_input_kernel(
    grad_ptr, x_ptr, weight_ptr, rstd_ptr, grad_x_ptr, rows, columns, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """One tile of contiguous rows: the gradient of x, in fp32 inside."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    # The fault: the forward scaled the row by 1 + weight.
    gain = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    scaled = grad * gain[None, :]
    unit = x * rstd[:, None]
    mean = tl.sum(scaled * unit, axis=1) / columns
    grad_x = (scaled - unit * mean[:, None]) * rstd[:, None]
    tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)


class BrokenNorm(torch.autograd.Function):
    """Good forward, good weight gradient, broken input gradient; launched without a dispatcher op."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`[..., columns]` and `[columns]` to `[..., columns]`."""
        y, rstd = good.offset_rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Gradients of x and weight."""
        x, weight, rstd = ctx.saved_tensors
        _, grad_weight = good.offset_rms_norm_backward(grad, x, weight, rstd)
        rows, upstream = x.contiguous(), grad.contiguous()
        grad_x = torch.empty_like(rows)
        columns = x.shape[-1]
        count = x.numel() // columns
        tile = 16
        broken_grad_input_kernel[(triton.cdiv(count, tile),)](
            upstream,
            rows,
            weight,
            rstd,
            grad_x,
            count,
            columns,
            TILE=tile,
            BLOCK=triton.next_power_of_2(columns),
        )
        return grad_x, grad_weight, None


def broken_offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """`(1 + weight) * x / sqrt(mean(x^2) + eps)`, with a wrong gradient."""
    return BrokenNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


SPEC = dataclasses.replace(
    GOOD_SPEC,
    target=broken_offset_rms_norm,
    sites=("BrokenOffsetRMSNorm", *GOOD_SPEC.sites),
)
