"""Triton launches are calls: arguments, grid, what they wrote, and where they happened."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bridge.capture.store import Capture

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU runs Triton here")

CaptureOf = Callable[..., Capture]


class Scaling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from tests.capture.triton_kernels import Scale

        return Scale.apply(x)  # type: ignore[no-untyped-call,no-any-return]


def test_raw_launches_in_forward_and_backward(capture_of: CaptureOf) -> None:
    model = nn.Sequential(Scaling())
    x = torch.randn(50, requires_grad=True)
    capture = capture_of(model, lambda: model(x).sum().backward())
    assert capture.complete, capture.problems
    forward, backward = [c for c in capture.calls if c.kind == "launch"]
    assert forward.key == "0/launch_0_scale_kernel"
    assert (forward.op, forward.module, forward.phase) == ("scale_kernel", "0", "forward")
    assert forward.attrs == {"scale": 3.0, "n": 50, "BLOCK": 32}
    assert forward.flags["grid"] == [2]
    assert forward.mutated == ("y_ptr",)
    assert [r.name for r in forward.inputs] == ["x_ptr", "y_ptr"]
    assert [r.name for r in forward.outputs] == ["y_ptr"]
    assert forward.inputs[1].digest is None, "memory that nobody had written"
    assert torch.equal(capture.tensor(forward.outputs[0]), x.detach() * 3)
    assert (backward.phase, backward.module) == ("backward", "0")
    assert torch.equal(capture.tensor(backward.outputs[0]), torch.full((50,), 3.0))
    (call,) = [c for c in capture.calls if c.key == "0"]
    assert call.outputs[0].producer == forward.index
    assert forward.parent == call.index
    noise = {"aten::set_.source_Storage", "aten::copy_.default"}
    assert not noise & {c.op for c in capture.calls}, "the interpreter's own operators are not the run's"


def test_launches_inside_a_triton_op_are_its_children(capture_of: CaptureOf) -> None:
    from tests.capture import triton_kernels

    x = torch.randn(10)
    capture = capture_of(None, lambda: triton_kernels.scale_op(x))
    (outer,) = capture.find("bridge_tests::scale")
    (inner,) = [c for c in capture.calls if c.kind == "launch"]
    assert inner.parent == outer.index
    assert torch.equal(capture.tensor(outer.outputs[0]), x * 3)


def test_an_autotuned_launch_is_one_call_with_its_config(capture_of: CaptureOf) -> None:
    from tests.capture.triton_kernels import tuned

    x = torch.randn(10)
    capture = capture_of(None, lambda: tuned(x))
    (call,) = [c for c in capture.calls if c.kind == "launch"]
    assert call.op == "tuned_kernel"
    assert "BLOCK: 64" in call.flags["config"]
    assert torch.equal(capture.tensor(call.outputs[0]), x + 1)


def test_a_kernel_is_selected_by_name(capture_of: CaptureOf) -> None:
    from tests.capture.triton_kernels import scaled

    capture = capture_of(None, lambda: scaled(torch.ones(4), 2.0) + 1, patterns=("scale_k*",))
    (launch,), (add,) = capture.find("scale_kernel"), capture.find("add")
    assert launch.inputs[0].blob
    assert launch.outputs[0].blob
    assert add.outputs[0].blob is None


def test_a_launch_that_raises_is_not_our_problem(capture_of: CaptureOf) -> None:
    from tests.capture.triton_kernels import scale_kernel

    def action() -> None:
        with pytest.raises(Exception, match=r"(?i)argument|missing|BLOCK"):
            scale_kernel[(1,)](torch.ones(3))

    capture = capture_of(None, action)
    assert len(capture.calls) >= 1
