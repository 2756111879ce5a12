"""The pair of one mechanism, and how a fused kernel is put together from a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bridge.verify import KernelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """`make(True)` is the wrong kernel, `make(False)` its twin.

    tensors: what must be named; cause: a word of the diagnosis, "" where none is asked for.
    """

    name: str
    make: Callable[[bool], KernelSpec]
    tensors: frozenset[str]
    cause: str = ""


def fused(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A differentiable function from `forward(*x) -> (outputs, saved)` and `backward(saved, *grads)`."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            outputs, saved = forward(*inputs)
            ctx.saved = saved
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return backward(ctx.saved, *grads)

    return Fused.apply


def normal(*widths: Callable[[tuple[int, ...]], tuple[int, ...]], scale: float = 1.0) -> Callable[..., Any]:
    """`sample` that draws one normal tensor per width function."""

    def sample(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str) -> Any:
        return tuple(
            (scale * torch.randn(width(shape), generator=generator, device=device)).to(dtype)
            for width in widths
        )

    return sample


def full(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


def last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[-1:]


def sequential_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """One term after the other in the dtype of `x`: legal in FP32, a stalling accumulator in 16 bits."""
    parts = x.unbind(dim)
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def paired(name: str, make: Any, tensors: str, cause: str) -> Pair:
    """A pair from the names of the tensors that must fail, with blanks between them."""
    return Pair(name=name, make=make, tensors=frozenset(tensors.split()), cause=cause)


def slip(reference: Any, target: Any, **more: Any) -> KernelSpec:
    """A reduction `y` of `x` in fp32, but for the fields given."""
    fields: dict[str, Any] = {
        "name": "slip",
        "reference": reference,
        "target": target,
        "sample": normal(full),
        "inputs": ("x",),
        "outputs": ("y",),
        "kind": "reduction",
        "shapes": ((6, 40), (3, 17)),
        "dtypes": ("float32",),
    }
    return KernelSpec(**(fields | more))
