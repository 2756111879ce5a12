"""SwiGLU in plain torch: `silu(gate) * up`. The oracle."""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """fp32 inside, one rounding at the end.

    Args:
        gate: any shape, any floating dtype.
        up: like `gate`.

    Returns:
        `gate * sigmoid(gate) * up` in the shape and dtype of `gate`.
    """
    return (silu(gate.float()) * up.float()).to(gate.dtype)


def golden(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The same in the dtype of the inputs throughout; meant for FP64."""
    return gate * torch.sigmoid(gate) * up
