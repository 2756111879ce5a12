"""Correct kernels that a careless judge flags."""

from __future__ import annotations

from typing import Any

import torch

from bridge.verify import KernelSpec
from tests.verify.corpus.pairs import full, fused, last, normal, sequential_sum

BOTH = ("float16", "float32")


def _spec(
    name: str,
    kind: str,
    reference: Any,
    target: Any,
    inputs: tuple[str, ...],
    grads: tuple[str, ...],
    **more: Any,
) -> KernelSpec:
    defaults: dict[str, Any] = {
        "shapes": ((12, 64), (5, 33)),
        "dtypes": BOTH,
        "sample": normal(full),
        "outputs": ("y",),
    }
    return KernelSpec(
        name=name,
        kind=kind,
        reference=reference,
        target=target,
        inputs=inputs,
        grads=grads,
        **(defaults | more),
    )


def relu_drops_nan() -> KernelSpec:
    apply = fused(
        lambda x: (torch.where(x > 0, x, torch.zeros_like(x)), x),
        lambda x, g: torch.where(x > 0, g, torch.zeros_like(g)),
    )
    return _spec("relu", "elementwise", torch.relu, lambda x: apply(x), ("x",), ("x",))


def row_max() -> KernelSpec:
    def forward(x: torch.Tensor) -> Any:
        top = torch.where(torch.isnan(x), torch.full_like(x, float("-inf")), x).max(-1)
        return top.values, (x.shape, top.indices)

    def backward(saved: Any, g: torch.Tensor) -> torch.Tensor:
        shape, index = saved
        return torch.zeros(shape, dtype=g.dtype).scatter(-1, index[..., None], g[..., None])

    apply = fused(forward, backward)
    return _spec("row_max", "reduction", lambda x: x.amax(-1), lambda x: apply(x), ("x",), ("x",))


def sequential() -> KernelSpec:
    apply = fused(
        lambda x: (sequential_sum(x.float(), -1), x),
        lambda x, g: g[..., None].expand(x.shape).to(x.dtype),
    )
    return _spec(
        "sequential",
        "reduction",
        lambda x: x.float().sum(-1),
        lambda x: apply(x),
        ("x",),
        ("x",),
        shapes=((4, 2048), (3, 257)),
    )


def same_sign() -> KernelSpec:
    apply = fused(
        lambda x: (sequential_sum(x.float().abs(), 0), x),
        lambda x, g: (g.expand(x.shape) * torch.sign(x.float())).to(x.dtype),
    )
    return _spec(
        "same_sign",
        "reduction",
        lambda x: x.float().abs().sum(0),
        lambda x: apply(x),
        ("x",),
        ("x",),
        shapes=((1500, 8),),
    )


def cancelling() -> KernelSpec:
    def sample(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str) -> Any:
        half = 100 * torch.randn(shape[0], shape[1], generator=generator, device=device)
        noise = 1e-5 * torch.randn(shape[0], 2 * shape[1], generator=generator, device=device)
        return ((torch.cat((half, -half), 1) + noise).to(dtype),)

    apply = fused(lambda x: (sequential_sum(x, -1), x), lambda x, g: g[:, None].expand(x.shape).clone())
    return _spec(
        "cancelling",
        "reduction",
        lambda x: x.sum(-1),
        lambda x: apply(x),
        ("x",),
        ("x",),
        sample=sample,
        dtypes=("float32",),
        per_term=lambda x: x,
    )


def argmax_and_gather() -> KernelSpec:
    def target(x: torch.Tensor) -> Any:
        top = x.float().max(-1)
        return top.indices, top.values.to(x.dtype)

    def reference(x: torch.Tensor) -> Any:
        index = x.argmax(-1)
        return index, x.gather(-1, index[..., None])[..., 0]

    return _spec("top1", "other", reference, target, ("x",), (), outputs=("index", "value"))


def log_sum() -> KernelSpec:
    """logsumexp by exp2, another legal formula with its own rounding."""

    def forward(x: torch.Tensor) -> Any:
        z = x.float() * 1.4426950408889634
        top = z.amax(-1, keepdim=True)
        lse = (top + torch.log2(torch.exp2(z - top).sum(-1, keepdim=True))) * 0.6931471805599453
        return lse[..., 0], (x, lse)

    apply = fused(forward, lambda s, g: (torch.exp(s[0].float() - s[1]) * g[..., None]).to(s[0].dtype))
    return _spec(
        "lse", "reduction", lambda x: torch.logsumexp(x.float(), -1), lambda x: apply(x), ("x",), ("x",)
    )


def cast_order() -> KernelSpec:
    """A norm that rounds before the weight, as its reference does."""

    def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight

    def forward(x: torch.Tensor, weight: torch.Tensor) -> Any:
        h = x.float()
        rstd = 1 / (sequential_sum(h * h, -1)[..., None] / h.shape[-1] + 1e-6).sqrt()
        return ((h * rstd).to(x.dtype).float() * weight.float()).to(x.dtype), (h, rstd, weight, x.dtype)

    def backward(saved: Any, g: torch.Tensor) -> Any:
        h, rstd, weight, dtype = saved
        xhat = h * rstd
        wg = (g.float() * weight.float()).to(dtype).float()
        dx = (wg - xhat * (wg * xhat).mean(-1, keepdim=True)) * rstd
        dw = (g.float() * xhat.to(dtype).float()).to(dtype).float().sum(0).to(dtype)
        return dx.to(dtype), dw

    apply = fused(forward, backward)
    return _spec(
        "cast_order",
        "reduction",
        reference,
        lambda x, weight: apply(x, weight),
        ("x", "weight"),
        ("x", "weight"),
        sample=normal(full, last),
    )


def noisy_exp() -> KernelSpec:
    """SiLU whose exp is two ULP off, as hardware's may be."""

    def sigmoid(x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(-x)
        return 1 / (1 + e * (1 + 2.4e-7 * torch.cos(1e4 * x)))

    def slope(x: torch.Tensor) -> torch.Tensor:
        s = sigmoid(x)
        return s * (1 + x * (1 - s))

    apply = fused(
        lambda x: ((x.float() * sigmoid(x.float())).to(x.dtype), x),
        lambda x, g: (g.float() * slope(x.float())).to(x.dtype),
    )
    return _spec(
        "noisy_exp",
        "elementwise",
        lambda x: torch.nn.functional.silu(x.float()).to(x.dtype),
        lambda x: apply(x),
        ("x",),
        ("x",),
    )


BENIGN = (
    relu_drops_nan,
    row_max,
    sequential,
    same_sign,
    cancelling,
    argmax_and_gather,
    log_sum,
    cast_order,
    noisy_exp,
)
