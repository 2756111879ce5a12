"""The first call that makes NaN or Inf out of finite inputs."""

from __future__ import annotations

import torch
from recorded import Recorder

from bridge.verify.columns import Pool
from bridge.verify.diff_document import NonFinite
from bridge.verify.intake import columns
from bridge.verify.nonfinite import first_nonfinite


def found(rec: Recorder) -> tuple[NonFinite, ...]:
    return first_nonfinite(columns(rec.calls, Pool()), rec.run("A"))


def test_a_finite_run_has_none() -> None:
    rec = Recorder()
    rec.op("aten::exp.default", torch.exp, torch.randn(4))
    assert found(rec) == ()


def test_overflow_of_exp_is_named_with_its_cause_and_reach() -> None:
    rec = Recorder()
    x = torch.tensor([1.0, 104.2, 3.0]).half()
    y = rec.op("aten::exp.default", torch.exp, x, module="layers.1.attention")
    z = rec.op("aten::sub.Tensor", torch.sub, y, y, module="layers.1")
    rec.op("aten::mul.Tensor", torch.mul, z, z, module="layers.1")
    infinite, nan = found(rec)
    assert infinite.key == "layers.1.attention/op_0_exp" and infinite.pos_inf == 1 and infinite.nan == 0
    assert infinite.because == "exp of 104.2 exceeds the largest float16 (65504)"
    assert infinite.reach == 2
    assert nan.key == "layers.1/op_0_sub" and "Inf - Inf" in nan.because


def test_a_masks_fill_value_is_meant() -> None:
    rec = Recorder()
    mask = rec.op(
        "aten::full.default",
        lambda: torch.full((2, 2), -float("inf")),
        attrs={"fill_value": {"float": "-inf"}},
    )
    rec.op("aten::add.Tensor", torch.add, torch.zeros(2, 2), mask)
    assert found(rec) == ()


def test_unwritten_memory_is_left_out() -> None:
    rec = Recorder()
    rec.op("aten::empty.memory_format", lambda: torch.tensor([float("nan")]))
    assert found(rec) == ()


def test_a_parameter_that_came_in_bad_is_said_to_have_entered() -> None:
    rec = Recorder()
    weight = torch.tensor([1.0, float("nan")])
    rec.op("aten::mul.Tensor", torch.mul, torch.ones(2), weight, module="layers.0.norm")
    (entered,) = found(rec)
    assert entered.entered and entered.key == "layers.0.norm/op_0_mul" and entered.tensor == "1"


def test_log_of_zero_and_division_by_zero_are_explained() -> None:
    rec = Recorder()
    rec.op("aten::log.default", torch.log, torch.tensor([0.0, 1.0]))
    (first,) = found(rec)
    assert first.because == "log of zero (smallest input 0)" and first.neg_inf == 1
    rec = Recorder()
    rec.op("aten::div.Tensor", torch.div, torch.ones(2), torch.tensor([0.0, 1.0]))
    assert found(rec)[0].because == "division by a tensor that reaches zero"
