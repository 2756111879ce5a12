"""What an assertion about a kernel says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge import testing
from bridge.verify.verdict import (
    Companion,
    Constants,
    Diagnosis,
    TensorVerdict,
    Verdict,
    WorstElement,
)


def entry(tensor: str = "grad_x", **changes: Any) -> TensorVerdict:
    fields: dict[str, Any] = {
        "tensor": tensor,
        "case": "(3, 255) float32",
        "verdict": "FAIL",
        "dtype": "float32",
        "shape": (3, 255),
        "reason": "row gate 35 > 1",
        "reference_error": 1e-7,
        "target_error": 0.32,
        "rounding_floor": 6e-8,
        "threshold": 2.6e-7,
        "reference_relative_error": 1e-7,
        "gate_valid": True,
        "worst": (
            WorstElement(index=(2, 254), golden=1.0, reference=1.0, target=1.32, error=0.32, ulp=2.7e6),
        ),
        "companions": {
            "row gate": Companion(value=35.0, limit=1.0, passed=False, detail="row 2"),
            "column gate": Companion(value=0.5, limit=1.0, passed=True),
        },
    }
    return TensorVerdict(**{**fields, **changes})


def verdict(outcome: str = "FAIL", *tensors: TensorVerdict, **changes: Any) -> Verdict:
    return Verdict(verdict=outcome, op="norm", tensors=tensors, **changes)  # type: ignore[arg-type]


def test_the_text_names_tensor_error_place_and_threshold() -> None:
    text = testing.explain(verdict("FAIL", entry(), constants=Constants(fudge_factor=3.0)))
    assert text.splitlines()[0] == "Kernel norm: FAIL"
    assert "grad_x of (3, 255) float32: FAIL (row gate 35 > 1)" in text
    assert "Greatest absolute difference: 0.32 at index (2, 254) (up to 2.6e-07 allowed)" in text
    assert "At (2, 254): golden 1, reference 1, kernel 1.32, 2.7e+06 ULP off" in text
    assert "Reference error 1e-07, rounding floor 6e-08, gate valid" in text
    assert "row gate: 35, up to 1 allowed. row 2" in text and "column gate" not in text
    assert "Constants: fudge_factor 3, project_atol 0, max_reference_relative_error 0.1" in text


def test_failures_come_worst_first_and_the_rest_is_counted() -> None:
    tensors = [
        entry("mild", target_error=1e-6),
        entry("fine", verdict="PASS"),
        entry("worse", target_error=1.0),
        entry("torn", structure="NaN where golden is finite"),
        entry("vague", verdict="INCONCLUSIVE", target_error=50.0),
    ]
    text = testing.explain(verdict("FAIL", *tensors))
    order = [text.index(f"{name} of") for name in ("torn", "worse", "mild")]
    assert order == sorted(order)
    assert "Structure differs: NaN where golden is finite" in text
    assert "... and 1 more of 5 tensor verdicts" in text and "fine of" not in text


def test_the_cause_is_told() -> None:
    found = Diagnosis(cause="eps outside the root", explained=0.98, where="rows 0..2")
    text = testing.explain(verdict("FAIL", entry(), diagnosis=found))
    assert "Cause: eps outside the root (explains 98% of the error)" in text and "Where: rows 0..2" in text


def test_numbers_that_are_missing_are_survived() -> None:
    bare = TensorVerdict(
        tensor="y", case="c", verdict="FAIL", dtype="float32", shape=(), structure="no result"
    )
    assert "Structure differs: no result" in testing.explain(verdict("FAIL", bare))
    odd = entry(
        worst=(WorstElement(index=(0,), golden=None, reference=1.0, target=None, error=None, ulp=None),)
    )
    assert "Greatest absolute difference: 0.32 (up to" in testing.explain(verdict("FAIL", odd))


@pytest.mark.parametrize(
    ("outcome", "strict", "raises"),
    [
        ("PASS", True, False),
        ("PASS WITH LIMITATIONS", False, False),
        ("PASS WITH LIMITATIONS", True, True),
        ("INCONCLUSIVE", False, True),
        ("FAIL", False, True),
    ],
)
def test_what_may_not_be_trusted_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: str, strict: bool, raises: bool
) -> None:
    seen: dict[str, Any] = {}

    def judge(spec: Any, **options: Any) -> Verdict:
        seen.update(options, spec=spec)
        return verdict(outcome)

    monkeypatch.setattr("bridge.verify.api.verify_kernel", judge)
    report = tmp_path / "report.html"
    if raises:
        with pytest.raises(AssertionError, match=f"Kernel norm: {outcome}") as caught:
            testing.verify_kernel("norm", strict=strict, report=report, seed=3)
        assert isinstance(caught.value, testing.KernelAssertionError)
        assert caught.value.verdict.verdict == outcome
    else:
        assert testing.verify_kernel("norm", strict=strict, report=report, seed=3).verdict == outcome
    assert seen == {"spec": "norm", "seed": 3}
    assert report.is_file()
