"""Digest differences against what the tensors say, and what is told apart from rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recorded import Recorder

from bridge.verify.align import align
from bridge.verify.columns import Pool
from bridge.verify.divergence import Divergence, diverge
from bridge.verify.intake import columns


def compare(op: str, a: torch.Tensor, b: torch.Tensor, *inputs: torch.Tensor) -> Divergence:
    sides = []
    pool = Pool()
    for output in (a, b):
        rec = Recorder()
        rec.op(op, lambda *_, o=output: o, *inputs, module="m")
        sides.append(columns(rec.calls, pool))
    return diverge(sides[0], sides[1], align(sides[0], sides[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1e-1, 1.0])
def test_the_difference_is_a_lower_bound_of_the_true_one(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 64)
    a, b = x.to(dtype), (x + size * torch.randn(64, 64)).to(dtype)
    true = float((a.double() - b.double()).abs().max() / a.double().abs().max())
    found = compare("aten::mul.Tensor", a, b, x)
    assert 0 < float(found.out_difference[0]) <= true * (1 + 1e-9)


def test_equal_bits_are_equal() -> None:
    x = torch.randn(8, 8)
    found = compare("aten::mul.Tensor", x, x.clone(), x)
    assert found.out_equal[0] and found.in_equal[0] and not found.born()[0]
    assert float(found.out_difference[0]) == 0.0


def test_unbiased_roundings_are_rounding() -> None:
    torch.manual_seed(2)
    x = torch.randn(512, 64)
    up = x.bfloat16()
    flips = torch.where(torch.rand(x.shape) < 0.3, 1 + 2.0**-8 * torch.sign(torch.randn(x.shape)), 1.0)
    found = compare("aten::mul.Tensor", up, (x * flips).bfloat16(), x)
    assert not found.out_equal[0] and not found.born()[0]


def test_a_truncating_store_is_biased_though_below_one_ulp() -> None:
    torch.manual_seed(3)
    x = torch.randn(256, 64)
    truncated = (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    found = compare("aten::mul.Tensor", x.bfloat16(), truncated, x)
    assert float(found.out_difference[0]) <= float(found.noise[0])
    assert found.biased[0] and found.born()[0]


def test_exact_ops_may_not_differ_at_all() -> None:
    x = torch.randn(64, 64).bfloat16()
    y = x.clone()
    y[0, 0] = x[0, 0] * (1 + 2**-7)
    assert compare("aten::clone.default", x, y, x).born()[0]
    assert not compare("aten::mul.Tensor", x, y, x).born()[0]


def test_what_is_overwritten_or_never_written_does_not_count() -> None:
    x, old, older = torch.randn(4), torch.full((4,), 7.0), torch.full((4,), 9.0)
    pool = Pool()
    sides = []
    for garbage in (old, older):
        rec = Recorder()
        rec.op("aten::empty.memory_format", lambda g=garbage: g.clone(), module="m")
        rec.op("aten::copy_.default", lambda _, s: s.clone(), garbage, x, module="m")
        sides.append(columns(rec.calls, pool))
    found = diverge(sides[0], sides[1], align(sides[0], sides[1]))
    assert found.in_equal.all() and found.out_equal.all() and not found.born().any()


def test_a_nan_on_one_side_is_a_difference() -> None:
    x = torch.randn(16)
    y = x.clone()
    y[3] = float("nan")
    found = compare("aten::mul.Tensor", x, y, x)
    assert np.isinf(found.out_difference[0]) and found.born()[0]


def test_an_input_that_has_no_counterpart_is_not_equal() -> None:
    x = torch.randn(4, 4)
    pool = Pool()
    one, two = Recorder(), Recorder()
    one.op("aten::add.Tensor", lambda t: t + 1, x, module="m")
    two.op("aten::add.Tensor", lambda t, u: t + u, x, torch.ones(4, 4), module="m")
    sides = columns(one.calls, pool), columns(two.calls, pool)
    assert not diverge(*sides, align(*sides)).in_equal[0]


def test_other_memory_layouts_are_compared_by_statistics() -> None:
    import msgspec

    x = torch.randn(6, 6)
    pool = Pool()
    one, two = Recorder(), Recorder()
    one.op("aten::mul.Tensor", lambda t: t * 2, x, module="m")
    two.op("aten::mul.Tensor", lambda t: (t * 2).t(), x, module="m")
    output = msgspec.structs.replace(two.calls[0].outputs[0], stride=(1, 6))
    two.calls[0] = msgspec.structs.replace(two.calls[0], outputs=(output,))
    sides = columns(one.calls, pool), columns(two.calls, pool)
    found = diverge(*sides, align(*sides))
    assert not found.born()[0]
