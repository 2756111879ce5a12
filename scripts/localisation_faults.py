"""What bench_localisation plants into the demo run: faults, each with the module it is in, and legal changes.

Every entry changes a model after it was built, or a setting of the run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from localisation_change import Change, Plant, after, at, everywhere, weight
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

#: The override that puts this project's kernel in the place of the demo's eager norms.
KERNEL = "bridge.kernels.offset_rmsnorm.override.offset_rmsnorm"


def norm(module: Any, x: torch.Tensor, *, eps: float = 1e-6, formula: str = "right") -> torch.Tensor:
    """The demo's norm, right or wrong in one named way."""
    gain = 1.0 + module.weight.float()
    wide = x.float()
    square = wide.square().mean(-1, keepdim=True)
    inverse = torch.rsqrt(square + eps)
    if formula == "eps outside":
        inverse = 1.0 / (square.sqrt() + math.sqrt(eps))
    elif formula == "no offset":
        gain = module.weight.float()
    elif formula == "fp16 offset":
        gain = (1.0 + module.weight.half()).float()
    elif formula == "mean abs":
        inverse = 1.0 / wide.abs().mean(-1, keepdim=True)
    elif formula == "counts padding":
        inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True) / 128 + eps)
    elif formula == "bf16 rstd":
        inverse = inverse.bfloat16().float()
    elif formula == "root and quotient":
        return (wide * gain / torch.sqrt(square + eps)).to(x.dtype)
    elif formula == "halves":
        half = wide.shape[-1] // 2
        square = (
            wide[..., half:].square().sum(-1, True) + wide[..., :half].square().sum(-1, True)
        ) / wide.shape[-1]
        inverse = torch.rsqrt(square + eps)
    elif formula == "fp64":
        exact = x.double()
        return (
            exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * (1 + module.weight.double())
        ).to(x.dtype)
    return (gain * wide * inverse).to(x.dtype)


class _WrongNormGrad(torch.autograd.Function):
    """A norm whose forward is right and whose backward forgets the offset of the gain."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, w, inverse)
        return (1 + w) * x * inverse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, w, inverse = ctx.saved_tensors
        scaled = grad * w * inverse
        mean = (scaled * x).mean(-1, keepdim=True)
        return scaled - x * inverse * inverse * mean, (grad * x * inverse).reshape(-1, x.shape[-1]).sum(0)


class GradTimes(torch.autograd.Function):
    """Identity whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


def linear(module: Any, x: torch.Tensor, *, kind: str = "right") -> torch.Tensor:
    """A linear layer, right or wrong in one named way."""
    w = module.weight
    if kind == "tf32":
        return F.linear(_tf32(x), _tf32(w))
    if kind == "bf16":
        return F.linear(x.bfloat16(), w.bfloat16()).to(x.dtype)
    if kind == "last column lost":
        return F.linear(x[..., :-1], w[:, :-1])
    if kind == "transposed":
        return F.linear(x, w.t().contiguous())
    if kind == "split k":
        half = w.shape[1] // 2
        return F.linear(x[..., :half], w[:, :half]) + F.linear(x[..., half:], w[:, half:])
    if kind == "fp64":
        return F.linear(x.double(), w.double()).to(x.dtype)
    if kind == "einsum":
        return torch.einsum("...k,nk->...n", x, w)
    return F.linear(x, w)


def _tf32(t: torch.Tensor) -> torch.Tensor:
    raw = t.detach().contiguous().view(torch.int32)
    return t + (((raw + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32) - t).detach()


def _truncated(t: torch.Tensor) -> torch.Tensor:
    return t + ((t.detach().contiguous().view(torch.int32) & -65536).view(torch.float32) - t).detach()


def feed_forward(module: Any, x: torch.Tensor, *, kind: str) -> torch.Tensor:
    """The gated feed-forward, right or wrong in one named way."""
    gate, up = module.w1(x), module.w3(x)
    if kind == "gelu":
        return module.w2(F.gelu(gate) * up)  # type: ignore[no-any-return]
    if kind == "gate swapped":
        return module.w2(gate * F.silu(up))  # type: ignore[no-any-return]
    if kind == "no gate":
        return module.w2(up)  # type: ignore[no-any-return]
    if kind == "x sigmoid":
        return module.w2(gate * torch.sigmoid(gate) * up)  # type: ignore[no-any-return]
    if kind == "clone":
        return module.w2((F.silu(gate).clone() * up.clone()).contiguous())  # type: ignore[no-any-return]
    return module.w2(F.silu(gate) * up)  # type: ignore[no-any-return]


def attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, kind: str, **_: Any
) -> torch.Tensor:
    """Attention on [batch, sequence, heads, width], right or wrong in one named way."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5
    if kind == "not causal":
        out = F.scaled_dot_product_attention(q, k, v, is_causal=False)
    elif kind == "wrong scale":
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale * 1.05)
    else:
        size = q.shape[2]
        mask = torch.ones(size, size, dtype=torch.bool).tril(1 if kind == "off by one" else 0)
        scores = (q @ k.transpose(-1, -2)) * scale
        out = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v
    return out.transpose(1, 2)


def checkpointed(model: torch.nn.Module) -> None:
    """Recompute every layer in backward."""
    for layer in model.layers.values():  # type: ignore[operator, union-attr]
        plain = layer.forward
        layer.forward = lambda *args, f=plain, **more: checkpoint(f, *args, use_reentrant=False, **more)


def compiled(name: str, backend: str = "aot_eager") -> Plant:
    """Compile the modules of one name; "aot_eager" traces and decomposes without a code generator."""

    def plant(model: torch.nn.Module) -> None:
        for fqn, module in list(model.named_modules()):
            if fqn.endswith(name):
                module.forward = torch.compile(module.forward, backend=backend)  # type: ignore[method-assign]

    return plant


def no_compiler() -> str:
    """Why Inductor cannot generate code for the CPU here; "": it can."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "Inductor needs a C++ compiler, and there is none"
    return ""


def faults() -> list[Change]:
    """Planted faults, one a change."""
    n0, n1, ff = "layers.0.attention_norm", "layers.1.ffn_norm", "layers.1.feed_forward"
    wq, w1, inner = (
        "layers.1.attention.qkv_linear.wq",
        "layers.0.feed_forward.w1",
        "layers.0.attention.inner_attention",
    )
    wrong = [
        Change(name=f"norm: {kind}", where=(fqn,), plant=at(fqn, lambda m, x, k=kind: norm(m, x, formula=k)))
        for kind, fqn in (
            ("no offset", n0), ("fp16 offset", n1), ("mean abs", n0), ("counts padding", "norm"),
            ("bf16 rstd", n1),
        )
    ]  # fmt: skip
    wrong += [
        Change(name="norm: eps 1e-6 -> 1e-3", where=(n1,), plant=at(n1, lambda m, x: norm(m, x, eps=1e-3))),
        Change(
            name="norm: eps outside the root (1e-4)",
            where=(n0,),
            base=at(n0, lambda m, x: norm(m, x, eps=1e-4)),
            plant=at(n0, lambda m, x: norm(m, x, eps=1e-4, formula="eps outside")),
        ),
        Change(name="norm: backward forgets the offset", where=("norm",),
               plant=at("norm", lambda m, x: _WrongNormGrad.apply(x, m.weight))),
    ]  # fmt: skip
    wrong += [
        Change(name=f"linear: {kind}", where=(fqn,), plant=at(fqn, lambda m, x, k=kind: linear(m, x, kind=k)))
        for kind, fqn in (
            ("tf32", wq), ("bf16", w1), ("last column lost", "layers.0.feed_forward.w2"),
            ("transposed", "layers.1.attention.wo"),
        )
    ]  # fmt: skip
    wrong += [
        Change(
            name=f"swiglu: {kind}", where=(ff,), plant=at(ff, lambda m, x, k=kind: feed_forward(m, x, kind=k))
        )
        for kind in ("gelu", "gate swapped", "no gate")
    ]
    wrong += [
        Change(name=f"attention: {kind}", where=(inner,),
               plant=at(inner, lambda m, q, k, v, how=kind, **more: attention(m, q, k, v, kind=how)))
        for kind in ("not causal", "wrong scale", "off by one")
    ]  # fmt: skip
    wrong += [
        Change(name="output truncated to bfloat16", where=(n0,), plant=after(n0, _truncated)),
        Change(name="output cast to bfloat16", where=(ff,), plant=after(ff, lambda t: t.bfloat16().float())),
        Change(name="output scaled by 1.001", where=("layers.0.attention.wo",),
               plant=after("layers.0.attention.wo", lambda t: t * 1.001)),
        Change(name="rows shifted by one", where=("layers.0.feed_forward",),
               plant=after("layers.0.feed_forward", lambda t: t.roll(1, 1))),
        Change(name="overflow to Inf", where=("layers.1.feed_forward.w3",),
               plant=after("layers.1.feed_forward.w3", lambda t: t * 1e20 * 1e20)),
        Change(name="last row zeroed", where=("layers.1.attention.wo",),
               plant=after("layers.1.attention.wo", last_row_lost)),
        Change(name="dropout nobody asked for", where=(ff,), plant=after(ff, lambda t: F.dropout(t, 0.1))),
        Change(name="dropout of another seed", where=(ff,), base=after(ff, lambda t: _drop(t, 1)),
               plant=after(ff, lambda t: _drop(t, 2))),
        Change(name="rope: positions off by one", where=("layers.0.attention.rope",), plant=_shift_rope),
        Change(name="rope: half-precision angles", where=("layers.1.attention.rope",), plant=_coarse_rope),
        Change(name="gradient scaled by 1.01", where=("layers.0.feed_forward",),
               plant=after("layers.0.feed_forward", lambda t: GradTimes.apply(t, 1.01))),
        Change(name="gradient dropped (detach)", where=("layers.1.attention",),
               plant=after("layers.1.attention.qkv_linear.wk", lambda t: t.detach())),
        Change(name="one weight perturbed", where=(wq,), plant=weight(wq, lambda w: w[3, 5].add_(0.1))),
        Change(name="weight of a norm perturbed", where=(n1,), plant=weight(n1, lambda w: w[7].add_(0.01))),
        Change(name="embedding row swapped", where=("tok_embeddings",),
               plant=weight("tok_embeddings", _swap)),
    ]  # fmt: skip
    adamw = ("_fused_adamw_", "_foreach", "adam")
    wrong += [
        Change(name=f"optimizer: {key}", where=adamw, plant=optimizer_group(key, value))
        for key, value in (("betas", (0.8, 0.95)), ("eps", 1e-6), ("weight_decay", 0.2), ("lr", 4e-4))
    ]
    wrong.append(
        Change(name="gradient clipping at 0.5", where=("_foreach_mul_", "clamp", "clip", "mul", "div"),
               settings={"training.max_norm": 0.5})
    )  # fmt: skip
    return wrong


def _swap(w: torch.Tensor) -> None:
    first = w[32].clone()
    w[32] = w[101]
    w[101] = first


def last_row_lost(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t[:, :-1], torch.zeros_like(t[:, -1:])], 1)


def _drop(t: torch.Tensor, seed: int) -> torch.Tensor:
    mask = torch.empty_like(t).bernoulli_(0.9, generator=torch.Generator().manual_seed(seed))
    return t * mask / 0.9


def _shift_rope(model: torch.nn.Module) -> None:
    module = model.get_submodule("layers.0.attention.rope")
    module.cache = module.cache.roll(1, 0)  # type: ignore[operator, union-attr, assignment]


def _coarse_rope(model: torch.nn.Module) -> None:
    module = model.get_submodule("layers.1.attention.rope")
    angles = torch.view_as_real(module.cache).half().float()  # type: ignore[arg-type]
    module.cache = torch.view_as_complex(angles.contiguous())  # type: ignore[assignment]


def optimizer_group(key: str, value: Any) -> Plant:
    """Change a constant of the optimizer that steps next; hooks are kept by torch, so it acts once."""

    def plant(model: torch.nn.Module) -> None:
        done: list[bool] = []

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            # torchtitan's container of optimizers is an optimizer too, and steps first.
            if not done and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
                for group in optimizer.param_groups:
                    group[key] = value
                done.append(True)

        register_optimizer_step_pre_hook(hook)

    return plant


def legal() -> list[Change]:
    """Changes that differ by legal rounding, or not at all."""
    ff = "layers.1.feed_forward"

    def linears(name: str, kind: str) -> Plant:
        return everywhere(name, lambda m, x: linear(m, x, kind=kind))

    def one(kind: str) -> Plant:
        return at(ff, lambda m, x: feed_forward(m, x, kind=kind))

    rounding = [
        Change(name="the same run again"),
        Change(name="linear: split K, one layer", plant=linears("layers.1.feed_forward.w2", "split k")),
        Change(name="linear: FP64 inside, all w1", plant=linears("w1", "fp64")),
        Change(name="linear: einsum, all w3", plant=linears("w3", "einsum")),
        Change(name="silu as x * sigmoid(x)", plant=one("x sigmoid")),
        Change(name="copies that change nothing", plant=one("clone")),
        Change(name="attention by its plain formula", plant=everywhere(
            "inner_attention", lambda m, q, k, v, **more: attention(m, q, k, v, kind="plain"))),
        Change(name="two threads", threads=2),
        Change(name="activation checkpointing on", plant=checkpointed),
        Change(name="torch.compile of the feed-forward", plant=compiled("feed_forward")),
        Change(name="torch.compile with Inductor, feed-forward", plant=compiled("feed_forward", "inductor"),
               missing=no_compiler),
        Change(name="torch.compile with Inductor, every norm", plant=compiled("norm", "inductor"),
               missing=no_compiler),
        Change(name="Triton kernel for every norm", settings={"override.imports": [KERNEL]}),
        Change(name="optimizer: foreach", settings={"optimizer.implementation": "foreach"}),
        Change(name="optimizer: for-loop", settings={"optimizer.implementation": "for-loop"}),
    ]  # fmt: skip
    for name in ("wq", "wo", "w2", "lm_head"):
        rounding.append(
            Change(
                name=f"linear: split K, every {name}",
                plant=everywhere(name, lambda m, x: linear(m, x, kind="split k")),
            )
        )
    for formula in ("root and quotient", "halves", "fp64"):
        for name in ("attention_norm", "ffn_norm"):
            rounding.append(
                Change(name=f"norm: {formula}, every {name}",
                       plant=everywhere(name, lambda m, x, how=formula: norm(m, x, formula=how)))
            )  # fmt: skip
    return rounding
