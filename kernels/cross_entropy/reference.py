"""Cross-entropy in plain torch. The oracle."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy


def reference(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int, label_smoothing: float, reduction: str
) -> torch.Tensor:
    """fp32 inside and out, as torchtitan's loss does it.

    Args:
        logits: `[..., classes]`, any floating dtype.
        target: `[...]`, class indices.
        ignore_index: rows with this label have loss 0 and gradient 0, whatever their logits are.
        label_smoothing: share of the target spread evenly over all classes.
        reduction: "none", "sum" or "mean" (over the rows that are not ignored).

    Returns:
        fp32; `[...]` for "none", a scalar otherwise.
    """
    return golden(
        logits.float(),
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def golden(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int, label_smoothing: float, reduction: str
) -> torch.Tensor:
    """The same in the dtype of the logits throughout; meant for FP64."""
    # A NaN in an ignored row would come back as 0 * NaN in its gradient.
    kept = logits.masked_fill((target == ignore_index).unsqueeze(-1), 0.0)
    loss = cross_entropy(
        kept.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss
