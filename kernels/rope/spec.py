"""What `bridge verify --op rope` judges, on what inputs, against which plausible faults.

`SPEC` pairs column i with column i + pairs; `INTERLEAVED` (`--kernel .../spec.py:INTERLEAVED`) neighbours.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch

from bridge.kernels.rope.op import rope
from bridge.kernels.rope.reference import golden, reference
from bridge.kernels.rope.table import rotary_table
from bridge.verify import KernelSpec

Tensor = torch.Tensor
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Device = str | torch.device
_TABLE = 64
_THETA = 10000.0

target = partial(rope, backend="kernel")


def _draw(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    device: Device,
    *,
    share: float = 1.0,
    offset: int = 0,
) -> Inputs:
    x = torch.randn(shape, generator=generator, device=device).to(dtype)
    positions = torch.randint(0, _TABLE, shape[:-2], generator=generator, device=device)
    cos, sin = rotary_table(
        _TABLE, 2 * int(share * shape[-1] / 2), theta=_THETA, offset=offset, device=device
    )
    return x, cos, sin, positions


def sample(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """x `shape` [tokens, heads, columns] from N(0, 1); fp32 tables of 64 positions, in any order."""
    return _draw(shape, dtype, generator, device)


def partial_rotary(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Three quarters of the columns are rotated, a width that is no power of two; the rest passes through."""
    return _draw(shape, dtype, generator, device, share=0.75)


def long_positions(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Angles of positions from one million on."""
    return _draw(shape, dtype, generator, device, offset=1_000_000)


def first_position(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Every token at position 0, which is not turned at all."""
    x, cos, sin, positions = _draw(shape, dtype, generator, device)
    return x, cos, sin, torch.zeros_like(positions)


def _fault_table_rounded(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, **options: Any) -> Tensor:
    return reference(x, cos.to(x.dtype), sin.to(x.dtype), positions, **options)


def _fault_position_off_by_one(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, **options: Any
) -> Tensor:
    return reference(x, cos, sin, (positions + 1) % cos.shape[0], **options)


def _fault_positions_ignored(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, **options: Any
) -> Tensor:
    index = torch.arange(positions.numel(), device=x.device).reshape(positions.shape)
    return reference(x, cos, sin, index % cos.shape[0], **options)


def _fault_turned_backwards(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, **options: Any) -> Tensor:
    return reference(x, cos, -sin, positions, **options)


def _fault_other_pairing(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool
) -> Tensor:
    return reference(x, cos, sin, positions, interleaved=not interleaved)


def _fault_sine_by_padded_width(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, **options: Any
) -> Tensor:
    # cos and sin lie side by side, and sin is looked for after the width rounded up to a power of two.
    pairs = cos.shape[1]
    padded = 1 << max(pairs - 1, 0).bit_length()
    both = torch.cat((cos, sin, torch.zeros(cos.shape[0], padded, device=cos.device, dtype=cos.dtype)), 1)
    return reference(x, cos, both[:, padded : padded + pairs], positions, **options)


def _fault_rest_dropped(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, **options: Any) -> Tensor:
    y = reference(x, cos, sin, positions, **options)
    keep = torch.ones_like(y)
    keep[..., 2 * cos.shape[1] :] = 0
    return y * keep


class _ForwardTwice(torch.autograd.Function):
    """Rotates; its backward rotates the gradient the same way instead of back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        return reference(x, cos, sin, positions, interleaved=interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = grads
        return reference(grad, *ctx.saved_tensors, interleaved=ctx.interleaved), None, None, None, None


def _fault_gradient_turned_forward(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool
) -> Tensor:
    return _ForwardTwice.apply(x, cos, sin, positions, interleaved)  # type: ignore[no-any-return,no-untyped-call]


def _fault_products_rounded(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, **options: Any) -> Tensor:
    zero = torch.zeros_like(cos)
    turned = reference(x, cos, zero, positions, **options)
    crossed = reference(x, zero, sin, positions, **options)
    pairs = cos.shape[1]
    crossed = torch.cat((crossed[..., : 2 * pairs], torch.zeros_like(crossed[..., 2 * pairs :])), -1)
    return (turned.float() + crossed.float()).to(x.dtype)


SPEC = KernelSpec(
    name="rope",
    reference=reference,
    golden=golden,
    target=target,
    sample=sample,
    inputs=("x", "cos", "sin", "positions"),
    attrs={"interleaved": False},
    grads=("x",),
    outputs=("y",),
    kind="elementwise",
    # Head sizes in use, among them 96 and 192, which are no powers of two; one head; the smallest head.
    shapes=((16, 8, 128), (7, 3, 64), (5, 2, 96), (3, 2, 192), (3, 1, 256), (33, 4, 16), (5, 3, 2)),
    dtypes=("bfloat16", "float16", "float32"),
    sites=("bridge::rope", "rope_kernel"),
    adversarial={
        "partial rotary": partial_rotary,
        "long positions": long_positions,
        "first position": first_position,
    },
    faults={
        "table rounded to the dtype of x": _fault_table_rounded,
        "position off by one": _fault_position_off_by_one,
        "positions ignored": _fault_positions_ignored,
        "turned backwards": _fault_turned_backwards,
        "the other pairing": _fault_other_pairing,
        "sine found by the padded width": _fault_sine_by_padded_width,
        "columns that are not rotated dropped": _fault_rest_dropped,
        "gradient turned forward": _fault_gradient_turned_forward,
        "products rounded before the sum": _fault_products_rounded,
    },
)

INTERLEAVED = dataclasses.replace(SPEC, name="rope_interleaved", attrs={"interleaved": True})
