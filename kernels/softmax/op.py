"""Softmax as a function: the Triton kernel where it can run, eager with a warning where it cannot."""

from __future__ import annotations

import torch

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend, choose, unsupported
from bridge.kernels.softmax.reference import reference

_missing: str | None = None
try:
    from bridge.kernels.softmax import kernel
except ImportError as error:  # triton is an optional dependency; every call then says so
    _missing = str(error)


def softmax(x: torch.Tensor, *, dim: int = -1, backend: Backend = "auto") -> torch.Tensor:
    """Softmax over `dim`, differentiable.

    Args:
        x: fp16, bf16 or fp32, any shape and strides.
        dim: the axis that sums to one; any but the last is moved there and back.
        backend: "auto" warns once (KernelFallbackWarning) when it has to run eager; "kernel" raises
            KernelError instead; "eager" is the formula of `reference`.

    Returns:
        Same shape and dtype as `x`.

    Raises:
        UsageError: `x` has no axis, or none `dim`.
    """
    if x.ndim == 0:
        raise UsageError("softmax needs x with at least one axis, got a scalar")
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(
            f"softmax needs dim between {-x.ndim} and {x.ndim - 1} for x {tuple(x.shape)}, got {dim}"
        )
    if not choose("softmax", backend, _reason(x, dim)):
        return reference(x, dim=dim)
    if dim in (-1, x.ndim - 1):
        return kernel.softmax(x)[0]  # type: ignore[no-any-return]
    return kernel.softmax(x.movedim(dim, -1))[0].movedim(-1, dim)  # type: ignore[no-any-return]


def uses_kernel(x: torch.Tensor, dim: int = -1) -> bool:
    """Whether `softmax` with backend "auto" runs the Triton kernel on this tensor."""
    return _reason(x, dim) is None


def _reason(x: torch.Tensor, dim: int) -> str | None:
    reason = unsupported(x, missing=_missing, interpreted=_missing is None and kernel.INTERPRETED)
    if reason is None and x.shape[dim] > kernel.MAX_COLUMNS:
        return f"a row may have {kernel.MAX_COLUMNS} columns, got {x.shape[dim]}"
    return reason
