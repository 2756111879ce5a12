"""Error of a legal FP32 sum: standard deviation of a sequential sum's rounding errors, in units of roundoff.

A sum of T terms makes T roundings, each of up to half a ULP of the running sum s_k: the errors add up
to u * sqrt(sum_k s_k^2 / 3). For a random order of the terms the expectation of sum_k s_k^2 is known
from two numbers only, Q = sum t^2 and S = sum t:

    sum_k s_k^2  =  T * (Q / 6 + S^2 / 3)

Legal orders stay within three of these; truncating or 16-bit accumulators are ten to thousands out.
"""

from __future__ import annotations

import math
from typing import Any

import torch

aten = torch.ops.aten


def running_sum_noise(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor | None:
    """Standard deviation over unit roundoff of each element of `out` (FP64); None when `func` does not sum.

    Args:
        func: an aten op, called as `func(*args, **kwargs)`.
        out: its result in FP64.
    """
    wide = [a.to(torch.float64) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    name = str(func.name()).split("::")[1].split(".")[0].rstrip("_")
    if name in ("sum", "mean", "nansum"):
        return _over_dims(name, wide, kwargs, out)
    if name in ("mm", "bmm", "dot", "mv"):
        left, right = wide[0], wide[1]
        return spread(left.shape[-1], _product(name, left * left, right * right), out)
    if name in ("addmm", "baddbmm"):
        left, right = wide[1], wide[2]
        squares = _product("mm" if name == "addmm" else "bmm", left * left, right * right)
        return spread(left.shape[-1] + 1, squares + wide[0] ** 2, out)
    if name == "cumsum":
        dim = int(wide[1])
        squares = torch.cumsum(wide[0] ** 2, dim)
        counts = torch.cumsum(torch.ones_like(wide[0]), dim)
        return torch.sqrt(counts * (squares / 6 + out**2 / 3) / 3)
    if name in ("linalg_vector_norm", "norm"):
        return out.abs() * math.sqrt(max(1, wide[0].numel() // max(1, out.numel())) / 9)
    if name in ("index_add", "scatter_add", "embedding_dense_backward", "index_put", "scatter_reduce"):
        return _scattered(func, args, kwargs, out)
    if name == "convolution":
        terms = wide[1][0].numel()
        return spread(terms, func(wide[0] ** 2, wide[1] ** 2, None, *args[3:]), out)
    return None


def squares_of(func: Any, args: Any, kwargs: Any) -> tuple[int, torch.Tensor] | None:
    """How many terms each element of a sum has and the sum of their squares (FP64); None for other ops.

    What `spread` needs of a part of a sum whose other parts are made elsewhere.
    """
    name = str(func.name()).split("::")[1].split(".")[0]
    if name not in ("sum", "nansum", "mm", "bmm", "dot", "mv"):
        return None
    wide = [a.to(torch.float64) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    if name in ("sum", "nansum"):
        total = func(wide[0].square(), *wide[1:], **{k: v for k, v in kwargs.items() if k != "dtype"})
        return max(1, wide[0].numel() // max(1, total.numel())), total
    return wide[0].shape[-1], _product(name, wide[0].square(), wide[1].square())


def spread(terms: int, squares: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Standard deviation over unit roundoff of sums of `terms` terms, from their squares' sum and theirs."""
    usual = torch.sqrt(terms * (squares / 6 + total**2 / 3) / 3)
    # Equal terms round the same way again and again: errors add up like T, not like its root.
    equal = total**2 >= terms * squares * (1 - 1e-8)
    return torch.where(equal & (total != 0), usual + terms * total.abs() / 12, usual)


def _product(name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.matmul(left, right)


def _over_dims(name: str, args: list[Any], kwargs: Any, out: torch.Tensor) -> torch.Tensor:
    values: torch.Tensor = args[0]
    dims = args[1] if len(args) > 1 and not isinstance(args[1], torch.dtype) else kwargs.get("dim")
    keep = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
    squares = values * values
    if dims is None or dims == []:
        total = squares.sum()
    else:
        total = squares.sum(dims, keepdim=keep)
    terms = max(1, values.numel() // max(1, out.numel()))
    if name == "mean":
        return spread(terms, total, out * terms) / terms
    return spread(terms, total, out)


def _scattered(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor | None:
    def again(change: Any) -> torch.Tensor:
        moved = [
            change(a.to(torch.float64)) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in args
        ]
        result: torch.Tensor = func(*moved, **kwargs)
        return result

    if str(func.name()).split(".")[0].endswith("_"):
        return None  # in place: running it again would add twice
    counts, squares = again(torch.ones_like), again(torch.square)
    return torch.sqrt(counts * (squares / 6 + out**2 / 3) / 3)
