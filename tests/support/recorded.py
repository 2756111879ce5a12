"""A few real ops recorded as a capture would, for tests of what reads captures.

`Recorder.op` runs a function on tensors and keeps a `Call` with true digests and producers, so that
tests can plant a fault and see what the digests make of it, without a training run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from bridge.capture.record import Call, Digest, Manifest, Phase, TensorRecord
from bridge.verify.runs import Run


def digest_of(tensor: torch.Tensor) -> Digest:
    """Digest as docs/capture-format describes it, for a contiguous tensor."""
    values = tensor.detach().double().reshape(-1)
    finite = values[values.isfinite()]
    flat = tensor.detach().reshape(-1).contiguous()
    data = flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return Digest(
        count=values.numel(),
        sum=float(finite.sum()),
        abs_sum=float(finite.abs().sum()),
        sq_sum=float(finite.square().sum()),
        min=float(finite.min()) if finite.numel() else None,
        max=float(finite.max()) if finite.numel() else None,
        nan=int(values.isnan().sum()),
        pos_inf=int((values == float("inf")).sum()),
        neg_inf=int((values == -float("inf")).sum()),
        hash=xxhash.xxh64_hexdigest(data),
    )


@dataclass
class Recorder:
    """Keeps calls in execution order. Keys count the ops of a module, as the capture's do."""

    calls: list[Call] = field(default_factory=list)
    blobs: dict[str, torch.Tensor] = field(default_factory=dict)
    keep: bool = False
    _made: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    def record(self, name: str, tensor: torch.Tensor) -> TensorRecord:
        made = self._made.get(id(tensor))
        blob = None
        if self.keep:
            blob = digest_of(tensor).hash
            self.blobs[blob] = tensor.detach().clone()
        return TensorRecord(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            digest=digest_of(tensor),
            producer=made[1] if made else None,
            blob=blob,
        )

    def op(
        self,
        op: str,
        function: Callable[..., torch.Tensor],
        *inputs: torch.Tensor,
        module: str = "",
        phase: Phase = "forward",
        attrs: dict[str, Any] | None = None,
        flags: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        read = tuple(self.record(str(place), tensor) for place, tensor in enumerate(inputs))
        output = function(*inputs).contiguous()
        if any(output is tensor for tensor in inputs):
            output = output.clone()
        index = len(self.calls)
        count = self._count.get(module, 0)
        self._count[module] = count + 1
        short = op.split("::")[-1].split(".")[0]
        self._made[id(output)] = (output, index)
        call = Call(
            index=index,
            key=f"{module}/op_{count}_{short}",
            kind="op",
            op=op,
            step=1,
            phase=phase,
            module=module,
            inputs=read,
            outputs=(self.record("0", output),),
            attrs=attrs or {},
            flags=flags or {},
        )
        self.calls.append(call)
        return output

    def run(self, label: str, **manifest: Any) -> Run:
        facts = {"step": 1, "steps": (1,), "seed": 0, "complete": True, **manifest}
        return Run(label=label, path=Path(f"/nowhere/{label}"), calls=self.calls, manifest=Manifest(**facts))


@dataclass(kw_only=True)
class Options:
    """What can be planted into `decoder`."""

    dtype: torch.dtype = torch.float32
    layers: int = 3
    at: int = 1  #: the layer that the fault is in
    eps: float = 1e-6  #: of that layer's norm
    norm: str = "eager"  #: "eager", "fused", "fused wrong"
    cast: bool = False  #: round the normalised input of that layer to bfloat16 and back
    order: bool = False  #: sum the hidden size in another order, everywhere (legal)
    weight: bool = False  #: one weight of that layer is perturbed
    seed: int = 0
    dropout: int | None = None  #: seed of a dropout in that layer
    extra: bool = False  #: an op in front that changes nothing, so that counters shift
    keep: bool = False


def decoder(options: Options) -> Recorder:
    """A few layers of norm, gated matmuls and a residual, then a loss and its first gradients."""
    torch.manual_seed(options.seed)
    rec = Recorder(keep=options.keep)
    dtype, width = options.dtype, 64
    x = torch.randn(32, width).to(dtype)
    for layer in range(options.layers):
        here = layer == options.at
        eps = options.eps if here else 1e-6
        scale = (1 + 0.1 * torch.randn(width)).to(dtype)
        gate, up, down = ((torch.randn(width, width) / 8).to(dtype) for _ in range(3))
        if here and options.weight:
            up[3, 5] += 0.5
        normed = _norm(rec, x, scale, eps, f"layers.{layer}.norm", options if here else Options(norm="eager"))
        if here and options.cast:
            module = f"layers.{layer}.feed_forward"
            cast = "aten::_to_copy.default"
            small = rec.op(cast, lambda t: t.bfloat16(), normed, module=module, attrs={"dtype": "bfloat16"})
            normed = rec.op(cast, lambda t: t.to(dtype), small, module=module, attrs={"dtype": "x"})
        mm = _reordered if options.order else torch.mm
        module = f"layers.{layer}.feed_forward"
        left = rec.op("aten::mm.default", mm, normed, gate, module=f"{module}.w1")
        left = rec.op("aten::silu.default", torch.nn.functional.silu, left, module=module)
        right = rec.op("aten::mm.default", mm, normed, up, module=f"{module}.w3")
        both = rec.op("aten::mul.Tensor", torch.mul, left, right, module=module)
        if options.dropout is not None:
            seed = options.dropout if here else 7
            drop = "aten::native_dropout.default"
            both = rec.op(drop, lambda t, s=seed: _dropped(t, s), both, module=module, attrs={"p": 0.1})
        out = rec.op("aten::mm.default", mm, both, down, module=f"{module}.w2")
        x = rec.op("aten::add.Tensor", torch.add, x, out, module=f"layers.{layer}")
    loss = rec.op("aten::mean.default", lambda t: t.float().square().mean(), x, module="")
    grad = rec.op("aten::mul.Tensor", lambda t, s: (t * s).to(dtype), x, loss, module="", phase="backward")
    for layer in reversed(range(options.layers)):
        torch.manual_seed(100 + layer)
        weight = torch.randn(width, width).to(dtype) / 8
        grad = rec.op(
            "aten::mm.default",
            torch.mm,
            grad,
            weight,
            module=f"layers.{layer}.feed_forward.w2",
            phase="backward",
        )
    return rec


def _norm(
    rec: Recorder, x: torch.Tensor, scale: torch.Tensor, eps: float, module: str, options: Options
) -> torch.Tensor:
    if options.norm != "eager":
        shift = 1.02 if options.norm == "fused wrong" else 1.0

        def fused(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            wide = t.double()
            inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            return (wide * inverse * w.double() * shift).to(t.dtype)

        return rec.op("mylib::fused_norm.default", fused, x, scale, module=module)
    if options.extra:
        x = rec.op("aten::clone.default", torch.clone, x, module=module)
    wide = rec.op("aten::_to_copy.default", lambda t: t.float(), x, module=module)
    square = rec.op("aten::pow.Tensor_Scalar", lambda t: t * t, wide, module=module, attrs={"exponent": 2})
    mean = rec.op("aten::mean.dim", lambda t: t.mean(-1, keepdim=True), square, module=module)
    shifted = rec.op("aten::add.Tensor", lambda t: t + eps, mean, module=module, attrs={"other": eps})
    inverse = rec.op("aten::rsqrt.default", torch.rsqrt, shifted, module=module)
    normed = rec.op("aten::mul.Tensor", torch.mul, wide, inverse, module=module)
    narrow = rec.op("aten::_to_copy.default", lambda t: t.to(x.dtype), normed, module=module)
    return rec.op("aten::mul.Tensor", torch.mul, narrow, scale, module=module)


def _reordered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    half = a.shape[1] // 2
    parts = a[:, :half].float() @ b[:half].float(), a[:, half:].float() @ b[half:].float()
    return (parts[1] + parts[0]).to(a.dtype)


def _dropped(t: torch.Tensor, seed: int) -> torch.Tensor:
    mask = torch.rand(t.shape, generator=torch.Generator().manual_seed(seed)) > 0.1
    return t * mask / 0.9
