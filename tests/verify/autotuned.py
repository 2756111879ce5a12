"""An autotuned kernel with two configurations, one of which may be wrong."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": 32}, num_warps=1), triton.Config({"BLOCK": 64}, num_warps=1)]


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def double_kernel(x, y, n, wrong_block, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0) * 2.0
    # One configuration loses the last element of its blocks.
    lost = (BLOCK == wrong_block) & (at % BLOCK == BLOCK - 1)
    tl.store(y + at, tl.where(lost, 0.0, value), mask=at < n)


def double(x: torch.Tensor, wrong_block: int = 0) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dense = x.contiguous()

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(x.numel(), meta["BLOCK"]),)

    double_kernel[grid](dense, y, x.numel(), wrong_block)
    return y
