"""KernelSpecs around the Triton kernels that torchtitan 0.3 ships in its overrides, unmodified.

    bridge verify --kernel tests/kernels/titan_overrides.py:SWIGLU     (or MLA_Q, MLA_KV)

The ops are registered for CUDA only. Under Triton's interpreter their bodies are registered for the CPU as
well, as they are; on a GPU nothing is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.overrides import fused_mla, fused_swiglu
from triton import knobs

from bridge.verify import KernelSpec

Tensor = torch.Tensor
Device = str | torch.device

if knobs.runtime.interpret:
    for _op in (
        fused_swiglu.silu_and_mul_op,
        fused_swiglu.silu_and_mul_backward_op,
        fused_mla._fused_mla_q_rope_op,
        fused_mla._fused_mla_k_rope_op,
        fused_mla._fused_mla_kv_backward_op,
    ):
        _op.register_kernel("cpu")(_op._init_fn)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Tensor:
    return torch.randn(shape, generator=generator, device=device).to(dtype)


# --- fused_swiglu: torchtitan::silu_and_mul -----------------------------------------------------------------


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """fp32 inside, one rounding at the end."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def swiglu_target(gate: Tensor, up: Tensor) -> Tensor:
    """torchtitan's op."""
    return fused_swiglu.silu_and_mul_op(gate, up)


def swiglu_sample(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> tuple[Tensor, ...]:
    """Gate and up from N(0, 1)."""
    return tuple(_normal(shape, dtype, generator, device) for _ in range(2))


SWIGLU = KernelSpec(
    name="torchtitan_silu_and_mul",
    reference=swiglu_reference,
    target=swiglu_target,
    sample=swiglu_sample,
    inputs=("gate", "up"),
    grads=("gate", "up"),
    outputs=("y",),
    kind="elementwise",
    shapes=((5, 255), (4, 256), (3, 257), (9, 2049)),
    dtypes=("bfloat16", "float16", "float32"),
    sites=("FusedSwiGLU", "torchtitan::silu_and_mul", "_silu_and_mul_forward_kernel"),
)


# --- fused_mla: rotary embedding of the query's tail, in place ----------------------------------------------

_TABLE = 64


def _rotate(x: Tensor, cache: Tensor, positions: Tensor) -> Tensor:
    """ComplexRoPE of `x` [batch, tokens, heads, columns], at least in fp32; `cache` [table, pairs, 2]."""
    wide = x if x.dtype == torch.float64 else x.float()
    c, s = cache.to(wide.dtype)[positions].unsqueeze(2).unbind(-1)
    even, odd = wide[..., ::2], wide[..., 1::2]
    return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2).to(x.dtype)


def _cache(columns: int, device: Device) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, columns, 2, dtype=torch.float64) / columns)
    angles = torch.outer(torch.arange(_TABLE, dtype=torch.float64), frequencies)
    return torch.stack((angles.cos(), angles.sin()), -1).float().to(device)


def _split(columns: int) -> tuple[int, int]:
    """Columns that are not rotated and that are, of a head: about two to one, as in DeepSeek V3."""
    rotated = max(2, 2 * (columns // 6))
    return max(columns - rotated, 1), rotated


def mla_q_reference(q_nope: Tensor, q_pe: Tensor, cache: Tensor, positions: Tensor) -> Tensor:
    """The head's first part as it is, its tail rotated."""
    return torch.cat((q_nope, _rotate(q_pe, cache, positions)), -1)


def mla_q_target(q_nope: Tensor, q_pe: Tensor, cache: Tensor, positions: Tensor) -> Tensor:
    """torchtitan's function works in place on the projection, here on a fresh one."""
    return fused_mla.fused_mla_q(
        torch.cat((q_nope, q_pe), -1), torch.view_as_complex(cache.contiguous()), positions, q_nope.shape[-1]
    )


def mla_q_sample(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> tuple[Tensor, ...]:
    """`shape` is [batch, tokens, heads, columns of a head]."""
    nope, rotated = _split(shape[-1])
    positions = torch.randint(0, _TABLE, shape[:2], generator=generator, device=device)
    parts = [_normal((*shape[:3], columns), dtype, generator, device) for columns in (nope, rotated)]
    return (*parts, _cache(rotated, device), positions)


MLA_Q = KernelSpec(
    name="torchtitan_fused_mla_q",
    reference=mla_q_reference,
    target=mla_q_target,
    sample=mla_q_sample,
    inputs=("q_nope", "q_pe", "cache", "positions"),
    grads=("q_nope", "q_pe"),
    outputs=("q",),
    kind="elementwise",
    shapes=((2, 3, 4, 48), (1, 5, 3, 96), (1, 2, 65, 24)),
    dtypes=("bfloat16", "float16", "float32"),
    sites=("torchtitan::fused_mla_q_rope_", "_fused_q_rope_kernel"),
)


# --- fused_mla: key assembled from the packed projection and the shared rotary part -------------------------


def mla_kv_reference(kv: Tensor, k_pe: Tensor, cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Key [.., nope + rotary] and value of every head; the rotary part is one for all heads."""
    nope = kv.shape[-1] // 2
    turned = _rotate(k_pe.unsqueeze(2), cache, positions).expand(-1, -1, kv.shape[2], -1)
    return torch.cat((kv[..., :nope], turned), -1), kv[..., nope:]


def mla_kv_target(kv: Tensor, k_pe: Tensor, cache: Tensor, positions: Tensor) -> Any:
    """torchtitan's function."""
    complex_cache = torch.view_as_complex(cache.contiguous())
    return fused_mla.fused_mla_kv(kv, k_pe, complex_cache, positions, kv.shape[-1] // 2)


def mla_kv_sample(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> tuple[Tensor, ...]:
    """`shape` is [batch, tokens, heads, columns of key-nope, of value, and half of them rotary]."""
    columns = max(2 * (shape[-1] // 2), 2)
    rotary = max(2 * (columns // 4), 2)
    positions = torch.randint(0, _TABLE, shape[:2], generator=generator, device=device)
    kv = _normal((*shape[:3], 2 * columns), dtype, generator, device)
    return kv, _normal((*shape[:2], rotary), dtype, generator, device), _cache(rotary, device), positions


MLA_KV = KernelSpec(
    name="torchtitan_fused_mla_kv",
    reference=mla_kv_reference,
    target=mla_kv_target,
    sample=mla_kv_sample,
    inputs=("kv", "k_pe", "cache", "positions"),
    grads=("kv", "k_pe"),
    outputs=("k", "v"),
    kind="reduction",
    shapes=((2, 3, 4, 16), (1, 5, 3, 32), (1, 2, 65, 24)),
    dtypes=("bfloat16", "float16", "float32"),
    sites=("torchtitan::fused_mla_k_rope", "_fused_k_rope_kernel", "_fused_kv_backward_kernel"),
)
