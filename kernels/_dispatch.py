"""Kernel or eager: the choice every operator here makes, and makes visibly. Imports no triton."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
from torch.autograd import forward_ad

from bridge.errors import KernelError, UsageError

Backend = Literal["auto", "kernel", "eager"]
BACKENDS = ("auto", "kernel", "eager")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class KernelFallbackWarning(UserWarning):
    """An operator ran its eager formula because the kernel cannot serve these tensors."""


def unsupported(
    *tensors: torch.Tensor, missing: str | None, interpreted: bool, indices: Sequence[torch.Tensor] = ()
) -> str | None:
    """Why no kernel can run on `tensors`, in words, or None when one can.

    missing: why the kernel module did not import, or None. interpreted: kernels run on the CPU interpreter.
    indices: integer tensors that the kernel reads too.
    """
    if missing is not None:
        return f"triton is not available ({missing})"
    for tensor in (*tensors, *indices):
        if not interpreted and not tensor.is_cuda:
            return f"a compiled kernel needs CUDA, got {tensor.device}; TRITON_INTERPRET=1 runs it on the CPU"
        if tensor.device != tensors[0].device:
            return f"tensors must share one device, got {tensors[0].device} and {tensor.device}"
        if type(tensor).__name__ == "DTensor":
            return "a kernel needs plain tensors, got a DTensor; the overrides hand over its local shards"
        if tensor.layout != torch.strided:
            return f"a kernel needs strided tensors, got {tensor.layout}"
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            return f"dtype must be float16, bfloat16 or float32, got {tensor.dtype}"
        if _has_tangent(tensor):
            return "a kernel has no forward-mode derivative, and a tensor has a tangent"
    return None


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode derivatives are asked for; an op without a formula drops them silently."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def choose(name: str, backend: Backend, reason: str | None) -> bool:
    """True: run the kernel. False: run eager, having said so.

    Raises KernelError when `backend` is "kernel" and `reason` says it cannot run.
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend of {name} must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "eager":
        return False
    if reason is None:
        return True
    if backend == "kernel":
        raise KernelError(
            f'{name} was asked for its kernel, which cannot run here: {reason}; use backend="auto"'
        )
    if torch.compiler.is_compiling():
        # Imported here because it pulls in torch._dynamo, which takes seconds and is loaded by now.
        from bridge.kernels._traced import warn_fallback_once as warn
    else:
        warn = warn_fallback
    warn(name, reason)
    return False


@cache
def warn_fallback(name: str, reason: str) -> None:
    """Say once per operator and reason that eager runs."""
    warnings.warn(
        f"{name} runs its eager formula, not the kernel: {reason}", KernelFallbackWarning, stacklevel=4
    )
