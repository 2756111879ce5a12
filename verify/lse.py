"""Softmax as streaming kernels have it: probabilities recomputed from a stored logsumexp.

Eager torch subtracts the row's maximum and divides, which rounds to exactly 1 where one logit towers
above the rest. A kernel that stores L = max + log(sum) in FP32 and recomputes exp(x - L), in the forward or
in its backward, is off by half a ULP of L in the exponent, and its backward takes the row sum of the gradient
from the output instead of from the probabilities. Both are legal, so the noise envelope has both.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.verify.ulp import is_low, unit_roundoff

aten = torch.ops.aten
#: Roundings by which a gradient and its row sum may be off independently of each other.
_ROUNDINGS = 4.0


class Draws(Protocol):
    """What a mode has that puts noise on ops: uniform numbers, and a place to remember rows."""

    lse: dict[int, torch.Tensor]
    _computed: set[int]

    def _uniform(self, like: torch.Tensor) -> torch.Tensor: ...


def recomputed(mode: TorchDispatchMode, draws: Draws, func: Any, args: Any) -> Any:
    """Result of a softmax op of the streaming kind under `mode`; NotImplemented for other ops."""
    if func is aten._softmax.default or func is aten._log_softmax.default:
        return _forward(mode, draws, func is aten._log_softmax.default, *args)
    if func is aten._softmax_backward_data.default:
        return _softmax_backward(mode, draws, *args)
    if func is aten._log_softmax_backward_data.default:
        return _log_softmax_backward(mode, draws, *args)
    return NotImplemented


def _forward(
    mode: TorchDispatchMode, draws: Draws, log: bool, x: torch.Tensor, dim: int, half_to_float: bool = False
) -> torch.Tensor:
    size = torch.logsumexp(x.to(torch.float64), dim, keepdim=True).abs()
    size = torch.nan_to_num(size, nan=0.0, posinf=0.0)
    off = _moved(draws, size)
    with mode:
        wide = x.to(torch.float32) if is_low(x.dtype) else x
        z = wide - wide.amax(dim, keepdim=True)
        e = torch.exp(z)
        total = e.sum(dim, keepdim=True)
        y = (z - torch.log(total)) + off.to(z.dtype) if log else (e / total) * torch.exp(off.to(z.dtype))
        y = y if half_to_float else y.to(x.dtype)
    draws.lse[y.untyped_storage().data_ptr()] = size
    return y


def _moved(draws: Draws, size: torch.Tensor) -> torch.Tensor:
    """Rounding error of a logsumexp of absolute value `size`: one a row, FP64."""
    return _told(draws, size * (2.0 * unit_roundoff(torch.float32)) * (2.0 * draws._uniform(size) - 1.0))


def _told(draws: Draws, made: torch.Tensor) -> torch.Tensor:
    """`made`, known as computed: what memory it lies in must not decide whether the mode moves it."""
    draws._computed.add(made.untyped_storage().data_ptr())
    return made


def _softmax_backward(
    mode: TorchDispatchMode, draws: Draws, grad: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    moved = 1.0 + 2.0 * _ROUNDINGS * unit_roundoff(torch.float32) * (2.0 * draws._uniform(grad) - 1.0)
    apart = _told(draws, moved)
    off = _off(draws, y, grad)
    with mode:
        wide = grad.to(torch.float32) if is_low(grad.dtype) else grad
        p = y.to(wide.dtype)
        p = p if off is None else p * torch.exp(off.to(wide.dtype))
        total = (wide * p).sum(dim, keepdim=True)
        made: torch.Tensor = (p * (wide * apart.to(wide.dtype)) - p * total).to(dtype)
        return made


def _log_softmax_backward(
    mode: TorchDispatchMode, draws: Draws, grad: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    off = _off(draws, y, grad)
    with mode:
        wide = grad.to(torch.float32) if is_low(grad.dtype) else grad
        p = torch.exp(y.to(wide.dtype))
        p = p if off is None else p * torch.exp(off.to(wide.dtype))
        made: torch.Tensor = (wide - p * wide.sum(dim, keepdim=True)).to(dtype)
        return made


def _off(draws: Draws, y: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """Error of the exponent that the backward recomputes probabilities with; None for a foreign output."""
    size = draws.lse.get(y.untyped_storage().data_ptr())
    return _moved(draws, size) if size is not None and size.ndim == grad.ndim else None
