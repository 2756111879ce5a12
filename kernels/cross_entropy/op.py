"""Cross-entropy as a function: the Triton kernel where it can run, eager with a warning where it cannot."""

from __future__ import annotations

import torch

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend, choose, unsupported
from bridge.kernels.cross_entropy.reference import reference

REDUCTIONS = ("none", "sum", "mean")

_missing: str | None = None
try:
    from bridge.kernels.cross_entropy import kernel
except ImportError as error:  # triton is an optional dependency; every call then says so
    _missing = str(error)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    backend: Backend = "auto",
) -> torch.Tensor:
    """Cross-entropy of `logits` against class indices, in fp32, differentiable in `logits`.

    Args:
        logits: `[..., classes]`, fp16, bf16 or fp32, any strides.
        target: `[...]` int64. A label that is neither a class nor `ignore_index` makes its loss NaN.
        ignore_index: rows with this label have loss 0 and gradient 0.
        label_smoothing: share of the target spread evenly over all classes, in [0, 1].
        reduction: "none", "sum" or "mean" (over the rows that are not ignored; NaN when all are).
        backend: "auto" warns once (KernelFallbackWarning) when it has to run eager; "kernel" raises
            KernelError instead; "eager" is the formula of `reference`.

    Returns:
        fp32; `[...]` for "none", a scalar otherwise.

    Raises:
        UsageError: shapes, dtypes or options do not fit, or there is no class.
    """
    fits = logits.ndim > 0 and target.shape == logits.shape[:-1] and logits.shape[-1] > 0
    if not fits or target.dtype != torch.int64:
        raise UsageError(
            f"cross_entropy needs int64 target [...] for logits [..., classes >= 1], "
            f"got logits {tuple(logits.shape)} and target {tuple(target.shape)} {target.dtype}"
        )
    if reduction not in REDUCTIONS or not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(
            f"cross_entropy needs reduction among {', '.join(REDUCTIONS)} and label_smoothing in [0, 1], "
            f"got {reduction!r} and {label_smoothing!r}"
        )
    if not choose("cross_entropy", backend, _reason(logits, target)):
        return reference(
            logits,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    loss: torch.Tensor = kernel.cross_entropy(logits, target, ignore_index, label_smoothing)[0]
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def uses_kernel(logits: torch.Tensor) -> bool:
    """Whether `cross_entropy` with backend "auto" runs the Triton kernel on these logits."""
    return _reason(logits) is None


def _reason(logits: torch.Tensor, *target: torch.Tensor) -> str | None:
    interpreted = _missing is None and kernel.INTERPRETED
    return unsupported(logits, missing=_missing, interpreted=interpreted, indices=target)
