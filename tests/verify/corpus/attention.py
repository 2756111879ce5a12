"""Scaled dot-product attention and rotary embedding."""

from __future__ import annotations

from typing import Any

import torch

from bridge.verify import KernelSpec
from tests.verify.corpus.pairs import fused

BOTH = ("float16", "float32")


def _attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cap: float) -> Any:
    s = q.float() @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5
    s = cap * torch.tanh(s / cap)
    rows, cols = s.shape[-2:]
    s = s.masked_fill(torch.ones(rows, cols, dtype=torch.bool).triu(1 + cols - rows), float("-inf"))
    return (torch.softmax(s, -1) @ v.float()).to(q.dtype), torch.logsumexp(s, -1)


def attention(name: str, **wrong: Any) -> Any:
    def kernel(*, top_left: bool = False, no_cap_grad: bool = False, base2: bool = False) -> Any:
        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float) -> Any:
            raw = q.float() @ k.float().transpose(-1, -2) * (1.0 / q.shape[-1] ** 0.5)
            t = torch.tanh(raw / cap)
            rows, cols = raw.shape[-2:]
            hidden = torch.ones(rows, cols, dtype=torch.bool).triu(1 if top_left else 1 + cols - rows)
            s = (cap * t).masked_fill(hidden, float("-inf"))
            top = s.amax(-1, keepdim=True)
            e = torch.exp(s - top)
            total = e.sum(-1, keepdim=True)
            lse = (top + total.log())[..., 0]
            p = e / total
            out = (p @ v.float()).to(q.dtype)
            return (out, lse / 0.6931471805599453 if base2 else lse), (q, k, v, p, t)

        def backward(saved: Any, do: torch.Tensor, dl: torch.Tensor) -> Any:
            q, k, v, p, t = saved
            do = do.float()
            dp = do @ v.float().transpose(-1, -2)
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) + p * (
                dl[..., None] / (0.6931471805599453 if base2 else 1)
            )
            if not no_cap_grad:
                ds = ds * (1 - t * t)
            ds = ds / q.shape[-1] ** 0.5
            return (
                (ds @ k.float()).to(q.dtype),
                (ds.transpose(-1, -2) @ q.float()).to(k.dtype),
                (p.transpose(-1, -2) @ do).to(v.dtype),
                None,
            )

        return fused(forward, backward)

    def sample(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str) -> Any:
        rows, extra, width = shape
        sizes = (rows, rows + extra - 1, rows + extra - 1)
        return tuple(torch.randn(2, n, width, generator=generator, device=device).to(dtype) for n in sizes)

    def make(bad: bool) -> KernelSpec:
        apply = kernel(**(wrong if bad else {}))
        return KernelSpec(
            name=name,
            reference=_attention_reference,
            target=lambda q, k, v, *, cap: apply(q, k, v, cap),
            sample=sample,
            inputs=("q", "k", "v"),
            attrs={"cap": 20.0},
            grads=("q", "k", "v"),
            outputs=("out", "lse"),
            kind="other",
            shapes=((16, 1, 16), (9, 1, 8)),
            dtypes=BOTH,
        )

    return make


def rope(name: str, **wrong: Any) -> Any:
    def angles(length: int, half: int, work: torch.dtype) -> torch.Tensor:
        inv = (10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)).to(work)
        return torch.arange(length).to(work)[:, None] * inv

    def turn(x: torch.Tensor, a: torch.Tensor, work: torch.dtype) -> torch.Tensor:
        u, v = x.to(work).chunk(2, -1)
        c, s = a.cos(), a.sin()
        return torch.cat((u * c - v * s, v * c + u * s), -1).to(x.dtype)

    def make(bad: bool) -> KernelSpec:
        def angle_of(x: torch.Tensor) -> torch.Tensor:
            work = torch.float16 if bad and wrong.get("low") else torch.float32
            a = angles(x.shape[0], x.shape[1] // 2, work).float()
            return a.roll(-1, 0) if bad and wrong.get("shift") else a

        def forward(x: torch.Tensor) -> Any:
            a = angle_of(x)
            y = turn(x, a, torch.float32)
            if bad and wrong.get("in_place"):
                x.copy_(y)
            return y, a

        apply = fused(forward, lambda a, g: turn(g, -a, torch.float32))
        return KernelSpec(
            name=name,
            reference=lambda x: turn(x, angles(x.shape[0], x.shape[1] // 2, torch.float32), torch.float32),
            golden=lambda x: turn(x, angles(x.shape[0], x.shape[1] // 2, torch.float64), torch.float64),
            target=lambda x: apply(x),
            sample=lambda s, d, g, dev: (torch.randn(s[0], 2 * s[1], generator=g, device=dev).to(d),),
            inputs=("x",),
            grads=("x",),
            outputs=("y",),
            kind="other",
            shapes=((96, 16), (33, 12)),
            dtypes=("float16",),
        )

    return make
