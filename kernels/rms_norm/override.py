"""Put the Triton RMSNorm into a torchtitan run:

    override.imports = ["bridge.kernels.rms_norm.override.rms_norm"]

The state dict stays what it was (one `weight`). To fall back to eager with a warning where the kernel cannot
run, give the entry `{"backend": "auto"}`; as it stands such a run is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.nn_modules import RMSNorm

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend
from bridge.kernels._sharding import rowwise
from bridge.kernels.rms_norm import op


class KernelRMSNorm(RMSNorm):  # type: ignore[misc]  # torchtitan is untyped here
    """RMSNorm computed by `bridge::rms_norm`; plain and DTensor weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):  # type: ignore[misc]
        """backend: "kernel" or "auto"; see `rms_norm`."""

        backend: Backend = "kernel"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.backend: Backend = config.backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` `[..., normalized_shape]` over its last axis."""
        return rowwise(partial(op.rms_norm, eps=self.eps, backend=self.backend), x, self.weight)


@override(target=RMSNorm.Config, exact=True, description="RMSNorm in Triton, forward and backward.")
def rms_norm(config: RMSNorm.Config, *, backend: Backend = "kernel") -> KernelRMSNorm.Config:
    """Replace one RMSNorm config, keeping its fields.

    Raises:
        UsageError: the norm has no weight, which the kernel needs.
    """
    if not config.elementwise_affine:
        raise UsageError("the rms_norm override needs a norm with a weight, got elementwise_affine=False")
    return derive(config, KernelRMSNorm.Config, backend=backend)
