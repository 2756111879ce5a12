"""The stated gate, the ULP unit and the structure check, on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from bridge.verify.gate import measure
from bridge.verify.structure import meta_mismatch, nonfinite_mismatch
from bridge.verify.ulp import histogram, ulp_of
from bridge.verify.verdict import Constants


def _wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_threshold_is_twice_the_reference_error_plus_the_rounding_floor() -> None:
    golden = _wide(1.0, 2.0003)
    floor = abs(float(golden[1].to(torch.float16)) - 2.0003)
    gate = measure(golden, golden + 0.01, golden + 0.02, dtype=torch.float16, constants=Constants())
    assert gate.reference_error == pytest.approx(0.01)
    assert gate.rounding_floor == pytest.approx(floor)
    assert gate.threshold == pytest.approx(0.02 + floor)
    assert gate.passes and gate.valid
    assert not measure(
        golden, golden + 0.01, golden + 0.03, dtype=torch.float16, constants=Constants()
    ).passes


def test_all_zero_errors_pass_a_zero_threshold() -> None:
    golden = _wide(0.0, 1.0)
    gate = measure(golden, golden, golden, dtype=torch.float32, constants=Constants())
    assert gate.valid and gate.passes and gate.threshold == 0 and gate.ratio == 0


def test_a_reference_off_by_more_than_a_tenth_makes_the_gate_invalid() -> None:
    golden = _wide(1.0)
    assert not measure(golden, golden * 1.2, golden, dtype=torch.float32, constants=Constants()).valid
    zero = _wide(0.0)
    assert not measure(zero, zero + 1e-9, zero, dtype=torch.float32, constants=Constants()).valid


@pytest.mark.parametrize(
    ("dtype", "value", "spacing"),
    [
        (torch.float32, 1.0, 2.0**-23),
        (torch.float16, 1.0, 2.0**-10),
        (torch.bfloat16, 1.99, 2.0**-7),
        (torch.bfloat16, 2.0, 2.0**-6),
        (torch.float16, 0.0, 2.0**-24),
        (torch.float16, 2.0**-20, 2.0**-24),
    ],
)
def test_ulp_is_the_spacing_of_the_type(dtype: torch.dtype, value: float, spacing: float) -> None:
    assert float(ulp_of(_wide(value), dtype)[0]) == spacing


def test_histogram_counts_every_element_once() -> None:
    golden = torch.linspace(0.1, 3, 100, dtype=torch.float64)
    counts = histogram(golden, golden.half().double(), golden + 1.0, torch.float16)
    assert sum(counts.reference) == sum(counts.target) == 100
    assert counts.target[-1] == 100
    assert len(counts.edges) == len(counts.target) + 1


def test_shape_and_dtype_must_be_the_references() -> None:
    eager = torch.zeros(2, 3, dtype=torch.float16)
    assert meta_mismatch(torch.zeros(2, 3, dtype=torch.float16), eager) is None
    assert "shape" in str(meta_mismatch(torch.zeros(3, 2, dtype=torch.float16), eager))
    assert "dtype" in str(meta_mismatch(torch.zeros(2, 3), eager))


def test_nan_is_compared_with_golden_and_only_where_the_reference_agrees() -> None:
    nan, inf = math.nan, math.inf
    want = _wide(1.0, nan, inf, 1.0)
    assert nonfinite_mismatch(want, want, want, forgive_dropped_nan=False)[0] is None
    text, wrong = nonfinite_mismatch(_wide(nan, nan, inf, 1.0), want, want, forgive_dropped_nan=False)
    assert "NaN where golden is finite" in str(text) and wrong.tolist() == [True, False, False, False]
    eager = _wide(1.0, nan, inf, inf)
    assert nonfinite_mismatch(_wide(1.0, nan, inf, nan), want, eager, forgive_dropped_nan=False)[0] is None
    dropped = _wide(1.0, 0.0, inf, 1.0)
    assert nonfinite_mismatch(dropped, want, want, forgive_dropped_nan=True)[0] is None
    assert nonfinite_mismatch(dropped, want, want, forgive_dropped_nan=False)[0] is not None
