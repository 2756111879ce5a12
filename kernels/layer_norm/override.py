"""Put the Triton LayerNorm into a torchtitan run:

    override.imports = ["bridge.kernels.layer_norm.override.layer_norm"]

The state dict stays what it was (`weight` and `bias`). To fall back to eager with a warning where the kernel
cannot run, give the entry `{"backend": "auto"}`; as it stands such a run is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.nn_modules import LayerNorm

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend
from bridge.kernels._sharding import rowwise
from bridge.kernels.layer_norm import op


class KernelLayerNorm(LayerNorm):  # type: ignore[misc]  # torchtitan is untyped here
    """LayerNorm computed by `bridge::layer_norm`; plain and DTensor parameters."""

    @dataclass(kw_only=True, slots=True)
    class Config(LayerNorm.Config):  # type: ignore[misc]
        """backend: "kernel" or "auto"; see `layer_norm`."""

        backend: Backend = "kernel"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.backend: Backend = config.backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` `[..., normalized_shape]` over its last axis."""
        return rowwise(partial(op.layer_norm, eps=self.eps, backend=self.backend), x, self.weight, self.bias)


@override(target=LayerNorm.Config, exact=True, description="LayerNorm in Triton, forward and backward.")
def layer_norm(config: LayerNorm.Config, *, backend: Backend = "kernel") -> KernelLayerNorm.Config:
    """Replace one LayerNorm config, keeping its fields.

    Raises:
        UsageError: the norm has no weight and bias, which the kernel needs.
    """
    if not config.elementwise_affine:
        raise UsageError("the layer_norm override needs weight and bias, got elementwise_affine=False")
    return derive(config, KernelLayerNorm.Config, backend=backend)
