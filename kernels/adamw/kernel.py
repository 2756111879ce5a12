"""One AdamW step in Triton: parameter and both moments are read once and written in place.

The moments are rounded to their dtypes only when they are stored; the update is made from the unrounded ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge.kernels._launch import INTERPRETED, kernel_op, narrow, wrap_triton
from bridge.kernels._math import read, scalar

__all__ = ["INTERPRETED", "adamw_step"]

_BLOCK = 1024


@triton.jit
def adamw_step_kernel(
    param_ptr, grad_ptr, mean_ptr, square_ptr, count, decay, step_size, root_correction,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of elements."""
    PRECISE: tl.constexpr = param_ptr.dtype.element_ty == tl.float32
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    param = read(param_ptr + at, inside, PRECISE)
    grad = read(grad_ptr + at, inside, PRECISE)
    mean = read(mean_ptr + at, inside, PRECISE)
    square = read(square_ptr + at, inside, PRECISE)
    mean = BETA1 * mean + (1.0 - BETA1) * grad
    square = BETA2 * square + (1.0 - BETA2) * grad * grad
    root = tl.sqrt(square) / scalar(root_correction) + EPS
    # `decay` is lr times weight_decay: 1 minus it would not survive as an fp32 argument.
    param = (param - scalar(decay) * param) - scalar(step_size) * (mean / root)
    tl.store(param_ptr + at, narrow(param, param_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + at, narrow(mean, mean_ptr.dtype.element_ty), mask=inside)
    tl.store(square_ptr + at, narrow(square, square_ptr.dtype.element_ty), mask=inside)


@kernel_op("bridge::adamw_step", mutates_args=("param", "exp_avg", "exp_avg_sq"))
def adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` in place.

    Args:
        param: any shape and strides.
        grad: like `param`.
        exp_avg: running mean of the gradient.
        exp_avg_sq: running mean of its square.
        lr: learning rate.
        beta1: decay of `exp_avg`.
        beta2: decay of `exp_avg_sq`.
        eps: added to the bias-corrected root, outside it.
        weight_decay: share of the parameter taken off per unit of `lr`.
        step: number of this step, from 1 on.
    """
    if not param.numel():
        return
    places = (param, exp_avg, exp_avg_sq)
    # A tensor with gaps or permuted axes is worked on as a dense copy and written back.
    dense = [place if place.is_contiguous() else place.contiguous() for place in places]
    wrap_triton(adamw_step_kernel)[(triton.cdiv(param.numel(), _BLOCK),)](
        dense[0], grad.contiguous(), dense[1], dense[2], param.numel(),
        lr * weight_decay, lr / (1.0 - beta1**step), (1.0 - beta2**step) ** 0.5,
        BETA1=beta1, BETA2=beta2, EPS=eps, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    for place, copy in zip(places, dense, strict=True):
        if copy is not place:
            place.copy_(copy)
