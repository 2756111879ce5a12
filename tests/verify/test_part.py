"""Large cases whose power and diagnosis come from some of their rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bridge.verify import KernelSpec
from bridge.verify.case import Case
from bridge.verify.judge import judge
from tests.verify.rows import (
    BY_ROWS,
    GATED,
    case_of,
    gated,
)


@pytest.mark.parametrize("misdeed", ["state", "input", "random"])
def test_a_misdeed_on_a_large_case_is_the_cause(misdeed: str) -> None:
    calls = [0]

    def target(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = gated(gate, up)
        calls[0] += 1
        if misdeed == "input":
            up.detach().mul_(2.0)
        if misdeed == "state" and calls[0] > 1:
            return 2 * y
        if misdeed == "random":
            return y * (1 + 0.1 * calls[0])
        return y

    # More elements than are kept to try variants on.
    spec = replace(GATED, target=target, grads=(), dtypes=("float32",), shapes=((520, 520),))
    case = case_of(spec, "float32")
    found = judge(spec, [case], options=replace(BY_ROWS, repeats=2))
    assert found.outcome == "FAIL" and found.diagnosis is not None
    told = {
        "state": "state is kept between calls",
        "input": "overwrites its input in place",
        "random": "y depends on the run, not on the inputs alone",
    }
    assert told[misdeed] in found.diagnosis.cause


def _all_large(target: Any = None) -> tuple[KernelSpec, Case]:
    spec = replace(GATED, target=target or gated, shapes=((2100, 520),))
    return spec, case_of(spec, "float16")


def test_where_every_case_is_large_power_is_measured_on_some_rows() -> None:
    spec, case = _all_large()
    found = judge(spec, [case], options=replace(BY_ROWS, power=True))
    assert found.outcome == "PASS" and len(found.power.revealed) > 3


def test_where_every_case_is_large_the_cause_is_found_on_some_rows() -> None:
    spec, case = _all_large(lambda gate, up: torch.nn.functional.silu(gate.float()).to(gate.dtype) * up)
    found = judge(spec, [case], options=BY_ROWS)
    assert found.diagnosis is not None and (found.diagnosis.explained or 0.0) > 0.9, found.diagnosis
    assert "of its 2100 rows" in found.diagnosis.evidence


def test_wrong_rows_among_thousands_are_among_those_that_are_looked_at() -> None:
    def target(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gated(gate, up) * torch.where(gate[:, :1] > 3.0, 1.5, 1.0).to(gate.dtype)

    spec, case = _all_large(target)
    assert 0 < int((case.inputs[0][:, 0] > 3.0).sum()) < 9
    found = judge(spec, [case], options=BY_ROWS)
    assert found.diagnosis is not None
    assert found.diagnosis.where.startswith("y on (2100, 520) float16, "), found.diagnosis
