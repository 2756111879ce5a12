"""Kernels put in one layer's place by bench_localisation: right ones, and ones wrong in a dozen ways."""

from __future__ import annotations

from typing import Any

import localisation_triton as kernels
import torch
import triton
from localisation_change import Change, Plant, after, at

TILE = 32


def _launch(kernel: Any, rows: int, cols: int, *arguments: Any, fault: int) -> None:
    block = triton.next_power_of_2(cols)
    kernel[(triton.cdiv(rows, TILE),)](*arguments, FAULT=fault, TILE=TILE, BLOCK=block)


class RMSNorm(torch.autograd.Function):
    """`(1 + w) * x / sqrt(mean(x^2) + eps)` over the last axis, float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, eps: float, fault: int) -> torch.Tensor:
        x = x.contiguous()
        cols = x.shape[-1]
        rows = x.numel() // cols
        y, r = torch.empty_like(x), x.new_empty(rows)
        _launch(kernels.rms_forward, rows, cols, x, w, y, r, rows, cols, eps, fault=fault)
        ctx.save_for_backward(x, w, r)
        ctx.fault = fault
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, w, r = ctx.saved_tensors
        cols = x.shape[-1]
        rows = x.numel() // cols
        if grad.stride(-1) != 1 or grad.dim() != 3 or grad.shape[0] != 1:
            grad = grad.contiguous()
        dx = torch.empty_like(x)
        tiles = triton.cdiv(rows, TILE)
        parts = x.new_empty(tiles, cols)
        stride = grad.stride(-2)
        _launch(
            kernels.rms_backward, rows, cols, grad, x, w, r, dx, parts, rows, cols, stride, fault=ctx.fault
        )
        kept = rows // TILE if ctx.fault == kernels.TAIL_LOST else tiles
        return dx, parts[:kept].sum(0), None, None


class LayerNorm(torch.autograd.Function):
    """`(x - mean) / sqrt(variance + eps)` over the last axis, float32; its backward is eager."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float, fault: int) -> torch.Tensor:
        x = x.contiguous()
        cols = x.shape[-1]
        rows = x.numel() // cols
        y = torch.empty_like(x)
        _launch(kernels.layer_forward, rows, cols, x, y, rows, cols, eps, fault=fault)
        ctx.save_for_backward(x)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            y = torch.nn.functional.layer_norm(again, x.shape[-1:], eps=ctx.eps)
        return (*torch.autograd.grad(y, again, grad), None, None)


class Softmax(torch.autograd.Function):
    """Softmax over the last axis, float32; its backward is eager."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: int) -> torch.Tensor:
        x = x.contiguous()
        cols = x.shape[-1]
        rows = x.numel() // cols
        y = torch.empty_like(x)
        _launch(kernels.softmax_forward, rows, cols, x, y, rows, cols, fault=fault)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True)), None


class Double(torch.autograd.Function):
    """`2 * x`, its backward a kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: int) -> torch.Tensor:
        ctx.fault = fault
        return 2.0 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        grad = grad.contiguous()
        cols = grad.shape[-1]
        rows = grad.numel() // cols
        dx = grad if ctx.fault == kernels.IN_PLACE else torch.empty_like(grad)
        _launch(kernels.double_backward, rows, cols, grad, dx, rows, cols, fault=ctx.fault)
        return dx, None


class _Widened(torch.autograd.Function):
    """Identity whose gradient is a slice of a wider tensor, as a fused backward hands it on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.cat([grad, grad.flip(-1)], -1)[..., : grad.shape[-1]]


def _eager_norm(module: Any, x: torch.Tensor, eps: float) -> torch.Tensor:
    return (1.0 + module.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _norm(fqn: str, fault: int | None, *, eps: float = 1e-6, wide: bool = False) -> Plant:
    """The kernel, or with no fault named the eager formula, for one norm."""

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        y = _eager_norm(module, x, eps) if fault is None else RMSNorm.apply(x, module.weight, eps, fault)
        return _Widened.apply(y) if wide else y  # type: ignore[no-any-return]

    return at(fqn, forward)


def _layer_norm(fqn: str, fault: int | None, shift: float) -> Plant:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + shift
        if fault is None:
            return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5)
        return LayerNorm.apply(x, 1e-5, fault)  # type: ignore[no-any-return]

    return at(fqn, forward)


def _attention(fqn: str, fault: int | None) -> Plant:
    """Attention by its formula on scores far below zero, which softmax does not mind."""

    def forward(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        size = q.shape[2]
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 - 100.0
        scores = scores.masked_fill(~mask, float("-inf"))
        power = torch.softmax(scores, -1) if fault is None else Softmax.apply(scores, fault)
        return (power @ v).transpose(1, 2)  # type: ignore[no-any-return]

    return at(fqn, forward)


def _double(fqn: str, fault: int | None) -> Plant:
    return after(fqn, lambda t: 2.0 * t if fault is None else Double.apply(t, fault))


def kernel_faults() -> list[Change]:
    """A wrong kernel in the place of one layer's eager formula."""
    n0, n1, ff = "layers.0.attention_norm", "layers.1.ffn_norm", "layers.0.feed_forward"
    inner = "layers.1.attention.inner_attention"
    changes = [
        Change(name=f"kernel: {name}", where=(fqn,), base=_norm(fqn, None, eps=eps, wide=wide),
               plant=_norm(fqn, fault, eps=eps, wide=wide))
        for name, fqn, fault, eps, wide in (
            ("offset added in fp16", n1, kernels.FP16_OFFSET, 1e-6, False),
            ("eps outside the root", n0, kernels.EPS_OUTSIDE, 1e-4, False),
            ("mean over padded lanes", n0, kernels.PADDING, 1e-6, False),
            ("gradient without the offset", n1, kernels.NO_OFFSET_GRAD, 1e-6, False),
            ("last rows left out of dW", n0, kernels.TAIL_LOST, 1e-6, False),
            ("store cuts off 16 bits", n1, kernels.TRUNCATED, 1e-6, False),
            ("row stride of another tensor", "norm", kernels.STRIDE, 1e-6, True),
        )
    ]  # fmt: skip
    return [
        *changes,
        Change(name="kernel: variance in one pass", where=(n1,), base=_layer_norm(n1, None, 300.0),
               plant=_layer_norm(n1, kernels.ONE_PASS, 300.0)),
        Change(name="kernel: variance centres padding", where=(n0,), base=_layer_norm(n0, None, 1.0),
               plant=_layer_norm(n0, kernels.PADDING, 1.0)),
        Change(name="kernel: zero padding in the maximum", where=(inner,), base=_attention(inner, None),
               plant=_attention(inner, kernels.ZERO_PAD)),
        Change(name="kernel: gradient over its own input", where=(ff,), base=_double(ff, None),
               plant=_double(ff, kernels.IN_PLACE)),
        Change(name="kernel: first row's gradient for all", where=(ff,), base=_double(ff, None),
               plant=_double(ff, kernels.FIRST_ROW)),
    ]  # fmt: skip


def kernel_legal() -> list[Change]:
    """The right kernels in the same places."""
    right = kernels.RIGHT
    return [
        Change(name="right kernel: RMSNorm", base=_norm("layers.1.ffn_norm", None),
               plant=_norm("layers.1.ffn_norm", right)),
        Change(name="right kernel: RMSNorm, gradient strided", base=_norm("norm", None, wide=True),
               plant=_norm("norm", right, wide=True)),
        Change(name="right kernel: LayerNorm far from zero",
               base=_layer_norm("layers.1.ffn_norm", None, 30.0),
               plant=_layer_norm("layers.1.ffn_norm", right, 30.0)),
        Change(name="right kernel: softmax", base=_attention("layers.1.attention.inner_attention", None),
               plant=_attention("layers.1.attention.inner_attention", right)),
        Change(name="right kernel: doubling", base=_double("layers.0.feed_forward", None),
               plant=_double("layers.0.feed_forward", right)),
    ]  # fmt: skip
