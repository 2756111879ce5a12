"""Calls that are more than one plain operator: higher-order ones, compiled code, attention, custom ops."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bridge.capture.replay import differing_outputs
from bridge.capture.store import Capture

CaptureOf = Callable[..., Capture]


def test_higher_order_operators_are_one_call_with_their_tensors(capture_of: CaptureOf) -> None:
    x = torch.randn(3)
    capture = capture_of(None, lambda: torch.cond(torch.tensor(True), lambda a: a + 1, lambda a: a - 1, (x,)))
    assert capture.complete, capture.problems
    (call,) = capture.find("cond")
    assert call.op == "higher_order::cond"
    assert torch.equal(capture.tensor(call.outputs[0]), x + 1)
    assert not call.replayable


def test_memory_that_is_given_back_is_another_epoch(capture_of: CaptureOf) -> None:
    x = torch.ones(4)

    def action() -> None:
        x.mul(2)
        size = x.untyped_storage().size()
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(size)
        x.fill_(5)
        x.mul(3)

    first, second = capture_of(None, action).find("mul")
    assert first.inputs[0].storage == second.inputs[0].storage
    assert first.inputs[0].epoch < second.inputs[0].epoch
    assert first.inputs[0].digest != second.inputs[0].digest


def test_flex_attention_is_seen(capture_of: CaptureOf) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = torch.randn(1, 2, 16, 8)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device="cpu")
    capture = capture_of(None, lambda: flex_attention(q, q, q, block_mask=mask))
    (call,) = capture.find("flex_attention")
    assert torch.equal(capture.tensor(call.inputs[0]), q)
    wanted = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(capture.tensor(call.outputs[0]), wanted)


def test_attention_keeps_its_generator(capture_of: CaptureOf) -> None:
    q = torch.randn(1, 2, 8, 4)
    capture = capture_of(None, lambda: nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.3))
    random = [c for c in capture.calls if "rng" in c.flags]
    assert random
    for call in random:
        assert differing_outputs(capture, call) == []


def test_custom_operators_and_what_they_say_they_write(capture_of: CaptureOf) -> None:
    @torch.library.custom_op("bridge_tests::increment", mutates_args=("x",))
    def increment(x: torch.Tensor, by: float) -> None:
        x += by

    x = torch.ones(3)
    capture = capture_of(None, lambda: increment(x, 2.0))
    (call,) = capture.find("bridge_tests::increment")
    assert capture.tensor(call.inputs[0]).tolist() == [1, 1, 1]
    assert capture.tensor(call.outputs[0]).tolist() == [3, 3, 3]
    assert call.attrs == {"by": 2.0}


def test_autocast_is_noted_where_it_is_on(capture_of: CaptureOf) -> None:
    linear = nn.Linear(4, 4)

    def action() -> None:
        linear(torch.ones(2, 4))
        with torch.autocast("cpu", torch.bfloat16):
            linear(torch.ones(2, 4))

    first, second = [c for c in capture_of(linear, action).calls if c.kind == "module"]
    assert first.flags == {}
    assert second.flags == {"autocast": {"cpu": "bfloat16"}}
    assert second.outputs[0].dtype == "bfloat16"


def test_compiled_with_aot_eager_shows_its_operators(capture_of: CaptureOf) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="aot_eager")
    capture = capture_of(model, lambda: compiled(torch.ones(2, 4)).sum().backward())
    assert capture.complete, capture.problems
    assert {"aten::addmm.default", "aten::relu.default", "aten::threshold_backward.default"} <= {
        c.op for c in capture.calls
    }


def test_memory_that_compiled_code_wrote_unseen_is_looked_at_again(capture_of: CaptureOf) -> None:
    if shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    weight = torch.randn(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        # mm is a call into ATen; the fused kernel after it works in the buffer that mm filled.
        return torch.relu(x @ weight + 1) * 2

    compiled = torch.compile(function)
    x = torch.randn(8, 8)
    compiled(x)
    result: list[torch.Tensor] = []

    def action() -> None:
        result.append(compiled(x).add(0))

    capture = capture_of(None, action)
    (add,) = capture.find("add")
    assert torch.equal(capture.tensor(add.inputs[0]), result[0])
    mm = [c for c in capture.calls if "mm" in c.op]
    assert all(c.flags.get("compiled") for c in mm)
    for call in mm:
        assert torch.equal(capture.tensor(call.outputs[0]), x @ weight)


def test_compiled_functions_can_run_eagerly_for_the_step(capture_of: CaptureOf) -> None:
    if shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    compiled = torch.compile(lambda x: torch.relu(x + 1) * 2)
    x = torch.randn(8)
    compiled(x)
    hidden = capture_of(None, lambda: compiled(x))
    shown = capture_of(None, lambda: compiled(x), eager=True)
    assert not hidden.find("relu")
    assert [c.op for c in shown.calls] == ["aten::add.Tensor", "aten::relu.default", "aten::mul.Tensor"]
    assert shown.manifest.flags["eager"]
    again = capture_of(None, lambda: compiled(x))
    assert not again.find("relu"), "the next step is compiled again"
