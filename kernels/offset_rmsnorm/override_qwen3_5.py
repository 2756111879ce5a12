"""The same override for torchtitan's own Qwen3.5 norm, which imports only where `fla` is installed:

override.imports = ["bridge.kernels.offset_rmsnorm.override_qwen3_5.offset_rmsnorm"]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torchtitan.config import derive, override
from torchtitan.models.qwen3_5.model import OffsetRMSNorm

from bridge.kernels._dispatch import Backend
from bridge.kernels._sharding import rowwise
from bridge.kernels.offset_rmsnorm.op import offset_rms_norm


class KernelOffsetRMSNorm(OffsetRMSNorm):  # type: ignore[misc]  # torchtitan is untyped here
    """Qwen3.5's OffsetRMSNorm computed by `bridge::offset_rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(OffsetRMSNorm.Config):  # type: ignore[misc]
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
    """Replace one Qwen3.5 OffsetRMSNorm config, keeping its fields."""
    return derive(config, KernelOffsetRMSNorm.Config, backend=backend)
