"""Put the Triton offset RMSNorm into a torchtitan run:

    override.imports = ["bridge.kernels.offset_rmsnorm.override.offset_rmsnorm"]

The state dict stays what it was (one `weight`). To fall back to eager with a warning where the kernel cannot
run, give the entry `{"backend": "auto"}`; as it stands such a run is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torchtitan.config import derive, override

from bridge.kernels._dispatch import Backend
from bridge.kernels._sharding import rowwise
from bridge.kernels.offset_rmsnorm.module import OffsetRMSNorm
from bridge.kernels.offset_rmsnorm.op import offset_rms_norm


class KernelOffsetRMSNorm(OffsetRMSNorm):
    """OffsetRMSNorm computed by `bridge::offset_rms_norm`; plain and DTensor weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(OffsetRMSNorm.Config):
        """backend: "kernel" or "auto"; see `offset_rms_norm`."""

        backend: Backend = "kernel"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.backend: Backend = config.backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` `[..., dim]` over its last axis."""
        return rowwise(partial(offset_rms_norm, eps=self.eps, backend=self.backend), x, self.weight)


@override(
    target=OffsetRMSNorm.Config, exact=True, description="Offset RMSNorm in Triton, forward and backward."
)
def offset_rmsnorm(
    config: OffsetRMSNorm.Config, *, backend: Backend = "kernel"
) -> KernelOffsetRMSNorm.Config:
    """Replace one OffsetRMSNorm config, keeping its fields."""
    return derive(config, KernelOffsetRMSNorm.Config, backend=backend)
