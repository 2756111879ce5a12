"""Softmax in plain torch. The oracle."""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Exponentials shifted by the maximum, over their sum; fp32 inside, one rounding at the end.

    Args:
        x: any shape, any floating dtype.
        dim: the axis that sums to one.

    Returns:
        Same shape and dtype as `x`. A row of -inf alone, or with +inf or NaN in it, is NaN.
    """
    return torch.softmax(x.float(), dim).to(x.dtype)


def golden(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    """The same in the dtype of the input throughout; meant for FP64."""
    return torch.softmax(x, dim)
