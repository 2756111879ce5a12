"""Softmax as a module, to be put where a `torch.nn.Softmax` is."""

from __future__ import annotations

import torch

from bridge.kernels._dispatch import Backend
from bridge.kernels.softmax import op


class KernelSoftmax(torch.nn.Module):
    """`torch.nn.Softmax` computed by `bridge::softmax`; it has no state."""

    def __init__(self, dim: int = -1, *, backend: Backend = "kernel") -> None:
        super().__init__()
        self.dim = dim
        self.backend: Backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Softmax of `x` over the axis given at construction."""
        return op.softmax(x, dim=self.dim, backend=self.backend)
