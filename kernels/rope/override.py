"""Put the Triton rotary embedding into a torchtitan run, for the cache that its model uses:

    override.imports = ["bridge.kernels.rope.override.cos_sin_rope"]
    override.imports = ["bridge.kernels.rope.override.complex_rope"]

The tables stay torchtitan's own (its scaling included); the kernel reads them where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.config import derive, override
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend
from bridge.kernels._sharding import assemble
from bridge.kernels.rope.op import rope

Pair = tuple[torch.Tensor, torch.Tensor]


def _rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    interleaved: bool,
    backend: Backend,
) -> torch.Tensor:
    """Rotate `x` `[batch, tokens, heads, columns]`; a DTensor shard by shard.

    `positions`, `[batch or 1, tokens]`, are those of the local tokens.
    """
    placements = x.placements if isinstance(x, DTensor) else ()
    for placement in placements:
        whole = isinstance(placement, Replicate) or (isinstance(placement, Shard) and placement.dim != 3)
        if not whole or (positions is None and placement == Shard(1)):
            raise UsageError(
                f"the rope override needs whole heads, and positions if tokens are sharded, got {placements}"
            )
    local = x.to_local(grad_placements=placements) if isinstance(x, DTensor) else x
    batch, tokens = local.shape[:2]
    if positions is None:
        at = torch.arange(tokens, device=local.device).expand(batch, tokens)
    else:
        at = (positions.to_local() if isinstance(positions, DTensor) else positions).expand(batch, tokens)
    turned = rope(local, cos, sin, at, interleaved=interleaved, backend=backend)
    if isinstance(x, DTensor):
        return assemble(turned, x, placements)
    return turned


class KernelCosSinRoPE(CosSinRoPE):  # type: ignore[misc]  # torchtitan is untyped here
    """CosSinRoPE, which pairs column i with column i + dim / 2, computed by `bridge::rope`."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):  # type: ignore[misc]
        """backend: "kernel" or "auto"; see `rope`."""

        backend: Backend = "kernel"

    def forward(self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None) -> Pair:
        """Rotate `query` and `key`, `[batch, tokens, heads, dim]` each."""
        cache = self.cache.to_local() if isinstance(self.cache, DTensor) else self.cache
        dim = cache.shape[1] // 2
        # A row holds every cosine twice, then every sine twice.
        cos, sin = cache[:, : dim // 2], cache[:, dim : dim + dim // 2]
        backend = self.config.backend
        return (
            _rotate(query, cos, sin, positions, False, backend),
            _rotate(key, cos, sin, positions, False, backend),
        )


class KernelComplexRoPE(ComplexRoPE):  # type: ignore[misc]  # torchtitan is untyped here
    """ComplexRoPE, which pairs neighbouring columns, computed by `bridge::rope`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):  # type: ignore[misc]
        """backend: "kernel" or "auto"; see `rope`."""

        backend: Backend = "kernel"

    def forward(self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None) -> Pair:
        """Rotate `query` and `key`, `[batch, tokens, heads, dim]` each."""
        cache = self.cache.to_local() if isinstance(self.cache, DTensor) else self.cache
        cos, sin = torch.view_as_real(cache).unbind(-1)
        backend = self.config.backend
        return (
            _rotate(query, cos, sin, positions, True, backend),
            _rotate(key, cos, sin, positions, True, backend),
        )


@override(target=CosSinRoPE.Config, exact=True, description="Cos/sin rotary embedding in Triton.")
def cos_sin_rope(config: CosSinRoPE.Config, *, backend: Backend = "kernel") -> KernelCosSinRoPE.Config:
    """Replace one CosSinRoPE config, keeping its fields."""
    return derive(config, KernelCosSinRoPE.Config, backend=backend)


@override(target=ComplexRoPE.Config, exact=True, description="Complex rotary embedding in Triton.")
def complex_rope(config: ComplexRoPE.Config, *, backend: Backend = "kernel") -> KernelComplexRoPE.Config:
    """Replace one ComplexRoPE config, keeping its fields."""
    return derive(config, KernelComplexRoPE.Config, backend=backend)
