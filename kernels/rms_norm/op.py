"""RMSNorm as a function: the Triton kernel where it can run, eager with a warning where it cannot."""

from __future__ import annotations

import torch

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend, choose, unsupported
from bridge.kernels.rms_norm.reference import reference

_missing: str | None = None
try:
    from bridge.kernels.rms_norm import kernel
except ImportError as error:  # triton is an optional dependency; every call then says so
    _missing = str(error)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, backend: Backend = "auto") -> torch.Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, differentiable in `x` and `weight`.

    Args:
        x: `[..., columns]`, fp16, bf16 or fp32, any strides.
        weight: `[columns]`.
        eps: added to the mean square, inside the root.
        backend: "auto" warns once (KernelFallbackWarning) when it has to run eager; "kernel" raises
            KernelError instead; "eager" is the formula of `reference`.

    Returns:
        `[..., columns]` in the dtype of `x`.

    Raises:
        UsageError: `weight` does not fit the last axis of `x`.
    """
    if weight.ndim != 1 or x.ndim == 0 or x.shape[-1] != weight.shape[0]:
        raise UsageError(
            f"rms_norm needs weight [columns] for x [..., columns], "
            f"got x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    if choose("rms_norm", backend, _reason(x, weight)):
        return kernel.rms_norm(x, weight, eps)[0]  # type: ignore[no-any-return]
    return reference(x, weight, eps=eps)


def uses_kernel(x: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
    """Whether `rms_norm` with backend "auto" runs the Triton kernel on these tensors."""
    return _reason(x, x if weight is None else weight) is None


def _reason(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    reason = unsupported(x, weight, missing=_missing, interpreted=_missing is None and kernel.INTERPRETED)
    if reason is None and x.shape[-1] > kernel.MAX_COLUMNS:
        return f"a row may have {kernel.MAX_COLUMNS} columns, got {x.shape[-1]}"
    return reason
