"""What `bridge verify --op softmax` judges, on what inputs, against which plausible faults."""

from __future__ import annotations

import torch

from bridge.kernels.softmax.op import softmax
from bridge.kernels.softmax.reference import golden, reference
from bridge.verify import KernelSpec

Inputs = tuple[torch.Tensor]
Device = str | torch.device


def target(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    """The kernel, never its eager fallback."""
    return softmax(x, dim=dim, backend="kernel")


def _draw(shape: tuple[int, ...], generator: torch.Generator, device: Device) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=device)


def sample(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """Logits from N(0, 3): some probabilities matter and most are small."""
    return ((3.0 * _draw(shape, generator, device)).to(dtype),)


def all_negative(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Logits around -200: beside a 0 in a padded lane, all of them would underflow."""
    return ((_draw(shape, generator, device) - 200.0).to(dtype),)


def extreme(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """Logits up to some thousand: without the shift by the maximum, exp overflows."""
    return ((1000.0 * _draw(shape, generator, device)).to(dtype),)


def one_winner(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """The last column takes nearly all; its gradient is the difference of nearly equal numbers."""
    x = _draw(shape, generator, device)
    x[..., -1] = 12.0
    return (x.to(dtype),)


def masked(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """Causal -inf above the diagonal, as attention sends it; every row keeps its first column."""
    x = _draw(shape, generator, device)
    rows = torch.arange(shape[-2] if len(shape) > 1 else 1, device=device)
    columns = torch.arange(shape[-1], device=device)
    return (x.masked_fill(columns > rows[:, None], float("-inf")).reshape(shape).to(dtype),)


def _fault_no_shift(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    e = x.float().exp()
    return (e / e.sum(dim, keepdim=True)).to(x.dtype)


def _fault_zero_padding_in_max(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    wide = x.float()
    peak = wide.amax(dim, keepdim=True).clamp(min=0.0)
    e = (wide - peak).exp()
    return (e / e.sum(dim, keepdim=True)).to(x.dtype)


def _fault_padding_in_sum(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    wide = x.float()
    columns = x.shape[dim]
    padding = max(16, 1 << (columns - 1).bit_length()) - columns
    peak = wide.amax(dim, keepdim=True)
    e = (wide - peak).exp()
    return (e / (e.sum(dim, keepdim=True) + padding * (-peak).exp())).to(x.dtype)


def _fault_sum_in_low_precision(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    wide = x.float()
    e = (wide - wide.amax(dim, keepdim=True)).exp()
    return (e / e.to(x.dtype).cumsum(dim).narrow(dim, x.shape[dim] - 1, 1).float()).to(x.dtype)


def _fault_last_column_not_summed(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    wide = x.float()
    e = (wide - wide.amax(dim, keepdim=True)).exp()
    total = e.narrow(dim, 0, max(x.shape[dim] - 1, 1)).sum(dim, keepdim=True)
    return (e / total).to(x.dtype)


def _fault_no_gradient_through_sum(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    wide = x.float()
    e = (wide - wide.amax(dim, keepdim=True).detach()).exp()
    return (e / e.sum(dim, keepdim=True).detach()).to(x.dtype)


def _fault_backward_of_rounded_output(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    p = torch.softmax(x.float(), dim)
    rounded = p.to(x.dtype).float().detach()
    # Same value; the gradient is formed from the probabilities after rounding to 16 bits.
    log = torch.log_softmax(x.float(), dim)
    return (rounded * (log - log.detach()) + p.detach()).to(x.dtype)


SPEC = KernelSpec(
    name="softmax",
    reference=reference,
    golden=golden,
    target=target,
    sample=sample,
    inputs=("x",),
    attrs={"dim": -1},
    grads=("x",),
    outputs=("y",),
    kind="reduction",
    # A production width; one below, at and above two tile sizes; many row tiles; a tile mostly masked.
    shapes=((8, 2048), (3, 255), (3, 256), (3, 257), (4, 4095), (4, 4096), (4, 4097), (131, 96), (2, 2)),
    dtypes=("bfloat16", "float16", "float32"),
    sites=(
        "Softmax",
        "bridge::softmax",
        "aten::_softmax.default",
        "aten::softmax.int",
        "softmax_forward_kernel",
        "softmax_backward_kernel",
    ),
    adversarial={
        "all-negative rows": all_negative,
        "extreme logits": extreme,
        "one winner": one_winner,
        "masked": masked,
    },
    faults={
        "no shift by the maximum": _fault_no_shift,
        "zero padding in the maximum": _fault_zero_padding_in_max,
        "zero padding in the sum": _fault_padding_in_sum,
        "sum in low precision": _fault_sum_in_low_precision,
        "last column not summed": _fault_last_column_not_summed,
        "no gradient through the sum": _fault_no_gradient_through_sum,
        "backward from the rounded output": _fault_backward_of_rounded_output,
    },
)
