"""Rotary position embedding in plain torch. The oracle."""

from __future__ import annotations

import torch


def reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotate the leading columns of every head by its token's angles; fp32 inside, one rounding at the end.

    Args:
        x: `[..., heads, columns]`, any floating dtype.
        cos: `[table, pairs]`, `2 * pairs <= columns`; columns beyond `2 * pairs` pass through.
        sin: like `cos`.
        positions: `[...]` integers, rows of the table.
        interleaved: a pair is columns (2 i, 2 i + 1) rather than (i, i + pairs).

    Returns:
        Same shape and dtype as `x`.
    """
    return golden(x.float(), cos.float(), sin.float(), positions, interleaved=interleaved).to(x.dtype)


def golden(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """The same in the dtype of the inputs throughout; meant for FP64."""
    pairs = cos.shape[-1]
    c, s = cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)
    rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
    turned = (first * c - second * s, second * c + first * s)
    if interleaved:
        return torch.cat((torch.stack(turned, -1).flatten(-2), rest), -1)
    return torch.cat((*turned, rest), -1)
