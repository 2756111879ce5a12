"""State that a kernel keeps between calls: shared results, shared statistics, workspaces, races."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from bridge.verify import KernelSpec
from tests.verify.corpus.pairs import fused, paired, slip


def _race(wrong: bool) -> KernelSpec:
    calls = itertools.count()

    def target(x: torch.Tensor) -> torch.Tensor:
        lost = wrong and next(calls) % 3 == 1
        return (x[:, :-1] if lost and x.shape[-1] > 1 else x).sum(-1)

    return slip(lambda x: x.sum(-1), target)


def _rescaled_weights(wrong: bool) -> KernelSpec:
    """The weight gradient of y = x * w, rows added in another order on every call, as atomics do."""
    order = torch.Generator().manual_seed(3)
    rest: dict[int, torch.Tensor] = {}

    def backward(saved: Any, g: torch.Tensor) -> Any:
        x, w = saved
        rows = (g * x)[torch.randperm(len(x), generator=order)]
        total = rest.get(x.shape[-1], torch.zeros_like(w)) if wrong else torch.zeros_like(w)
        for row in rows:
            total = total + row
        rest[x.shape[-1]] = total
        return g * w, total

    def sample(shape: tuple[int, ...], dtype: Any, generator: Any, device: str) -> Any:
        return tuple(
            torch.randn(s, generator=generator, device=device).to(dtype) for s in (shape, shape[-1:])
        )

    apply = fused(lambda x, w: (x * w, (x, w)), backward)
    return slip(
        lambda x, w: x * w, lambda x, w: apply(x, w), sample=sample, inputs=("x", "w"), grads=("x", "w")
    )


def _held(wrong: bool) -> KernelSpec:
    """A result in a buffer that the next call writes as well."""
    buffers: dict[Any, torch.Tensor] = {}

    def target(x: torch.Tensor) -> torch.Tensor:
        made = torch.tanh(x)
        return buffers.setdefault(x.shape, made.clone()).copy_(made) if wrong else made

    return slip(torch.tanh, target, kind="elementwise")


def _saved(wrong: bool) -> KernelSpec:
    """Statistics for the backward in a buffer that the next forward writes as well."""
    buffers: dict[Any, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> Any:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        kept = buffers.setdefault(scale.shape, scale.clone()).copy_(scale) if wrong else scale
        return x * scale, (x, kept)

    def backward(saved: Any, g: torch.Tensor) -> torch.Tensor:
        x, scale = saved
        h = x * scale
        return scale * (g - h * (g * h).mean(-1, keepdim=True))

    apply = fused(forward, backward)
    return slip(
        lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), lambda x: apply(x), grads=("x",)
    )


#: Seen on the declared shapes alone.
PAIRS = (
    paired("result depends on the run", _race, "y", "depends on the run"),
    paired("result in memory shared by calls", _held, "y", "is overwritten by a later call"),
    paired("statistics in memory shared by calls", _saved, "grad_x", "state is kept between calls"),
    paired("workspace never cleared", _rescaled_weights, "grad_w", "depends on the run"),
)
