"""Elementwise kernels: approximations, stores, layouts, memory."""

from __future__ import annotations

import math
from typing import Any

import torch

from bridge.verify import KernelSpec
from tests.verify.corpus.pairs import Pair, full, fused, last, normal

BOTH = ("float16", "float32")


def unary(
    name: str, reference: Any, good: Any, wrong: Any, dtypes: tuple[str, ...] = BOTH, scale: float = 2.0
) -> Any:
    """A pair of one-input kernels; `good` and `wrong` are (forward, derivative) of FP32 values."""

    def make(bad: bool) -> KernelSpec:
        value, slope = wrong if bad else good

        def forward(x: torch.Tensor) -> Any:
            return value(x.float()).to(x.dtype), x

        def backward(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            return (g.float() * slope(x.float())).to(x.dtype)

        apply = fused(forward, backward)
        return KernelSpec(
            name=name,
            reference=lambda x: reference(x.float()).to(x.dtype),
            target=lambda x: apply(x),
            sample=normal(full, scale=scale),
            inputs=("x",),
            grads=("x",),
            outputs=("y",),
            kind="elementwise",
            shapes=((8, 64), (3, 33)),
            dtypes=dtypes,
        )

    return make


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.erf(x * 0.7071067811865476))


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1.0 + torch.erf(x * 0.7071067811865476)) + x * torch.exp(-0.5 * x * x) / math.sqrt(
        2 * math.pi
    )


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def _gelu_tanh_slope(x: torch.Tensor) -> torch.Tensor:
    t = torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)


def _tanh_slope(x: torch.Tensor) -> torch.Tensor:
    return 1 - torch.tanh(x) ** 2


def _tanh_by_exp(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(2 * x)
    return (e - 1) / (e + 1)


def _tanh_stable(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(-2 * x.abs())
    small = x * (1 - x * x / 3)
    return torch.where(x.abs() < 1e-2, small, torch.sign(x) * (1 - e) / (1 + e))


def _silu_slope(x: torch.Tensor) -> torch.Tensor:
    s = 1 / (1 + torch.exp(-x))
    return s * (1 + x * (1 - s))


def swiglu(name: str, dtypes: tuple[str, ...] = BOTH, **wrong: Any) -> Any:
    def make(bad: bool) -> KernelSpec:
        def store(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            near = wide.to(dtype)
            if not (bad and wrong.get("truncate")):
                return near
            return torch.where(
                near.double().abs() > wide.double().abs(), near.nextafter(torch.zeros_like(near)), near
            )

        def forward(gate: torch.Tensor, up: torch.Tensor) -> Any:
            s = gate.float() / (1 + torch.exp(-gate.float()))
            if bad and wrong.get("early"):
                s = s.to(gate.dtype).float()
            return store(s * up.float(), gate.dtype), (gate, up)

        def backward(saved: Any, g: torch.Tensor) -> Any:
            gate, up = saved
            if bad and wrong.get("dense"):
                flat = torch.empty(0, dtype=g.dtype).set_(g.untyped_storage())[g.storage_offset() :]
                flat = torch.cat((flat, torch.zeros(g.numel(), dtype=g.dtype)))
                g = flat[: gate.numel()].reshape(gate.shape)
            wide = gate.float()
            s = 1 / (1 + torch.exp(-wide))
            return (
                store(g.float() * up.float() * _silu_slope(wide), gate.dtype),
                store(g.float() * wide * s, up.dtype),
            )

        apply = fused(forward, backward)
        return KernelSpec(
            name=name,
            reference=lambda gate, up: (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype),
            target=lambda gate, up: apply(gate, up),
            sample=normal(full, full),
            inputs=("gate", "up"),
            grads=("gate", "up"),
            outputs=("y",),
            kind="elementwise",
            shapes=((12, 64), (5, 33)),
            dtypes=dtypes,
        )

    return make


def bias_add(name: str, **wrong: Any) -> Any:
    """x + bias; the bias gradient goes through a workspace of row blocks."""

    def make(bad: bool) -> KernelSpec:
        def forward(x: torch.Tensor, bias: torch.Tensor) -> Any:
            values = x
            if bad and wrong.get("dense"):
                flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[x.storage_offset() :]
                values = torch.cat((flat, torch.zeros(x.numel(), dtype=x.dtype)))[: x.numel()].reshape(
                    x.shape
                )
            return (values.float() + bias.float()).to(x.dtype), bias.dtype

        def backward(dtype: torch.dtype, g: torch.Tensor) -> Any:
            blocks = -(-g.shape[0] // 8)
            spare = 1 if bad and wrong.get("slack") else 0
            work = torch.empty(blocks + spare, g.shape[1], dtype=torch.float32)
            for i in range(blocks):
                work[i] = g[8 * i : 8 * i + 8].float().sum(0)
            if bad and wrong.get("overrun"):
                end = work.storage_offset() + work.numel()
                torch.empty(0).set_(work.untyped_storage())[end : end + 4] = 1.0
            return g.clone(), work.sum(0).to(dtype)

        apply = fused(forward, backward)
        return KernelSpec(
            name=name,
            reference=lambda x, bias: (x.float() + bias.float()).to(x.dtype),
            target=lambda x, bias: apply(x, bias),
            sample=normal(full, last),
            inputs=("x", "bias"),
            grads=("x", "bias"),
            outputs=("y",),
            kind="elementwise",
            shapes=((20, 64), (5, 33)),
            dtypes=("float32",),
        )

    return make


ONE = frozenset({"y", "grad_x"})
PAIRS: tuple[Pair, ...] = (
    Pair(
        name="tanh GELU for erf GELU",
        make=unary("gelu", torch.nn.functional.gelu, (_gelu, _gelu_slope), (_gelu_tanh, _gelu_tanh_slope)),
        tensors=ONE,
        cause="tanh",
    ),
    Pair(
        name="tanh by exp overflows",
        make=unary(
            "tanh", torch.tanh, (_tanh_stable, _tanh_slope), (_tanh_by_exp, _tanh_slope), ("float16",)
        ),
        tensors=frozenset({"y"}),
        cause="overflow",
    ),
    Pair(
        name="silu rounded before the product",
        make=swiglu("early", ("float16",), early=True),
        tensors=frozenset({"y"}),
        cause="is rounded to float16",
    ),
    Pair(
        name="truncating store",
        make=swiglu("truncate", ("bfloat16",), truncate=True),
        tensors=frozenset({"y", "grad_gate", "grad_up"}),
        cause="truncated toward zero",
    ),
    Pair(
        name="grad_output taken as dense",
        make=swiglu("dense_grad", dense=True),
        tensors=frozenset({"grad_gate", "grad_up"}),
        cause="strides",
    ),
    Pair(
        name="input taken as dense",
        make=bias_add("dense_input", dense=True),
        tensors=frozenset({"y"}),
        cause="strides",
    ),
    Pair(
        name="slack rows of a workspace",
        make=bias_add("slack", slack=True),
        tensors=frozenset({"grad_bias"}),
        cause="never written",
    ),
    Pair(
        name="write past a buffer",
        make=bias_add("overrun", overrun=True),
        tensors=frozenset({"grad_x", "grad_bias"}),
        cause="outside",
    ),
)
