"""One AdamW step as a function: the Triton kernel where it can run, eager and a warning where it cannot."""

from __future__ import annotations

import torch

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend, choose, unsupported
from bridge.kernels.adamw.reference import reference

_missing: str | None = None
try:
    from bridge.kernels.adamw import kernel
except ImportError as error:  # triton is an optional dependency; every call then says so
    _missing = str(error)


def adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    backend: Backend = "auto",
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` in place; no autograd.

    Args:
        param: fp16, bf16 or fp32, any shape and strides.
        grad: same shape.
        exp_avg: running mean of the gradient, same shape.
        exp_avg_sq: running mean of its square, same shape.
        lr: learning rate.
        beta1: decay of `exp_avg`, in [0, 1).
        beta2: decay of `exp_avg_sq`, in [0, 1).
        eps: added to the bias-corrected root, outside it.
        weight_decay: share of the parameter taken off per unit of `lr`.
        step: number of this step, from 1 on.
        backend: "auto" warns once (KernelFallbackWarning) when it has to run eager; "kernel" raises
            KernelError instead; "eager" is the formula of `reference`.

    Raises:
        UsageError: shapes differ, or `step`, `beta1` or `beta2` is out of range.
    """
    tensors = (param, grad, exp_avg, exp_avg_sq)
    if any(tensor.shape != param.shape for tensor in tensors):
        raise UsageError(
            f"adamw_step needs four tensors of one shape, got {[tuple(tensor.shape) for tensor in tensors]}"
        )
    if step < 1 or not 0.0 <= beta1 < 1.0 or not 0.0 <= beta2 < 1.0:
        raise UsageError(f"adamw_step needs step >= 1 and betas in [0, 1), got {step}, {beta1} and {beta2}")
    with torch.no_grad():
        if choose("adamw_step", backend, _reason(*tensors)):
            kernel.adamw_step(*tensors, lr, beta1, beta2, eps, weight_decay, step)
            return
        results = reference(
            *tensors, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step
        )
        for place, result in zip((param, exp_avg, exp_avg_sq), results, strict=True):
            place.copy_(result)


def uses_kernel(param: torch.Tensor) -> bool:
    """Whether `adamw_step` with backend "auto" runs the Triton kernel on this parameter."""
    return _reason(param) is None


def _reason(*tensors: torch.Tensor) -> str | None:
    return unsupported(*tensors, missing=_missing, interpreted=_missing is None and kernel.INTERPRETED)
