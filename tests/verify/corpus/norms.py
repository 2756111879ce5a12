"""Norms: gains, statistics, epsilon, reductions over rows."""

from __future__ import annotations

from typing import Any

import torch

from bridge.verify import KernelSpec
from tests.verify.corpus.pairs import Pair, full, fused, last, normal, sequential_sum

F16 = ("float16",)
BOTH = ("float16", "float32")


def rms_reference(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(x.dtype)


def rms_kernel(
    *,
    gain_dtype: torch.dtype = torch.float32,
    rstd_dtype: torch.dtype = torch.float32,
    eps_outside: bool = False,
    hard_eps: float | None = None,
    saved_dtype: torch.dtype = torch.float32,
    grad_gain: bool = True,
    weight_sum: str = "fp32",
    in_place: bool = False,
    rows: int = 8,
) -> Any:
    def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        h = x.reshape(-1, x.shape[-1]).float()
        used = eps if hard_eps is None else hard_eps
        ms = sequential_sum(h * h, 1) / h.shape[1]
        rstd = 1.0 / (ms.sqrt() + used) if eps_outside else 1.0 / (ms + used).sqrt()
        rstd = rstd.to(rstd_dtype).float()[:, None]
        gain = (1.0 + weight.to(gain_dtype)).float() if gain_dtype != torch.float32 else 1.0 + weight.float()
        y = (h * rstd * gain).to(x.dtype).reshape(x.shape)
        return y, (x, weight, rstd.to(saved_dtype).float(), gain)

    def backward(saved: Any, dy: torch.Tensor) -> Any:
        x, weight, rstd, gain = saved
        h, g = x.reshape(-1, x.shape[-1]).float(), dy.reshape(-1, x.shape[-1]).float()
        xhat = h * rstd
        wg = g * (gain if grad_gain else weight.float())
        dx = ((wg - xhat * (wg * xhat).mean(-1, keepdim=True)) * rstd).to(x.dtype).reshape(x.shape)
        terms = g * xhat
        if weight_sum == "floor":
            kept = max(rows, terms.shape[0] // rows * rows)
            dw = terms[:kept].sum(0)
        elif weight_sum == "fp16":
            dw = sequential_sum(terms.half(), 0)
        else:
            dw = sequential_sum(terms, 0)
        if in_place:
            dy.copy_(dx)
            dx = dy
        return dx, dw.to(weight.dtype), None

    apply = fused(forward, backward)
    return lambda x, weight, *, eps: apply(x, weight, eps)


def rms(name: str, dtypes: tuple[str, ...] = BOTH, eps: float = 1e-6, **wrong: Any) -> Any:
    def make(bad: bool) -> KernelSpec:
        return KernelSpec(
            name=name,
            reference=rms_reference,
            target=rms_kernel(**(wrong if bad else {})),
            sample=normal(full, last, scale=1.0),
            inputs=("x", "weight"),
            attrs={"eps": eps},
            grads=("x", "weight"),
            outputs=("y",),
            kind="reduction",
            shapes=((24, 96), (9, 65)),
            dtypes=dtypes,
        )

    return make


def layer_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> torch.Tensor:
    h = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return h.to(x.dtype)


def layer_kernel(*, variance: str = "two-pass", low_stats: bool = False, dead_rows: bool = False) -> Any:
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
        h = x.reshape(-1, x.shape[-1]).float()
        n = h.shape[1]
        mean = h.sum(1, keepdim=True) / n
        mean = mean + (h - mean).sum(1, keepdim=True) / n
        centred = h - mean
        var = (centred * centred).sum(1, keepdim=True) / n
        if variance == "one-pass":
            var = ((h * h).sum(1, keepdim=True) / n - mean * mean).clamp_min(0)
        if variance == "padded":
            var = var + ((1 << (n - 1).bit_length()) - n) * mean * mean / n
        rstd = 1.0 / (var + eps).sqrt()
        y = (centred * rstd * weight.float() + bias.float()).to(x.dtype).reshape(x.shape)
        kept = (mean.half().float(), rstd.half().float()) if low_stats else (mean, rstd)
        return y, (x, weight, *kept)

    def backward(saved: Any, dy: torch.Tensor) -> Any:
        x, weight, mean, rstd = saved
        h, g = x.reshape(-1, x.shape[-1]).float(), dy.reshape(-1, x.shape[-1]).float()
        xhat = (h - mean) * rstd
        wg = g * weight.float()
        dx = (wg - wg.mean(-1, keepdim=True) - xhat * (wg * xhat).mean(-1, keepdim=True)) * rstd
        if dead_rows:
            dx = torch.cat((dx[: x.shape[0]], torch.zeros_like(dx[x.shape[0] :])))
        dx = dx.to(x.dtype).reshape(x.shape)
        return dx, (g * xhat).sum(0).to(weight.dtype), g.sum(0).to(weight.dtype), None

    apply = fused(forward, backward)
    return lambda x, weight, bias, *, eps: apply(x, weight, bias, eps)


def layer(name: str, shapes: Any = ((16, 96), (9, 33)), dtypes: tuple[str, ...] = BOTH, **wrong: Any) -> Any:
    def make(bad: bool) -> KernelSpec:
        return KernelSpec(
            name=name,
            reference=layer_reference,
            target=layer_kernel(**(wrong if bad else {})),
            sample=normal(full, last, last),
            inputs=("x", "weight", "bias"),
            attrs={"eps": 1e-5},
            grads=("x", "weight", "bias"),
            outputs=("y",),
            kind="reduction",
            shapes=shapes,
            dtypes=dtypes,
        )

    return make


def prenorm(bad: bool) -> KernelSpec:
    """RMSNorm of x + res that also returns the sum; its gradient is added, not normed."""

    def reference(x: torch.Tensor, res: torch.Tensor) -> Any:
        s = x.float() + res.float()
        return (s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype), s.to(x.dtype)

    def forward(x: torch.Tensor, res: torch.Tensor) -> Any:
        s = x.float() + res.float()
        rstd = 1.0 / ((s * s).mean(-1, keepdim=True) + 1e-6).sqrt()
        return ((s * rstd).to(x.dtype), s.to(x.dtype)), (s, rstd, x.dtype)

    def backward(saved: Any, dy: torch.Tensor, ds: torch.Tensor) -> Any:
        s, rstd, dtype = saved
        h, g = s * rstd, dy.float() + (ds.float() if bad else 0.0)
        dx = (g - h * (g * h).mean(-1, keepdim=True)) * rstd + (0.0 if bad else ds.float())
        dx = dx.to(dtype)
        return dx, dx

    apply = fused(forward, backward)
    return KernelSpec(
        name="prenorm",
        reference=reference,
        target=lambda x, res: apply(x, res),
        sample=normal(full, full),
        inputs=("x", "res"),
        grads=("x", "res"),
        outputs=("y", "sum"),
        kind="reduction",
        shapes=((12, 64), (5, 33)),
        dtypes=BOTH,
    )


def postnorm(bad: bool) -> KernelSpec:
    """RMSNorm(x) + x; the wrong backward forgets the path around the norm."""

    def reference(x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) + h).to(x.dtype)

    def forward(x: torch.Tensor) -> Any:
        h = x.float()
        rstd = 1.0 / ((h * h).mean(-1, keepdim=True) + 1e-6).sqrt()
        return (h * rstd + h).to(x.dtype), (h, rstd, x.dtype)

    def backward(saved: Any, dy: torch.Tensor) -> torch.Tensor:
        h, rstd, dtype = saved
        unit, g = h * rstd, dy.float()
        dx = (g - unit * (g * unit).mean(-1, keepdim=True)) * rstd
        return (dx if bad else dx + g).to(dtype)

    apply = fused(forward, backward)
    return KernelSpec(
        name="postnorm",
        reference=reference,
        target=lambda x: apply(x),
        sample=normal(full),
        inputs=("x",),
        grads=("x",),
        outputs=("y",),
        kind="reduction",
        shapes=((12, 64), (5, 33)),
        dtypes=BOTH,
    )


W = frozenset({"y", "grad_x", "grad_weight"})
PAIRS: tuple[Pair, ...] = (
    Pair(
        name="gain without offset in the backward",
        make=rms("rms_grad", grad_gain=False),
        tensors=frozenset({"grad_x"}),
        cause="weight where it needs 1 + weight",
    ),
    Pair(
        name="1 + w in fp16",
        make=rms("rms_gain", F16, gain_dtype=torch.float16),
        tensors=frozenset({"y", "grad_x"}),
        cause="1 + weight is rounded",
    ),
    Pair(
        name="rstd in fp16",
        make=rms("rms_rstd", F16, rstd_dtype=torch.float16),
        tensors=W,
        cause="reciprocal root",
    ),
    Pair(
        name="saved rstd in fp16",
        make=rms("rms_saved", F16, saved_dtype=torch.float16),
        tensors=frozenset({"grad_x", "grad_weight"}),
        cause="saved for the backward",
    ),
    Pair(
        name="eps outside the root",
        make=rms("rms_eps", eps=1e-5, eps_outside=True),
        tensors=W,
        cause="epsilon",
    ),
    Pair(
        name="hard-coded eps", make=rms("rms_hard_eps", eps=1e-6, hard_eps=1e-5), tensors=W, cause="epsilon"
    ),
    Pair(
        name="tail block of dW lost",
        make=rms("rms_floor", weight_sum="floor"),
        tensors=frozenset({"grad_weight"}),
        cause="tail block dropped",
    ),
    Pair(
        name="dW accumulated in fp16",
        make=rms("rms_low_sum", BOTH, weight_sum="fp16"),
        tensors=frozenset({"grad_weight"}),
        cause="accumulated in float16",
    ),
    Pair(
        name="backward writes over grad_output",
        make=rms("rms_in_place", F16, in_place=True),
        tensors=frozenset({"grad_x"}),
        cause="overwrites grad_output",
    ),
    Pair(
        name="one-pass variance",
        make=layer("ln_one_pass", variance="one-pass"),
        tensors=frozenset({"y", "grad_x", "grad_weight"}),
        cause="one-pass",
    ),
    Pair(
        name="padding in the variance",
        make=layer("ln_padded", variance="padded"),
        tensors=frozenset({"y", "grad_x", "grad_weight"}),
        cause="padded lanes",
    ),
    Pair(
        name="saved statistics in fp16",
        make=layer("ln_stats", dtypes=F16, low_stats=True),
        tensors=frozenset({"grad_x", "grad_weight"}),
        cause="saved for the backward",
    ),
    Pair(
        name="rows counted from the first axis only",
        make=layer("ln_rank3", shapes=((3, 5, 32), (2, 4, 33)), dead_rows=True),
        tensors=frozenset({"grad_x"}),
        cause="first axis only",
    ),
    Pair(
        name="residual gradient dropped",
        make=postnorm,
        tensors=frozenset({"grad_x"}),
        cause="residual gradient",
    ),
    Pair(
        name="residual gradient through the norm",
        make=prenorm,
        tensors=frozenset({"grad_x", "grad_res"}),
        cause="goes through the backward of `y`",
    ),
)
