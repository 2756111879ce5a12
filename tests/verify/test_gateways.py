"""Differences that come out of calls without counterparts, out of unseen results, or out of memory in use."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from recorded import Recorder

from bridge.capture.record import Call
from bridge.verify.diff import diff_captures
from bridge.verify.diff_document import DiffDocument

X = torch.linspace(-1, 1, 512).reshape(16, 32)
W = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


def diff(a: Recorder, b: Recorder) -> DiffDocument:
    return diff_captures(a.run("A"), b.run("B"))


def test_a_collective_whose_result_only_its_readers_show_is_the_suspect() -> None:
    """Its own output has no digest: it returns before the result is there."""

    def run(factor: float) -> Recorder:
        recorder = Recorder()
        reduced = recorder.op("c10d::_reduce_scatter_base_.default", lambda t: factor * t, X)
        recorder.op("aten::sin.default", torch.sin, reduced)
        call = recorder.calls[0]
        (made,) = call.outputs
        hidden = msgspec.structs.replace(made, digest=None)
        recorder.calls[0] = msgspec.structs.replace(call, outputs=(hidden,), mutated=(made.name,))
        return recorder

    document = diff(run(1.0), run(0.5))
    assert document.outcome == "DIVERGED"
    assert document.suspects[0].op.startswith("c10d::_reduce_scatter_base_")
    assert diff(run(1.0), run(1.0)).outcome == "IDENTICAL"


def _backward(kernel: Callable[[torch.Tensor], torch.Tensor] | None, *, exact: bool = False) -> Recorder:
    """Three eager calls, or a kernel in their place, between two products that round otherwise in `exact`."""
    recorder = Recorder()

    def product(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (t.double() @ w.double()).float() if exact else t @ w

    x, w = recorder.op("aten::sin.default", torch.sin, X), W
    gradient = recorder.op("aten::mm.default", product, x, w, module="head", phase="backward")
    if kernel is not None:
        made = recorder.op("my_kernel", kernel, gradient, module="norm", phase="backward")
    else:
        made = gradient
        for factor in (2.0, 1.5, 0.5):
            made = recorder.op(
                "aten::mul.Tensor",
                lambda t, by=factor: t * by,
                made,
                module="norm",
                phase="backward",
                attrs={"other": factor},
            )
    recorder.op("aten::mm.default", product, made, w, module="w2", phase="backward")
    return recorder


def test_a_kernel_without_counterpart_behind_rounding_is_the_suspect() -> None:
    """Its size gives no boundary to pair it at, and nothing that it reads is bit-equal."""
    document = diff(_backward(None), _backward(lambda t: 0.1 * t, exact=True))
    assert document.outcome == "DIVERGED"
    assert document.suspects[0].op == "my_kernel", document.summary
    right = diff(_backward(None), _backward(lambda t: 1.5 * t, exact=True))
    assert right.outcome == "SAME WITHIN ROUNDING", right.summary


def test_far_apart_and_nobody_to_blame_is_no_agreement() -> None:
    """What differs came through memory that no call is seen to write."""

    def run(factor: float) -> Recorder:
        recorder = Recorder()
        x = recorder.op("aten::sin.default", lambda t: torch.sin(t * (1 + 1e-7 * factor)), X)
        hidden = recorder.op("aten::cos.default", lambda t: factor * torch.cos(t), x)
        recorder.op("aten::mm.default", torch.mm, hidden, W)
        recorder.calls[2] = msgspec.structs.replace(
            recorder.calls[2],
            inputs=tuple(msgspec.structs.replace(r, digest=None) for r in recorder.calls[2].inputs),
        )
        recorder.calls[1] = msgspec.structs.replace(recorder.calls[1], outputs=())
        return recorder

    document = diff(run(1.0), run(3.0))
    assert not document and document.outcome in ("INCONCLUSIVE", "DIVERGED"), document.summary


def test_a_module_around_other_weights_is_not_blamed_for_them() -> None:
    """What it was called with is equal, but it reads more than that."""

    def run(weight: float) -> Recorder:
        recorder = Recorder()
        w = torch.full((32,), 1.0)
        w[3] = weight
        made = recorder.op("aten::mul.Tensor", torch.mul, X, w, module="layers.1.norm")
        x, y, p = recorder.record("0", X), recorder.record("0", made), recorder.record("weight", w)
        for index, (module, params) in enumerate((("layers.1.norm", (p,)), ("layers.1", ()), ("", ())), 1):
            recorder.calls.append(
                Call(
                    index=index, key=module or "<root>", kind="module", op="M", module_class="M", step=1,
                    module=module, inputs=(x,), outputs=(y,), params=params,
                )
            )  # fmt: skip
        return recorder

    document = diff(run(1.0), run(1.5))
    assert document.suspects[0].module == "layers.1.norm", document.summary
