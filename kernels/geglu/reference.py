"""GeGLU in plain torch: `gelu(gate) * up`. The oracle."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import gelu


def reference(gate: torch.Tensor, up: torch.Tensor, *, approximate: str) -> torch.Tensor:
    """fp32 inside, one rounding at the end.

    Args:
        gate: any shape, any floating dtype.
        up: like `gate`.
        approximate: "none" for the exact gelu, "tanh" for its approximation.

    Returns:
        Same shape and dtype as `gate`.
    """
    return (gelu(gate.float(), approximate=approximate) * up.float()).to(gate.dtype)


def golden(gate: torch.Tensor, up: torch.Tensor, *, approximate: str) -> torch.Tensor:
    """The same in the dtype of the inputs throughout; meant for FP64.

    Written so that nothing cancels where gelu is tiny: `(1 + erf) / 2` as erfc, `(1 + tanh) / 2` as sigmoid.
    """
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate.pow(3))
        return gate * torch.sigmoid(2.0 * inner) * up
    tail: torch.Tensor = torch.special.erfc(-gate * math.sqrt(0.5))
    return 0.5 * gate * tail * up
