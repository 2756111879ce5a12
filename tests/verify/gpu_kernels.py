"""Kernels for what only a GPU has: TF32, native bfloat16, atomics in any order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(  # type: ignore[no-untyped-def]
    a, b, c, M, N, K, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        inner = start + tl.arange(0, BK)
        left = tl.load(
            a + rows[:, None] * K + inner[None, :],
            mask=(rows[:, None] < M) & (inner[None, :] < K),
            other=0.0,
        )
        right = tl.load(
            b + inner[:, None] * N + cols[None, :],
            mask=(inner[:, None] < K) & (cols[None, :] < N),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    tl.store(c + rows[:, None] * N + cols[None, :], total, mask=(rows[:, None] < M) & (cols[None, :] < N))


def matmul(a: torch.Tensor, b: torch.Tensor, precision: str) -> torch.Tensor:
    a, b = a.contiguous(), b.contiguous()
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(a.shape[0], 32), triton.cdiv(b.shape[1], 32))
    matmul_kernel[grid](a, b, c, a.shape[0], b.shape[1], a.shape[1], PRECISION=precision, BM=32, BN=32, BK=32)
    return c


@triton.jit
def silu_kernel(x, y, n, EARLY: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-value))
    if EARLY:
        gate = gate.to(tl.bfloat16).to(tl.float32)
    tl.store(y + at, (value * gate).to(y.dtype.element_ty), mask=at < n)


def silu(x: torch.Tensor, early: bool) -> torch.Tensor:
    dense, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    silu_kernel[(triton.cdiv(x.numel(), 256),)](dense, y, x.numel(), EARLY=early, BLOCK=256)
    return y


@triton.jit
def column_sum_kernel(x, y, M, N, lost, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    keep = (rows[:, None] < M - lost) & (cols[None, :] < N)
    part = tl.sum(tl.load(x + rows[:, None] * N + cols[None, :], mask=keep, other=0.0), axis=0)
    tl.atomic_add(y + cols, part, mask=cols < N)


def column_sum(x: torch.Tensor, lost: int) -> torch.Tensor:
    """Sum over rows; every block of rows adds its part with an atomic, in the order the blocks finish."""
    dense, y = x.contiguous(), torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(x.shape[1])
    column_sum_kernel[(triton.cdiv(x.shape[0], 4),)](
        dense, y, x.shape[0], x.shape[1], lost, ROWS=4, COLS=width
    )
    return y
