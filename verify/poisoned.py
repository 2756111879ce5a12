"""Rows in which NaN or infinities of the inputs leave nothing to demand."""

from __future__ import annotations

import torch

from bridge.verify.case import Case


def poisoned_rows(
    case: Case, like: torch.Tensor | None, golden: torch.Tensor | None, *, elementwise: bool
) -> torch.Tensor | None:
    """Elements of a result that belong to a row in which an input leaves them undefined.

    A row that holds NaN is undefined for every kernel, since maxima and selections may drop it. A row that
    holds an infinity is so where golden itself makes NaN out of it (Inf - Inf, Inf * 0): what stands beside
    that NaN depends on the formula. A mask of -Inf makes none, so it stays judged. Elementwise kernels have
    no rows: there only NaN counts.

    Args:
        like: the result as the reference has it, of shape [rows..., anything] or [rows...].
        golden: the same in FP64.
    """
    if like is None:
        return None
    found: torch.Tensor | None = None
    for tensor in case.inputs:
        if (
            not tensor.is_floating_point()
            or tensor.ndim < 2
            or like.shape[: tensor.ndim - 1] != tensor.shape[:-1]
        ):
            continue
        if like.ndim > tensor.ndim:
            continue
        rows = torch.isnan(tensor).any(-1)
        if golden is not None and not elementwise and like.ndim == tensor.ndim:
            rows = rows | (torch.isinf(tensor).any(-1) & torch.isnan(golden).any(-1))
        part = (rows[..., None] if like.ndim == tensor.ndim else rows).expand(like.shape)
        found = part if found is None else found | part
    return found
