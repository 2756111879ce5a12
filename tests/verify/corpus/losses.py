"""Softmax, cross-entropy, matmul, gather and scatter; the pairs of these and of attention."""

from __future__ import annotations

from typing import Any

import torch

from bridge.verify import KernelSpec
from tests.verify.corpus.attention import attention, rope
from tests.verify.corpus.pairs import Pair, full, fused, normal

BOTH = ("float16", "float32")


def _logits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str) -> Any:
    rows, classes = shape
    z = 2 * torch.randn(rows, classes, generator=generator, device=device)
    return z.to(dtype), torch.randint(0, classes, (rows,), generator=generator, device=device)


def cross_entropy(name: str, dtypes: tuple[str, ...] = BOTH, **wrong: Any) -> Any:
    def kernel(*, scalar_grad: bool = False, low_p: bool = False, zero_pad: bool = False) -> Any:
        def forward(z: torch.Tensor, labels: torch.Tensor) -> Any:
            wide = z.float()
            top = wide.amax(1, keepdim=True)
            e = torch.exp2((wide - top) * 1.4426950408889634)
            total = e.sum(1, keepdim=True)
            if zero_pad:
                spare = (1 << (z.shape[1] - 1).bit_length()) - z.shape[1]
                total = total + spare * torch.exp(-top)
            loss = (total.log() - (wide.gather(1, labels[:, None]) - top))[:, 0]
            return loss, (z, labels, top, total.log())

        def backward(saved: Any, g: torch.Tensor) -> Any:
            z, labels, top, spread = saved
            # Not exp(z - lse): at logits near 1000 a rounded lse costs 1e-5 of p.
            p = torch.exp(z.float() - top - spread)
            if low_p:
                p = p.to(z.dtype).float()
            onehot = torch.nn.functional.one_hot(labels, z.shape[1])
            up = g[:1].expand(g.shape) if scalar_grad else g
            return ((p - onehot) * up[:, None]).to(z.dtype), None

        return fused(forward, backward)

    def make(bad: bool) -> KernelSpec:
        apply = kernel(**(wrong if bad else {}))
        return KernelSpec(
            name=name,
            reference=lambda z, labels: torch.nn.functional.cross_entropy(
                z.float(), labels, reduction="none"
            ),
            target=lambda z, labels: apply(z, labels),
            sample=_logits,
            inputs=("logits", "labels"),
            grads=("logits",),
            outputs=("nll",),
            kind="reduction",
            shapes=((12, 96), (5, 33)),
            dtypes=dtypes,
        )

    return make


def softmax(name: str, dtypes: tuple[str, ...] = BOTH, **wrong: Any) -> Any:
    def kernel(*, top: str = "max", tiles: bool = False) -> Any:
        def forward(x: torch.Tensor) -> Any:
            wide = x.float()
            if tiles:
                y = _online(wide)
            else:
                peak = wide.amax(1, keepdim=True)
                peak = {"max": peak, "zero": peak.clamp_min(0), "none": torch.zeros_like(peak)}[top]
                e = torch.exp(wide - peak)
                y = e / e.sum(1, keepdim=True)
            return y.to(x.dtype), (y, x.dtype)

        def backward(saved: Any, g: torch.Tensor) -> Any:
            y, dtype = saved
            g = g.float()
            return (y * (g - (y * g).sum(1, keepdim=True))).to(dtype)

        return fused(forward, backward)

    def make(bad: bool) -> KernelSpec:
        apply = kernel(**(wrong if bad else {}))
        return KernelSpec(
            name=name,
            reference=lambda x: torch.softmax(x.float(), -1).to(x.dtype),
            target=lambda x: apply(x),
            sample=normal(full, scale=2.0),
            inputs=("x",),
            grads=("x",),
            outputs=("y",),
            kind="reduction",
            shapes=((8, 96), (5, 33)),
            dtypes=dtypes,
        )

    return make


def _online(x: torch.Tensor) -> torch.Tensor:
    """Streaming softmax that forgets to guard a first tile of -Inf only."""
    top, total = x[:, :8].amax(1, keepdim=True), None
    total = torch.exp(x[:, :8] - top).sum(1, keepdim=True)
    for start in range(8, x.shape[1], 8):
        tile = x[:, start : start + 8]
        new = torch.maximum(top, tile.amax(1, keepdim=True))
        total = total * torch.exp(top - new) + torch.exp(tile - new).sum(1, keepdim=True)
        top = new
    return torch.exp(x - top) / total


def matmul(name: str, **wrong: Any) -> Any:
    def product(a: torch.Tensor, b: torch.Tensor, bad: bool) -> torch.Tensor:
        low = wrong.get("low") if bad else None
        if low == "tf32":
            a, b = ((t.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b))
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16 if low == "fp16" else torch.float32)
        stop = a.shape[1] // 16 * 16 if bad and wrong.get("tail") and a.shape[1] > 16 else a.shape[1]
        for k in range(0, stop, 16):
            part = a[:, k : min(k + 16, stop)].float() @ b[k : min(k + 16, stop)].float()
            total = (total + part).to(total.dtype)
        return total.to(a.dtype)

    def make(bad: bool) -> KernelSpec:
        apply = fused(
            lambda a, b: (product(a, b, bad), (a, b)),
            lambda s, g: (product(g, s[1].t(), bad), product(s[0].t(), g, bad)),
        )
        dtypes = ("float32",) if wrong.get("low") == "tf32" else BOTH
        return KernelSpec(
            name=name,
            reference=lambda a, b: a @ b,
            target=lambda a, b: apply(a, b),
            sample=lambda s, d, g, dev: (
                torch.randn(s[0], s[2], generator=g, device=dev).to(d),
                torch.randn(s[2], s[1], generator=g, device=dev).to(d),
            ),
            inputs=("a", "b"),
            grads=("a", "b"),
            outputs=("y",),
            kind="matmul",
            shapes=((24, 80, 96), (97, 97, 65)),
            dtypes=dtypes,
        )

    return make


def embedding(bad: bool) -> KernelSpec:
    """Gather forward; the gradient is scattered into the table, hot rows many times."""

    def backward(saved: Any, g: torch.Tensor) -> Any:
        ids, count = saved
        table = torch.zeros(count, g.shape[1], dtype=torch.float16 if bad else torch.float32)
        for row, token in enumerate(ids.tolist()):
            table[token] += g[row].to(table.dtype)
        return table.to(g.dtype), None

    apply = fused(lambda w, ids: (w[ids], (ids, w.shape[0])), backward)
    return KernelSpec(
        name="embedding",
        reference=lambda w, ids: torch.nn.functional.embedding(ids, w),
        target=lambda w, ids: apply(w, ids),
        sample=lambda s, d, g, dev: (
            torch.randn(4, s[1], generator=g, device=dev).to(d),
            torch.randint(0, 4, (s[0],), generator=g, device=dev),
        ),
        inputs=("w", "ids"),
        grads=("w",),
        outputs=("y",),
        kind="other",
        shapes=((256, 32), (65, 9)),
        dtypes=("float32",),
    )


def exclusive_sum(bad: bool) -> KernelSpec:
    def scan(x: torch.Tensor) -> torch.Tensor:
        y = torch.cumsum(x.float(), -1)
        return (y - x.float() if bad else y).to(x.dtype)

    apply = fused(
        lambda x: (scan(x), None),
        lambda _, g: g.float().flip(-1).cumsum(-1).flip(-1).to(g.dtype),
    )
    return KernelSpec(
        name="cumsum",
        reference=lambda x: torch.cumsum(x.float(), -1).to(x.dtype),
        target=lambda x: apply(x),
        sample=normal(full),
        inputs=("x",),
        grads=("x",),
        outputs=("y",),
        kind="reduction",
        shapes=((8, 64), (3, 33)),
        dtypes=BOTH,
    )


Q = frozenset({"grad_q", "grad_k"})
PAIRS: tuple[Pair, ...] = (
    Pair(
        name="one grad_output for all rows",
        make=cross_entropy("ce_scalar", scalar_grad=True),
        tensors=frozenset({"grad_logits"}),
        cause="first element of grad_output",
    ),
    Pair(
        name="true-class gradient from rounded p",
        make=cross_entropy("ce_low_p", ("float16",), low_p=True),
        tensors=frozenset({"grad_logits"}),
        cause="`exp` of logits is rounded",
    ),
    Pair(
        name="zero padding in logsumexp",
        make=cross_entropy("ce_pad", zero_pad=True),
        tensors=frozenset({"nll", "grad_logits"}),
        cause="enter the sum of exponentials",
    ),
    Pair(
        name="zero padding in the maximum",
        make=softmax("softmax_pad", top="zero"),
        tensors=frozenset({"y", "grad_x"}),
        cause="padded lanes",
    ),
    Pair(
        name="no maximum subtracted",
        make=softmax("softmax_raw", top="none"),
        tensors=frozenset({"y", "grad_x"}),
        cause="not subtracted",
    ),
    Pair(
        name="leading tile of -Inf",
        make=softmax("softmax_tiles", tiles=True),
        tensors=frozenset({"y", "grad_x"}),
        cause="leading tile",
    ),
    Pair(
        name="causal mask aligned top left",
        make=attention("attention_mask", top_left=True),
        tensors=frozenset({"out", "lse", "grad_q", "grad_k", "grad_v"}),
        cause="aligned to the top left",
    ),
    Pair(
        name="softcap without its derivative",
        make=attention("attention_cap", no_cap_grad=True),
        tensors=Q,
        cause="derivative of `tanh`",
    ),
    Pair(
        name="logsumexp in base 2",
        make=attention("attention_lse", base2=True),
        tensors=frozenset({"lse", "grad_q", "grad_k"}),
        cause="base 2",
    ),
    Pair(
        name="angles in fp16",
        make=rope("rope_low", low=True),
        tensors=frozenset({"y", "grad_x"}),
        cause="angle",
    ),
    Pair(
        name="positions off by one",
        make=rope("rope_shift", shift=True),
        tensors=frozenset({"y", "grad_x"}),
        cause="off by +1",
    ),
    Pair(
        name="input rotated in place",
        make=rope("rope_in_place", in_place=True),
        tensors=frozenset({"y"}),
        cause="in place",
    ),
    Pair(
        name="silent TF32",
        make=matmul("mm_tf32", low="tf32"),
        tensors=frozenset({"y", "grad_a", "grad_b"}),
        cause="TF32",
    ),
    Pair(
        name="fp16 accumulator",
        make=matmul("mm_fp16", low="fp16"),
        tensors=frozenset({"y", "grad_a", "grad_b"}),
        cause="accumulated in float16",
    ),
    Pair(
        name="tail of K lost",
        make=matmul("mm_tail", tail=True),
        tensors=frozenset({"y", "grad_a", "grad_b"}),
        cause="tail block dropped",
    ),
    Pair(
        name="gradient scattered in fp16",
        make=embedding,
        tensors=frozenset({"grad_w"}),
        cause="scattered into a table of float16",
    ),
    Pair(name="exclusive for inclusive sum", make=exclusive_sum, tensors=frozenset({"y"}), cause="exclusive"),
)
