"""What `bridge verify --op rms_norm` judges, on what inputs, against which plausible faults."""

from __future__ import annotations

import torch

from bridge.kernels.rms_norm.op import rms_norm
from bridge.kernels.rms_norm.reference import golden, reference
from bridge.verify import KernelSpec

Inputs = tuple[torch.Tensor, torch.Tensor]


def target(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """The kernel, never its eager fallback."""
    return rms_norm(x, weight, eps=eps, backend="kernel")


def _draw(shape: tuple[int, ...], generator: torch.Generator, device: str | torch.device) -> Inputs:
    x = torch.randn(shape, generator=generator, device=device)
    return x, 1.0 + 0.1 * torch.randn(shape[-1], generator=generator, device=device)


def sample(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str | torch.device
) -> Inputs:
    """x `shape` from N(0, 1); weight `[shape[-1]]` from N(1, 0.1), as a trained norm has it."""
    x, weight = _draw(shape, generator, device)
    return x.to(dtype), weight.to(dtype)


def near_zero_variance(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str | torch.device
) -> Inputs:
    """Rows far below sqrt(eps): eps decides the result."""
    x, weight = _draw(shape, generator, device)
    return (1e-5 * x).to(dtype), weight.to(dtype)


def zero_variance(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str | torch.device
) -> Inputs:
    """All-zero rows: y is 0 and grad_x is the largest it can be, grad * gain / sqrt(eps)."""
    x, weight = _draw(shape, generator, device)
    return torch.zeros_like(x).to(dtype), weight.to(dtype)


def rows_around_eps(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str | torch.device
) -> Inputs:
    """Row sizes from 1e-4 to 1e2, so rows below, at and above sqrt(eps) sit in one tile."""
    x, weight = _draw(shape, generator, device)
    scale = torch.logspace(-4, 2, max(shape[0], 2), device=device)[: shape[0]]
    return (x * scale.reshape(-1, *[1] * (len(shape) - 1))).to(dtype), weight.to(dtype)


def weights_of_both_signs(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str | torch.device
) -> Inputs:
    """Gains from N(0, 1): a kernel that adds an offset, or takes one for granted, shows."""
    x, weight = _draw(shape, generator, device)
    return x.to(dtype), (10.0 * (weight - 1.0)).to(dtype)


def one_loud_column(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str | torch.device
) -> Inputs:
    """The last column dominates the mean square, as activation outliers do."""
    x, weight = _draw(shape, generator, device)
    x[..., -1] = 100.0
    return x.to(dtype), weight.to(dtype)


def _unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _fault_offset_added(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return (_unit(x, eps) * (1.0 + weight.float())).to(x.dtype)


def _fault_cast_before_gain(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return (_unit(x, eps).to(x.dtype) * weight).to(x.dtype)


def _fault_eps_outside_root(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    wide = x.float()
    unit = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + eps)
    return (unit * weight.float()).to(x.dtype)


def _fault_no_eps(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return reference(x, weight, eps=0.0)


def _fault_rstd_rounded(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps).to(x.dtype).float()
    return ((wide * rstd) * weight.float()).to(x.dtype)


def _fault_last_columns_not_summed(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    wide = x.float()
    columns = x.shape[-1]
    kept = columns - max(1, min(256, columns // 4))
    mean_square = wide[..., :kept].pow(2).sum(-1, keepdim=True) / columns
    return (wide * torch.rsqrt(mean_square + eps) * weight.float()).to(x.dtype)


def _fault_mean_over_padded_width(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    wide = x.float()
    padded = max(16, 1 << (x.shape[-1] - 1).bit_length())
    rstd = torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) / padded + eps)
    return ((wide * rstd) * weight.float()).to(x.dtype)


def _fault_no_gradient_through_rstd(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps).detach()
    return ((wide * rstd) * weight.float()).to(x.dtype)


def _fault_last_row_not_in_grad_weight(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    head, tail = rows[:-1], rows[-1:]
    y = torch.cat((reference(head, weight, eps=eps), reference(tail, weight.detach(), eps=eps)))
    return y.reshape(x.shape)


SPEC = KernelSpec(
    name="rms_norm",
    reference=reference,
    golden=golden,
    target=target,
    sample=sample,
    inputs=("x", "weight"),
    attrs={"eps": 1e-6},
    grads=("x", "weight"),
    outputs=("y",),
    kind="reduction",
    # Production width; one below, at and above two tile sizes; many row blocks; a tile mostly masked. One
    # column is legal too, but there y is the sign of x and grad_x nothing but cancellation.
    shapes=(
        (8, 5120),
        (3, 255),
        (3, 256),
        (3, 257),
        (8, 4095),
        (8, 4096),
        (8, 4097),
        (131, 128),
        (1, 8),
    ),
    dtypes=("bfloat16", "float16", "float32"),
    sites=(
        "RMSNorm",
        "KernelRMSNorm",
        "LlamaRMSNorm",
        "Qwen3RMSNorm",
        "bridge::rms_norm",
        "rms_norm_forward_kernel",
        "rms_norm_backward_kernel",
    ),
    adversarial={
        "near-zero variance": near_zero_variance,
        "zero variance": zero_variance,
        "rows around eps": rows_around_eps,
        "weights of both signs": weights_of_both_signs,
        "one loud column": one_loud_column,
    },
    faults={
        "1 + w in place of w": _fault_offset_added,
        "rounded before the gain": _fault_cast_before_gain,
        "eps outside the root": _fault_eps_outside_root,
        "eps missing": _fault_no_eps,
        "rstd rounded early": _fault_rstd_rounded,
        "last column block dropped": _fault_last_columns_not_summed,
        "mean taken over the padded width": _fault_mean_over_padded_width,
        "no gradient through rstd": _fault_no_gradient_through_rstd,
        "last row missing from grad_weight": _fault_last_row_not_in_grad_weight,
    },
)
