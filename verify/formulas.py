"""Fused ops written out in plain ones, so that their inner roundings and sums can be seen and moved.

Each takes what the aten op takes and returns what it returns. torch's own decompositions serve for
the ops whose inner steps they show; the ones here show the mean, the spread and the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def _axes(x: torch.Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(x.ndim))
    return [dim] if isinstance(dim, int) else list(dim)


def var_mean(
    x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two-pass variance and mean over `dim`."""
    axes = _axes(x, dim)
    count = math.prod(x.shape[a] for a in axes)
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    spread = (centred * centred).sum(axes, keepdim=keepdim)
    divisor = max(0.0, count - (1.0 if correction is None else float(correction)))
    return spread / divisor, mean if keepdim else mean.squeeze(axes)


def _var_mean_dim(x: torch.Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return var_mean(x, dim, correction=float(unbiased), keepdim=keepdim)


def _var(x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _var_dim(x: torch.Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return var_mean(x, dim, correction=float(unbiased), keepdim=keepdim)[0]


def _std(x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return _var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _prims_var(x: torch.Tensor, dim: Any, correction: float = 1.0, **_: Any) -> Any:
    return var_mean(x, dim, correction=correction)[0]


def softmax(x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    """Shifted by the row's maximum, in FP32 for 16-bit inputs, as torch does it."""
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    e = torch.exp(wide - wide.amax(dim, keepdim=True))
    y = e / e.sum(dim, keepdim=True)
    return y if half_to_float else y.to(x.dtype)


def _safe_softmax(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    wide = x if dtype is None else x.to(dtype)
    masked = (wide == float("-inf")).all(dim, keepdim=True)
    return torch.where(masked, torch.zeros((), dtype=wide.dtype, device=x.device), softmax(wide, dim))


def log_softmax(x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    """Shifted by the row's maximum, in FP32 for 16-bit inputs, as torch does it."""
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    z = wide - wide.amax(dim, keepdim=True)
    y = z - torch.log(torch.exp(z).sum(dim, keepdim=True))
    return y if half_to_float else y.to(x.dtype)


def logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    """Shifted by the maximum where that is finite."""
    axes = _axes(x, dim)
    top = x.amax(axes, keepdim=True)
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    y = torch.log(torch.exp(x - top).sum(axes, keepdim=True)) + top
    return y if keepdim else y.squeeze(axes)


def _safe(op: Any) -> dict[Any, Callable[..., Any]]:
    return {op: decomposition_table[op]} if op in decomposition_table else {}


FORMULAS: dict[Any, Callable[..., Any]] = {
    aten.var_mean.dim: _var_mean_dim,
    aten.var_mean.correction: var_mean,
    aten.var.dim: _var_dim,
    aten.var.correction: _var,
    aten.std.correction: _std,
    torch.ops.prims.var.default: _prims_var,
    aten._softmax.default: softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._log_softmax.default: log_softmax,
    aten.logsumexp.default: logsumexp,
}
for _op in (
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.silu.default,
    aten.silu_backward.default,
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
    aten.softplus.default,
    aten.softplus_backward.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
    aten.addmm.default,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
):
    FORMULAS |= _safe(_op)


def spelled_out(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Result of a composed operator run as its formula with `mode` on; NotImplemented where it has none."""
    formula = FORMULAS.get(func)
    if formula is None:
        return NotImplemented
    with mode:
        return formula(*args, **kwargs)
