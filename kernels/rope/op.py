"""Rotary embedding as a function: the Triton kernel where it can run, eager and a warning where not."""

from __future__ import annotations

import torch

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend, choose, unsupported
from bridge.kernels.rope.reference import reference

_missing: str | None = None
try:
    from bridge.kernels.rope import kernel
except ImportError as error:  # triton is an optional dependency; every call then says so
    _missing = str(error)


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Rotate the leading columns of every head by its token's angles, differentiable in `x`.

    Args:
        x: `[..., heads, columns]`, fp16, bf16 or fp32, any strides.
        cos: `[table, pairs]` with `2 * pairs <= columns`; fp32 keeps long positions right (see `table`).
        sin: like `cos`.
        positions: `[...]` int64 or int32, rows of the table; the kernel makes a row outside it NaN.
        interleaved: a pair is columns (2 i, 2 i + 1) rather than (i, i + pairs).
        backend: "auto" warns once (KernelFallbackWarning) when it has to run eager; "kernel" raises
            KernelError instead; "eager" is the formula of `reference`.

    Returns:
        Same shape and dtype as `x`.

    Raises:
        UsageError: shapes do not fit, or `positions` are no int64 or int32.
    """
    fits = x.ndim >= 2 and positions.shape == x.shape[:-2] and cos.ndim == 2 and cos.shape == sin.shape
    fits = fits and positions.dtype in (torch.int64, torch.int32)
    if not fits or 2 * cos.shape[1] > x.shape[-1]:
        raise UsageError(
            f"rope needs cos, sin [table, pairs], int64 or int32 positions [...] and "
            f"x [..., heads, columns >= 2 * pairs], got x {tuple(x.shape)}, cos {tuple(cos.shape)}, "
            f"sin {tuple(sin.shape)}, positions {tuple(positions.shape)} {positions.dtype}"
        )
    if not choose("rope", backend, _reason(x, cos, sin, positions)):
        return reference(x, cos, sin, positions, interleaved=interleaved)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return kernel.rope(x, cos, sin, positions, interleaved, False)  # type: ignore[no-any-return]


def uses_kernel(x: torch.Tensor) -> bool:
    """Whether `rope` with backend "auto" runs the Triton kernel on this tensor."""
    return _reason(x, x, x) is None


def _reason(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *positions: torch.Tensor) -> str | None:
    interpreted = _missing is None and kernel.INTERPRETED
    reason = unsupported(x, cos, sin, missing=_missing, interpreted=interpreted, indices=positions)
    if reason is None and (cos.requires_grad or sin.requires_grad):
        return "the kernel gives no gradient for cos and sin"
    return reason
