"""One AdamW step in plain torch. The oracle."""

from __future__ import annotations

import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> Tensors:
    """Decoupled weight decay, then the bias-corrected Adam update; fp32 inside, one rounding each at the end.

    Args:
        param: any shape, any floating dtype.
        grad: like `param`.
        exp_avg: running mean of the gradient before this step.
        exp_avg_sq: running mean of its square before this step.
        lr: learning rate.
        beta1: decay of `exp_avg`.
        beta2: decay of `exp_avg_sq`.
        eps: added to the bias-corrected root, outside it.
        weight_decay: share of the parameter taken off per unit of `lr`.
        step: number of this step, from 1 on.

    Returns:
        The new param, exp_avg and exp_avg_sq, each in its own dtype.
    """
    wide = (param.float(), grad.float(), exp_avg.float(), exp_avg_sq.float())
    results = golden(*wide, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step)
    return results[0].to(param.dtype), results[1].to(exp_avg.dtype), results[2].to(exp_avg_sq.dtype)


def golden(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> Tensors:
    """The same in the dtype of the inputs throughout; meant for FP64."""
    mean = beta1 * exp_avg + (1.0 - beta1) * grad
    square = beta2 * exp_avg_sq + (1.0 - beta2) * grad * grad
    root = square.sqrt() / (1.0 - beta2**step) ** 0.5
    update = mean / (1.0 - beta1**step) / (root + eps)
    return param * (1.0 - lr * weight_decay) - lr * update, mean, square
