"""Triton kernels and operators that the tests of launches run; @triton.jit needs them in a file."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, y_ptr, scale, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, x * scale, mask=offsets < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def tuned_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) + 1, mask=offsets < n)


def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x * scale by one launch of two or more programs."""
    y = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 32),)](x, y, scale, x.numel(), BLOCK=32)
    return y


def tuned(x: torch.Tensor) -> torch.Tensor:
    """x + 1 by an autotuned kernel."""
    y = torch.empty_like(x)
    tuned_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y


class Scale(torch.autograd.Function):
    """Raw launches in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return scaled(x, 3.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return scaled(grads[0].contiguous(), 3.0)


@torch.library.triton_op("bridge_tests::scale", mutates_args=())
def scale_op(x: torch.Tensor) -> torch.Tensor:
    """The same as a registered operator."""
    return scaled(x, 3.0)
