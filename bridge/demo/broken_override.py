"""torchtitan override that puts the demo's broken kernel into a run.

"override.imports" = ["bridge.demo.broken_override.broken_offset_rmsnorm"]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.config import derive, override

from bridge.demo.broken_kernel import broken_offset_rms_norm
from bridge.kernels.offset_rmsnorm.module import OffsetRMSNorm


class BrokenOffsetRMSNorm(OffsetRMSNorm):
    """OffsetRMSNorm whose backward forgets the `1 +`."""

    @dataclass(kw_only=True, slots=True)
    class Config(OffsetRMSNorm.Config):
        """The fields of OffsetRMSNorm.Config."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` `[..., dim]` over its last axis."""
        return broken_offset_rms_norm(x, self.weight, eps=self.eps)


@override(  # type: ignore[untyped-decorator]  # torchtitan is untyped here
    target=OffsetRMSNorm.Config, exact=True, description="Offset RMSNorm with a wrong backward."
)
def broken_offset_rmsnorm(config: OffsetRMSNorm.Config) -> BrokenOffsetRMSNorm.Config:
    """Replace one OffsetRMSNorm config, keeping its fields."""
    return derive(config, BrokenOffsetRMSNorm.Config)  # type: ignore[no-any-return]
