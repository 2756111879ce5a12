"""LayerNorm as a function: the Triton kernel where it can run, eager with a warning where it cannot."""

from __future__ import annotations

import torch

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend, choose, unsupported
from bridge.kernels.layer_norm.reference import reference

_missing: str | None = None
try:
    from bridge.kernels.layer_norm import kernel
except ImportError as error:  # triton is an optional dependency; every call then says so
    _missing = str(error)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float, backend: Backend = "auto"
) -> torch.Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last axis, differentiable in all three.

    Args:
        x: `[..., columns]`, fp16, bf16 or fp32, any strides.
        weight: `[columns]`.
        bias: `[columns]`, in the dtype of `weight`.
        eps: added to the variance, inside the root.
        backend: "auto" warns once (KernelFallbackWarning) when it has to run eager; "kernel" raises
            KernelError instead; "eager" is the formula of `reference`.

    Returns:
        `[..., columns]` in the dtype of `x`.

    Raises:
        UsageError: `weight` or `bias` does not fit the last axis of `x`.
    """
    if weight.ndim != 1 or x.ndim == 0 or x.shape[-1] != weight.shape[0] or bias.shape != weight.shape:
        raise UsageError(
            f"layer_norm needs weight [columns] and bias [columns] for x [..., columns], "
            f"got x {tuple(x.shape)}, weight {tuple(weight.shape)} and bias {tuple(bias.shape)}"
        )
    if choose("layer_norm", backend, _reason(x, weight, bias)):
        return kernel.layer_norm(x, weight, bias, eps)[0]  # type: ignore[no-any-return]
    return reference(x, weight, bias, eps=eps)


def uses_kernel(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> bool:
    """Whether `layer_norm` with backend "auto" runs the Triton kernel on these tensors."""
    weight = x if weight is None else weight
    return _reason(x, weight, weight if bias is None else bias) is None


def _reason(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> str | None:
    interpreted = _missing is None and kernel.INTERPRETED
    reason = unsupported(x, weight, bias, missing=_missing, interpreted=interpreted)
    if reason is None and bias.dtype != weight.dtype:
        return f"weight and bias must share one dtype, got {weight.dtype} and {bias.dtype}"
    if reason is None and x.shape[-1] > kernel.MAX_COLUMNS:
        return f"a row may have {kernel.MAX_COLUMNS} columns, got {x.shape[-1]}"
    return reason
