"""Slips of index, count, sign and step: what a person sees at once and no rounding explains."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from bridge.verify import KernelSpec
from tests.verify.corpus.pairs import full, fused, normal, paired, slip


def _centre(wrong: bool) -> KernelSpec:
    apply = fused(
        lambda x: (x - x.mean(-1, keepdim=True), x.shape[-1] * (2 if wrong else 1)),
        lambda n, g: g - g.sum(-1, keepdim=True) / n,
    )
    return slip(lambda x: x - x.mean(-1, keepdim=True), lambda x: apply(x), grads=("x",))


def _rotate(wrong: bool) -> KernelSpec:
    def turn(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

    def backward(saved: Any, g: torch.Tensor) -> Any:
        cos, sin = saved
        return turn(g, cos, sin if wrong else -sin), None, None

    def sample(shape: tuple[int, ...], dtype: Any, generator: Any, device: str) -> Any:
        t, half = shape
        x = torch.randn((t, 2 * half), generator=generator, device=device).to(dtype)
        angle = torch.arange(t * half, device=device).reshape(t, half) * 0.37
        return x, angle.cos(), angle.sin()

    apply = fused(lambda x, c, s: (turn(x, c, s), (c, s)), backward)
    return slip(
        turn,
        lambda x, cos, sin: apply(x, cos, sin),
        sample=sample,
        inputs=("x", "cos", "sin"),
        grads=("x",),
        kind="elementwise",
        shapes=((6, 8), (5, 3)),
    )


def _mask(wrong: bool) -> KernelSpec:
    def target(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        gone = torch.full_like(x, -30.0 if wrong else -float("inf"))
        return torch.softmax(x + torch.where(keep > 0, torch.zeros_like(x), gone), -1)

    def sample(shape: tuple[int, ...], dtype: Any, generator: Any, device: str) -> Any:
        x = torch.randn(shape, generator=generator, device=device).to(dtype)
        keep = (torch.rand(shape, generator=generator, device=device) < 0.7).int()
        keep[..., 0] = 1
        return x, keep

    return slip(
        lambda x, keep: torch.softmax(x.masked_fill(keep == 0, -float("inf")), -1),
        target,
        sample=sample,
        inputs=("x", "keep"),
    )


def _top(wrong: bool) -> KernelSpec:
    def target(x: torch.Tensor) -> torch.Tensor:
        found = []
        for _ in range(min(3, x.shape[-1])):
            best = torch.where(torch.isnan(x), torch.full_like(x, -float("inf")), x).max(-1, keepdim=True)
            found.append(best.values)
            here = x == best.values if wrong else F.one_hot(best.indices[..., 0], x.shape[-1]).bool()
            x = x.masked_fill(here, -float("inf"))
        return torch.cat(found, -1)

    return slip(lambda x: torch.topk(x, min(3, x.shape[-1]), dim=-1).values, target, kind="other")


def _table(wrong: bool) -> KernelSpec:
    def backward(saved: Any, g: torch.Tensor) -> Any:
        index, rows = saved
        table = torch.zeros(rows, g.shape[-1], dtype=g.dtype)
        for at, row in zip(index.tolist(), g, strict=True):
            table[at] = row if wrong else table[at] + row
        return table, None

    def sample(shape: tuple[int, ...], dtype: Any, generator: Any, device: str) -> Any:
        table = torch.randn((max(1, shape[0] // 2), shape[1]), generator=generator, device=device).to(dtype)
        return table, torch.randint(0, len(table), (shape[0],), generator=generator, device=device)

    apply = fused(lambda table, index: (table[index], (index, len(table))), backward)
    return slip(
        lambda table, index: F.embedding(index, table),
        lambda table, index: apply(table, index),
        sample=sample,
        inputs=("table", "index"),
        grads=("table",),
        kind="other",
    )


def _scan(wrong: bool) -> KernelSpec:
    def target(x: torch.Tensor) -> torch.Tensor:
        carry, made = torch.zeros_like(x[:, :1]), []
        for part in x.split(16, -1):
            made.append(torch.cumsum(part, -1) + carry)
            total = part.sum(-1, keepdim=True)
            carry = total if wrong else carry + total
        return torch.cat(made, -1)

    return slip(lambda x: torch.cumsum(x, -1), target, shapes=((4, 50), (3, 33)))


def _conv(wrong: bool) -> KernelSpec:
    def target(x: torch.Tensor) -> torch.Tensor:
        before = F.pad(x, (2, 0))
        if wrong:
            before[1:, :2] = x[:-1, -2:]
        return before[:, 2:] + 0.5 * before[:, 1:-1] + 0.25 * before[:, :-2]

    def reference(x: torch.Tensor) -> torch.Tensor:
        before = F.pad(x, (2, 0))
        return before[:, 2:] + 0.5 * before[:, 1:-1] + 0.25 * before[:, :-2]

    return slip(reference, target)


def _round(wrong: bool) -> KernelSpec:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.round(x / 0.125) * 0.125

    return slip(
        reference, (lambda x: (x / 0.125 + 0.5).trunc() * 0.125) if wrong else reference, kind="other"
    )


def _bce(wrong: bool) -> KernelSpec:
    def target(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if wrong:
            s = 1 / (1 + torch.exp(-x))
            return -(t * torch.log(s + 1e-12) + (1 - t) * torch.log(1 - s + 1e-12))
        return x.clamp(min=0) - x * t + torch.log1p(torch.exp(-x.abs()))

    def sample(shape: tuple[int, ...], dtype: Any, generator: Any, device: str) -> Any:
        x = torch.randn(shape, generator=generator, device=device).to(dtype)
        return x, (torch.rand(shape, generator=generator, device=device) < 0.5).to(dtype)

    return slip(
        lambda x, t: F.binary_cross_entropy_with_logits(x.float(), t.float(), reduction="none").to(x.dtype),
        lambda x, t: target(x.float(), t.float()).to(x.dtype),
        sample=sample,
        inputs=("x", "t"),
        kind="elementwise",
        dtypes=("float16",),
    )


def _mean_of_means(wrong: bool) -> KernelSpec:
    def target(x: torch.Tensor) -> torch.Tensor:
        parts = [part.mean(-1) if wrong else part.sum(-1) for part in x.split(16, -1)]
        return torch.stack(parts).sum(0) / (len(parts) if wrong else x.shape[-1])

    return slip(lambda x: x.mean(-1), target)


def _merge(wrong: bool) -> KernelSpec:
    def target(x: torch.Tensor) -> Any:
        mean, spread, count = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), 0
        for part in x.split(16, -1):
            own = 16 if wrong else part.shape[-1]
            middle = part.mean(-1)
            delta, total = middle - mean, count + own
            spread = (
                spread + (part - middle[:, None]).square().sum(-1) + delta.square() * (count * own / total)
            )
            mean, count = mean + delta * (own / total), total
        return mean, spread / x.shape[-1]

    def reference(x: torch.Tensor) -> Any:
        mean = x.mean(-1)
        return mean, (x - mean[:, None]).square().mean(-1)

    return slip(reference, target, outputs=("mean", "var"))


def _pool(wrong: bool) -> KernelSpec:
    def target(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool1d(x[:, None], 3, 1, 1, count_include_pad=wrong)[:, 0]

    return slip(lambda x: F.avg_pool1d(x[:, None], 3, 1, 1, count_include_pad=False)[:, 0], target)


def _hash(wrong: bool) -> KernelSpec:
    def slots(token: torch.Tensor, rows: int) -> torch.Tensor:
        return (token * 8388617) % rows

    def target(table: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        product = token * 8388617
        return table[(product.int().long() if wrong else product) % len(table)]

    def sample(shape: tuple[int, ...], dtype: Any, generator: Any, device: str) -> Any:
        table = torch.randn((shape[0] + 6, shape[1]), generator=generator, device=device).to(dtype)
        return table, torch.randint(200, 300, (17,), generator=generator, device=device)

    return slip(
        lambda table, token: F.embedding(slots(token, len(table)), table),
        target,
        sample=sample,
        inputs=("table", "token"),
        kind="other",
    )


def _stream(wrong: bool) -> KernelSpec:
    def target(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        top = torch.full_like(x[:, :1], -float("inf"))
        total, gathered = torch.zeros_like(top), torch.zeros(len(x), v.shape[-1])
        for z, w in zip(x.split(16, -1), v.split(16, 0), strict=True):
            higher = torch.maximum(top, z.amax(-1, keepdim=True))
            p = torch.exp(z - higher)
            fade = torch.exp(top - higher)
            total, top = total * fade + p.sum(-1, keepdim=True), higher
            gathered = (gathered if wrong else gathered * fade) + p @ w
        return gathered / total

    def sample(shape: tuple[int, ...], dtype: Any, generator: Any, device: str) -> Any:
        x = torch.randn(shape, generator=generator, device=device).to(dtype)
        return x, torch.randn((shape[1], 8), generator=generator, device=device).to(dtype)

    return slip(
        lambda x, v: torch.softmax(x, -1) @ v,
        target,
        sample=sample,
        inputs=("x", "v"),
        shapes=((6, 40), (3, 50)),
    )


def _step(wrong: bool) -> KernelSpec:
    def reference(p: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> Any:
        d = g + 0.01 * p
        new = 0.9 * b + d
        return p - 0.1 * (d + 0.9 * new), new

    def target(p: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> Any:
        d = g + 0.01 * p
        new = 0.9 * b + d
        return p - 0.1 * ((g if wrong else d) + 0.9 * new), new

    return slip(
        reference,
        target,
        sample=normal(full, full, full),
        inputs=("p", "g", "b"),
        outputs=("p_new", "b_new"),
        kind="elementwise",
    )


def _gate(wrong: bool) -> KernelSpec:
    def backward(saved: Any, g: torch.Tensor) -> torch.Tensor:
        x, total = saved
        inner = g / total
        if not wrong:
            # The square of the total would overflow.
            inner = inner - (g * (torch.exp(x) / total)).sum(-1, keepdim=True) / total
        return inner * torch.exp(x)

    def forward(x: torch.Tensor) -> Any:
        total = torch.exp(x).sum(-1, keepdim=True)
        return torch.exp(x) / total, (x, total)

    def reference(x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(x)
        return e / e.sum(-1, keepdim=True)

    apply = fused(forward, backward)
    return slip(reference, lambda x: apply(x), grads=("x",))


def _recompute(wrong: bool) -> KernelSpec:
    """Attention that keeps a logsumexp; the wrong one keeps it in fp16."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        z = q.float() @ k.float().T
        top = z.amax(-1, keepdim=True)
        total = torch.exp(z - top).sum(-1, keepdim=True)
        out = (torch.exp(z - top) @ v.float()) / total
        lse = top + torch.log(total)
        return out.to(q.dtype), (q, k, v, out, lse.half().float() if wrong else lse)

    def backward(saved: Any, g: torch.Tensor) -> Any:
        dtype = g.dtype
        q, k, v, out, lse, g = (t.float() for t in (*saved, g))
        p = torch.exp(q @ k.T - lse)
        s = p * (g @ v.T - (g * out).sum(-1, keepdim=True))
        return (s @ k).to(dtype), (s.T @ q).to(dtype), (p.T @ g).to(dtype)

    apply = fused(forward, backward)
    return slip(
        lambda q, k, v: (torch.softmax(q.float() @ k.float().T, -1) @ v.float()).to(q.dtype),
        lambda q, k, v: apply(q, k, v),
        sample=normal(full, full, full),
        inputs=("q", "k", "v"),
        grads=("q", "k", "v"),
        outputs=("out",),
        kind="matmul",
        shapes=((20, 8), (7, 5)),
        dtypes=("float16", "float32"),
    )


def _newton(wrong: bool) -> KernelSpec:
    """Rows over their RMS, the root refined by Newton steps; the wrong one stops too early."""

    def target(x: torch.Tensor) -> torch.Tensor:
        square = x.square().mean(-1, keepdim=True) + 1e-6
        y = (torch.rsqrt(square).view(torch.int32) & -65536).view(torch.float32)
        for _ in range(1 if wrong else 3):
            y = y * (1.5 - 0.5 * square * y * y)
        return x * y

    return slip(lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), target)


def _correction(wrong: bool) -> KernelSpec:
    """A second moment corrected with the constant of the first."""

    def step(m: torch.Tensor, v: torch.Tensor, first: float, second: float) -> torch.Tensor:
        return 0.01 * (m / first) / ((v / second).sqrt() + 1e-8)

    def sample(shape: tuple[int, ...], dtype: Any, generator: Any, device: str) -> Any:
        m, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
        return m, v.square() + 1e-3

    return slip(
        lambda m, v: step(m, v, 0.65, 0.0099),
        lambda m, v: step(m, v, 0.65, 0.65 if wrong else 0.0099),
        sample=sample,
        inputs=("m", "v"),
        kind="elementwise",
    )


def _heads(wrong: bool) -> KernelSpec:
    """Every head gets the weight of the first; the gradient of the weight all lands there."""

    def backward(saved: Any, g: torch.Tensor) -> Any:
        x, w = saved
        if not wrong:
            return g * w, (g * x).sum(0)
        grad = torch.zeros_like(w)
        grad[0] = (g * x).sum((0, 1))
        return g * w[0], grad

    def sample(shape: tuple[int, ...], dtype: Any, generator: Any, device: str) -> Any:
        x = torch.randn(shape, generator=generator, device=device).to(dtype)
        return x, torch.randn(shape[1:], generator=generator, device=device).to(dtype)

    apply = fused(lambda x, w: (x * (w[0] if wrong else w), (x, w)), backward)
    return slip(
        lambda x, w: x * w,
        lambda x, w: apply(x, w),
        sample=sample,
        inputs=("x", "w"),
        grads=("x", "w"),
        shapes=((6, 4, 16), (3, 3, 9)),
    )


#: Seen on the declared shapes alone.
PAIRS = (
    paired("mean over the wrong count in the backward", _centre, "grad_x", "divides by 80 where 40 is meant"),
    paired(
        "rotation turned forward in the backward", _rotate, "grad_x", "uses sin with the sign of the forward"
    ),
    paired("repeated indices overwrite each other", _table, "grad_table", "overwrite each other"),
    paired("carry of a scan overwritten", _scan, "y", "the carry is overwritten"),
    paired("padding holds the neighbour's end", _conv, "y", "not masked at the start of each sequence"),
    paired("rounded by adding a half", _round, "y", "int(v + 0.5)"),
    paired("mean of tile means", _mean_of_means, "y", "every tile of 16 has the same weight"),
    paired("merge with full tile counts", _merge, "mean var", "merged from tiles of 16"),
    paired("pooling counts its padding", _pool, "y", "padding is counted in"),
    paired("product of integers wraps", _hash, "y", "overflows 32-bit integers"),
    paired("gathered values not rescaled", _stream, "y", "not rescaled when the running maximum rises"),
    paired("value taken a step too early", _step, "p_new", "takes a value too early"),
    paired("normaliser taken as constant", _gate, "grad_x", "the gradient through"),
    paired("constant of another step", _correction, "y", "divides by 0.65 where 0.0099 is meant"),
    paired("first row read for all", _heads, "y grad_x grad_w", "the first row of w is read for every row"),
)
#: Seen on added values only.
SWEPT = (
    paired("finite mask", _mask, "y", "the mask is finite: -30 is added"),
    paired("ties lost in a selection", _top, "y", "equal values are lost in `topk`"),
    paired("loss from the rounded sigmoid", _bce, "y", "log(sigmoid(x) + 1e-12)"),
    paired("logsumexp kept in fp16", _recompute, "grad_q grad_k grad_v", "float16"),
    paired("root refined too little", _newton, "y", ""),
)
