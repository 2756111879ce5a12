"""Numbers as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.report.numbers import percent, plural, ratio, short, times


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (0.0, "0"),
        (-0.0, "0"),
        (0.00195, "1.95e-3"),
        (0.0123456, "0.0123"),
        (0.9996, "1.00"),
        (1.0, "1.00"),
        (12.345, "12.3"),
        (999.6, "1000"),
        (1234.5, "1230"),
        (99999.0, "1.00e5"),
        (5e-324, "4.94e-324"),
        (-2.5, "-2.50"),
    ],
)
def test_short(value: float | None, expected: str) -> None:
    assert short(value) == expected


@given(st.floats(-1e300, 1e300))
def test_short_keeps_three_digits(value: float) -> None:
    assert float(short(value)) == pytest.approx(value, rel=6e-3, abs=1e-323)
    assert len(short(value)) <= 10


def test_ratio() -> None:
    assert ratio(1.0, 4.0) == 0.25
    assert ratio(0.0, 0.0) == 0.0
    assert ratio(1e-30, 0.0) == math.inf
    assert ratio(None, 1.0) is None
    assert ratio(1.0, None) is None


def test_words() -> None:
    assert percent(0.000244140625) == "0.0244 %"
    assert percent(None) == "-"
    assert times(27.34) == "27.3x"
    assert times(None) == "beyond measure"
    assert plural(1, "case") == "1 case"
    assert plural(1234, "case") == "1,234 cases"
