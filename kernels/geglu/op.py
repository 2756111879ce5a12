"""GeGLU as a function: the Triton kernel where it can run, eager with a warning where it cannot."""

from __future__ import annotations

import torch

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend, choose, unsupported
from bridge.kernels.geglu.reference import reference

_missing: str | None = None
try:
    from bridge.kernels.geglu import kernel
except ImportError as error:  # triton is an optional dependency; every call then says so
    _missing = str(error)


def geglu(
    gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "none", backend: Backend = "auto"
) -> torch.Tensor:
    """`gelu(gate) * up`, differentiable in both.

    Args:
        gate: fp16, bf16 or fp32, at least one axis, any strides.
        up: same shape and dtype.
        approximate: "none" for the exact gelu, "tanh" for its approximation.
        backend: "auto" warns once (KernelFallbackWarning) when it has to run eager; "kernel" raises
            KernelError instead; "eager" is the formula of `reference`.

    Returns:
        Same shape and dtype as `gate`.

    Raises:
        UsageError: `gate` and `up` differ in shape or dtype, or `approximate` is neither.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.ndim == 0:
        raise UsageError(
            f"geglu needs gate and up of one shape [..., columns] and one dtype, "
            f"got {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )
    if approximate not in ("none", "tanh"):
        raise UsageError(f'geglu needs approximate "none" or "tanh", got {approximate!r}')
    if choose("geglu", backend, _reason(gate, up)):
        return kernel.geglu(gate, up, approximate == "tanh")  # type: ignore[no-any-return]
    return reference(gate, up, approximate=approximate)


def uses_kernel(gate: torch.Tensor, up: torch.Tensor | None = None) -> bool:
    """Whether `geglu` with backend "auto" runs the Triton kernel on these tensors."""
    return _reason(gate, gate if up is None else up) is None


def _reason(gate: torch.Tensor, up: torch.Tensor) -> str | None:
    return unsupported(gate, up, missing=_missing, interpreted=_missing is None and kernel.INTERPRETED)
