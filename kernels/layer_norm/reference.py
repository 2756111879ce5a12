"""LayerNorm in plain torch: `(x - mean) / sqrt(var + eps) * weight + bias`. The oracle."""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Normalise the last axis: fp32 inside, one rounding at the end, as `torch.nn.LayerNorm` does.

    Args:
        x: `[..., columns]`, any floating dtype.
        weight: `[columns]`.
        bias: `[columns]`.
        eps: added to the variance, which divides by the number of columns, inside the root.

    Returns:
        `[..., columns]` in the dtype of `x`.
    """
    return golden(x.float(), weight.float(), bias.float(), eps=eps).to(x.dtype)


def golden(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> torch.Tensor:
    """The same in the dtype of the inputs throughout; two passes, so a large mean costs no digits."""
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight + bias
