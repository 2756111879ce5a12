"""The eager OffsetRMSNorm as a torchtitan module: what a model is built from before an override."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.protocols.module import Module

from bridge.kernels.offset_rmsnorm.reference import reference


class OffsetRMSNorm(Module):  # type: ignore[misc]  # torchtitan is untyped here
    """`(1 + weight) * x / sqrt(mean(x^2) + eps)`; the weight starts at zero, so the gain starts at one."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """dim: columns of the normalised axis. eps: added to the mean square, inside the root."""

        dim: int
        eps: float = 1e-6

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = torch.nn.Parameter(torch.empty(config.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` `[..., dim]` over its last axis."""
        return reference(x, self.weight, eps=self.eps)

    def reset_parameters(self) -> None:
        """Zero the weight; torchtitan calls this when the config names no initialiser."""
        torch.nn.init.zeros_(self.weight)
