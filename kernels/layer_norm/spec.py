"""What `bridge verify --op layer_norm` judges, on what inputs, against which plausible faults."""

from __future__ import annotations

import torch

from bridge.kernels.layer_norm.op import layer_norm
from bridge.kernels.layer_norm.reference import golden, reference
from bridge.verify import KernelSpec

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Device = str | torch.device


def target(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> torch.Tensor:
    """The kernel, never its eager fallback."""
    return layer_norm(x, weight, bias, eps=eps, backend="kernel")


def _draw(shape: tuple[int, ...], generator: torch.Generator, device: Device) -> Inputs:
    x = torch.randn(shape, generator=generator, device=device)
    weight = 1.0 + 0.1 * torch.randn(shape[-1], generator=generator, device=device)
    return x, weight, 0.1 * torch.randn(shape[-1], generator=generator, device=device)


def _lower(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    x, weight, bias = inputs
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def sample(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """x `shape` from N(0.3, 1), so that the mean matters; weight from N(1, 0.1), bias from N(0, 0.1)."""
    x, weight, bias = _draw(shape, generator, device)
    return _lower((x + 0.3, weight, bias), dtype)


def large_mean(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Rows whose mean is 100 times their spread: a one-pass variance has no digits left."""
    x, weight, bias = _draw(shape, generator, device)
    return _lower((x + 100.0, weight, bias), dtype)


def near_zero_variance(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Rows far below sqrt(eps): eps decides the result."""
    x, weight, bias = _draw(shape, generator, device)
    return _lower((1e-4 * x, weight, bias), dtype)


def constant_rows(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Rows of one value: zero variance, y is the bias."""
    x, weight, bias = _draw(shape, generator, device)
    # A power of two, so that its mean is exact in any order of summation.
    return _lower((torch.full_like(x, 0.5), weight, bias), dtype)


def rows_around_eps(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Row sizes from 1e-3 to 1e2, so rows below, at and above sqrt(eps) sit in one tile."""
    x, weight, bias = _draw(shape, generator, device)
    scale = torch.logspace(-3, 2, max(shape[0], 2), device=device)[: shape[0]]
    return _lower((x * scale.reshape(-1, *[1] * (len(shape) - 1)), weight, bias), dtype)


def _standard(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)


def _affine(unit: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (unit * weight.float() + bias.float()).to(dtype)


def _fault_padded_variance(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    wide = x.float()
    columns = x.shape[-1]
    padding = max(16, 1 << (columns - 1).bit_length()) - columns
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True) + padding * mean.pow(2) / columns
    return _affine((wide - mean) * torch.rsqrt(variance + eps), weight, bias, x.dtype)


def _fault_one_pass_variance(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = wide.pow(2).mean(-1, keepdim=True) - mean.pow(2)
    return _affine((wide - mean) * torch.rsqrt(variance + eps), weight, bias, x.dtype)


def _fault_unbiased_variance(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    variance = centred.pow(2).sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1)
    return _affine(centred * torch.rsqrt(variance + eps), weight, bias, x.dtype)


def _fault_eps_outside_root(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return _affine(centred / (centred.pow(2).mean(-1, keepdim=True).sqrt() + eps), weight, bias, x.dtype)


def _fault_bias_missing(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    return (_standard(x, eps) * weight.float() + 0.0 * bias.float()).to(x.dtype)


def _fault_statistics_rounded(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True).to(x.dtype).float()
    rstd = torch.rsqrt((wide - mean).pow(2).mean(-1, keepdim=True) + eps).to(x.dtype).float()
    return _affine((wide - mean) * rstd, weight, bias, x.dtype)


def _fault_no_gradient_through_mean(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True).detach()
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return _affine(centred * rstd, weight, bias, x.dtype)


def _fault_last_row_not_in_grad_bias(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    head, tail = rows[:-1], rows[-1:]
    y = torch.cat((reference(head, weight, bias, eps=eps), reference(tail, weight, bias.detach(), eps=eps)))
    return y.reshape(x.shape)


SPEC = KernelSpec(
    name="layer_norm",
    reference=reference,
    golden=golden,
    target=target,
    sample=sample,
    inputs=("x", "weight", "bias"),
    attrs={"eps": 1e-5},
    grads=("x", "weight", "bias"),
    outputs=("y",),
    kind="reduction",
    # Production width; one below, at and above two tile sizes; many row blocks; a tile mostly masked.
    shapes=((8, 5120), (3, 255), (3, 256), (3, 257), (8, 4095), (8, 4096), (8, 4097), (131, 96), (2, 8)),
    dtypes=("bfloat16", "float16", "float32"),
    sites=(
        "LayerNorm",
        "KernelLayerNorm",
        "bridge::layer_norm",
        "layer_norm_forward_kernel",
        "layer_norm_backward_kernel",
    ),
    adversarial={
        "large mean": large_mean,
        "near-zero variance": near_zero_variance,
        "constant rows": constant_rows,
        "rows around eps": rows_around_eps,
    },
    faults={
        "padded lanes in the variance": _fault_padded_variance,
        "one-pass variance": _fault_one_pass_variance,
        "variance divided by n - 1": _fault_unbiased_variance,
        "eps outside the root": _fault_eps_outside_root,
        "bias missing": _fault_bias_missing,
        "mean and rstd rounded early": _fault_statistics_rounded,
        "no gradient through the mean": _fault_no_gradient_through_mean,
        "last row missing from grad_bias": _fault_last_row_not_in_grad_bias,
    },
)
