"""RMSNorm in plain torch: `weight * x / sqrt(mean(x^2) + eps)`. The oracle."""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Normalise the last axis: fp32 inside, one rounding at the end, as `torch.nn.RMSNorm` does.

    Args:
        x: `[..., columns]`, any floating dtype.
        weight: `[columns]`.
        eps: added to the mean square, inside the root.

    Returns:
        `[..., columns]` in the dtype of `x`.
    """
    wide = x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (unit * weight.float()).to(x.dtype)


def golden(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """The same in the dtype of the inputs throughout; meant for FP64."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
