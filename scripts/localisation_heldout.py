"""Changes on a model and dtype that no threshold was tuned on: torchtitan's qwen3 debug model in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from localisation_change import Change, Plant, after, at, everywhere, weight
from localisation_faults import (
    GradTimes,
    attention,
    checkpointed,
    compiled,
    feed_forward,
    last_row_lost,
    linear,
    optimizer_group,
)

CONFIG = "localisation_models:held_out"


def _norm(module: Any, x: torch.Tensor, *, eps: float = 1e-6, kind: str = "formula") -> torch.Tensor:
    """RMSNorm over the last axis by its formula; right, or wrong in one named way."""
    wide = x.double() if kind == "fp64" else x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if kind == "mean abs":
        inverse = 1.0 / wide.abs().mean(-1, keepdim=True)
    return (wide * inverse * module.weight.to(wide.dtype)).to(x.dtype)


def _shifted(model: torch.nn.Module) -> None:
    module = model.get_submodule("layers.1.attention.rope")
    module.cache = module.cache.roll(1, 0)  # type: ignore[operator, union-attr, assignment]


def _coarse(t: torch.Tensor) -> torch.Tensor:
    return t + (t.detach().to(torch.float8_e4m3fn).to(t.dtype) - t.detach())


def held_out_faults() -> list[Change]:
    """One fault a change."""
    n0, n1, ff0, ff1 = (
        "layers.0.attention_norm", "layers.1.ffn_norm", "layers.0.feed_forward", "layers.1.feed_forward",
    )  # fmt: skip
    inner = "layers.0.attention.inner_attention"

    def heads(kind: str) -> Plant:
        return at(inner, lambda m, q, k, v, **more: attention(m, q, k, v, kind=kind))

    planted: list[tuple[str, tuple[str, ...], Plant]] = [
        ("norm: eps 1e-6 -> 1e-2", (n1,), at(n1, lambda m, x: _norm(m, x, eps=1e-2))),
        ("norm: mean of magnitudes", (n0,), at(n0, lambda m, x: _norm(m, x, kind="mean abs"))),
        ("q_norm left out", ("layers.0.attention.q_norm",), at("layers.0.attention.q_norm", lambda m, x: x)),
        ("gelu for silu", (ff1,), at(ff1, lambda m, x: feed_forward(m, x, kind="gelu"))),
        ("gate swapped", (ff0,), at(ff0, lambda m, x: feed_forward(m, x, kind="gate swapped"))),
        ("last column lost", (f"{ff0}.w2",),
         at(f"{ff0}.w2", lambda m, x: linear(m, x, kind="last column lost"))),
        ("attention not causal", (inner,), heads("not causal")),
        ("attention scale 5 % off", (inner,), heads("wrong scale")),
        ("mask off by one", (inner,), heads("off by one")),
        ("output scaled by 1.02", ("layers.0.attention.wo",),
         after("layers.0.attention.wo", lambda t: t * 1.02)),
        ("output cast to float8", (f"{ff1}.w1",), after(f"{ff1}.w1", _coarse)),
        ("last row zeroed", ("layers.1.attention.wo",), after("layers.1.attention.wo", last_row_lost)),
        ("rows shifted by one", (ff0,), after(ff0, lambda t: t.roll(1, 1))),
        ("dropout nobody asked for", (ff1,), after(ff1, lambda t: F.dropout(t, 0.1))),
        ("gradient scaled by 1.05", (ff0,), after(ff0, lambda t: GradTimes.apply(t, 1.05))),
        ("rope: positions off by one", ("layers.1.attention.rope",), _shifted),
        ("weight of a norm perturbed", (n1,), weight(n1, lambda w: w[7].add_(0.1))),
        ("optimizer: weight decay", ("_fused_adamw_", "_foreach", "adam"),
         optimizer_group("weight_decay", 0.3)),
    ]  # fmt: skip
    return [
        Change(name=f"held-out: {name}", where=where, plant=plant, config=CONFIG)
        for name, where, plant in planted
    ]


def held_out_legal() -> list[Change]:
    """Changes that differ by legal rounding."""
    ff = "layers.1.feed_forward"

    def linears(name: str, kind: str) -> Plant:
        return everywhere(name, lambda m, x: linear(m, x, kind=kind))

    planted: list[tuple[str, Plant | None]] = [
        ("the same run again", None),
        ("split K, every w2", linears("w2", "split k")),
        ("FP64 inside, every w1", linears("w1", "fp64")),
        ("einsum, every w3", linears("w3", "einsum")),
        ("silu as x * sigmoid(x)", at(ff, lambda m, x: feed_forward(m, x, kind="x sigmoid"))),
        ("attention by its formula", everywhere(
            "inner_attention", lambda m, q, k, v, **more: attention(m, q, k, v, kind="plain"))),
        ("norm by its formula, every ffn_norm", everywhere("ffn_norm", _norm)),
        ("norm in FP64, every attention_norm",
         everywhere("attention_norm", lambda m, x: _norm(m, x, kind="fp64"))),
        ("activation checkpointing", checkpointed),
        ("torch.compile of the feed-forward", compiled("feed_forward")),
    ]  # fmt: skip
    return [Change(name=f"held-out: {name} (legal)", plant=plant, config=CONFIG) for name, plant in planted]
