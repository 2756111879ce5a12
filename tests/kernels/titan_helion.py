"""KernelSpecs around the Helion kernels of torchtitan 0.3's helion_rope override, unmodified; needs `helion`.

    bridge verify --kernel tests/kernels/titan_helion.py:COS_SIN     (or COMPLEX)

Without a GPU Helion's Triton code runs in Triton's interpreter, and the ops, registered for CUDA only, are
lent to the CPU. Helion's own interpreter (HELION_INTERPRET=1) refuses the override's configs.
"""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.overrides import helion_rope

from bridge.verify import KernelSpec
from bridge.verify.lent import lend_to_cpu

Tensor = torch.Tensor
Device = str | torch.device
_TABLE = 64

lend_to_cpu()


def _turn(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return first * cos - second * sin, second * cos + first * sin


def cos_sin_reference(query: Tensor, key: Tensor, cache: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Halves turned against each other, at least in fp32; `cache` [table, 2 * dim], every angle twice."""

    def rotate(x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        cos, sin = cache.to(wide.dtype)[positions].unsqueeze(2).chunk(2, -1)
        half = x.shape[-1] // 2
        turned = _turn(wide[..., :half], wide[..., half:], cos[..., :half], sin[..., :half])
        return torch.cat(turned, -1).to(x.dtype)

    return rotate(query), rotate(key)


def cos_sin_target(query: Tensor, key: Tensor, cache: Tensor, positions: Tensor) -> Any:
    """torchtitan's op, on what its module hands over."""
    return helion_rope._helion_cossin_rope_fwd(query.contiguous(), key.contiguous(), cache, positions)


def complex_reference(query: Tensor, key: Tensor, cache: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Neighbours turned against each other, at least in fp32; `cache` [table, dim / 2, 2]."""

    def rotate(x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        cos, sin = cache.to(wide.dtype)[positions].unsqueeze(2).unbind(-1)
        turned = _turn(wide[..., ::2], wide[..., 1::2], cos, sin)
        return torch.stack(turned, -1).flatten(-2).to(x.dtype)

    return rotate(query), rotate(key)


def complex_target(query: Tensor, key: Tensor, cache: Tensor, positions: Tensor) -> Any:
    """torchtitan's op, on what its module hands over."""
    unit = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key)]
    return helion_rope._helion_complex_rope_fwd(*unit, cache, positions)


def _sample(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device, table: Tensor
) -> tuple[Tensor, ...]:
    """`shape` is [batch, tokens, heads of the query, columns of a head], columns a power of two."""
    parts = [
        torch.randn((*shape[:2], heads, shape[3]), generator=generator, device=device).to(dtype)
        for heads in (shape[2], max(shape[2] // 2, 1))
    ]
    positions = torch.randint(0, _TABLE, shape[:2], generator=generator, device=device)
    return *parts, table.to(device), positions


def _columns(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:3], 1 << max((shape[3] - 1).bit_length(), 1))


def cos_sin_sample(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> tuple[Tensor, ...]:
    """Query and key from N(0, 1), torchtitan's table, positions in any order."""
    shape = _columns(shape)
    table = CosSinRoPE.Config(dim=shape[3], max_seq_len=_TABLE).build().cache
    return _sample(shape, dtype, generator, device, table)


def complex_sample(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> tuple[Tensor, ...]:
    """The same with the table of complex numbers, seen as real ones."""
    shape = _columns(shape)
    table = ComplexRoPE.Config(dim=shape[3], max_seq_len=_TABLE).build().cache
    return _sample(shape, dtype, generator, device, torch.view_as_real(table).contiguous())


_COMMON: dict[str, Any] = {
    "inputs": ("query", "key", "cache", "positions"),
    "grads": ("query", "key"),
    "outputs": ("query_out", "key_out"),
    "kind": "elementwise",
    # Tiles are 4 or 16 tokens by 4 or 8 heads.
    "shapes": ((2, 5, 4, 16), (1, 17, 9, 32), (1, 3, 1, 64)),
    "dtypes": ("bfloat16", "float16", "float32"),
}
COS_SIN = KernelSpec(
    name="torchtitan_helion_cos_sin_rope",
    reference=cos_sin_reference,
    target=cos_sin_target,
    sample=cos_sin_sample,
    sites=("torchtitan::helion_cossin_rope_fwd", "_helion__rope_cos_sin_fwd"),
    **_COMMON,
)
COMPLEX = KernelSpec(
    name="torchtitan_helion_complex_rope",
    reference=complex_reference,
    target=complex_target,
    sample=complex_sample,
    sites=("torchtitan::helion_complex_rope_fwd", "_helion__rope_complex_fwd"),
    **_COMMON,
)
