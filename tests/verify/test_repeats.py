"""Repeats of a large case, which are judged one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.verify.rows import (
    BY_ROWS,
    GATED,
    case_of,
    gated,
    judged_of,
)


def _counting(wrong: int | None, scale: float) -> tuple[Any, list[int]]:
    """A target that is off in call number `wrong`, and its calls; the third lies between two others."""
    calls = [0]

    def target(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return gated(gate, up) * (scale if calls[0] == wrong else 1.0)

    return target, calls


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("large_bytes", [1, 4 << 20], ids=["rows", "whole"])
def test_every_repeat_of_a_large_case_is_judged(number: int, large_bytes: int) -> None:
    options = replace(BY_ROWS, repeats=3, large_bytes=large_bytes)
    target, calls = _counting(number, 1.5)
    spec = replace(GATED, target=target)
    judged = judged_of(spec, case_of(spec, "float32"), options)
    assert calls[0] >= 4 and judged.record.verdict == "FAIL"
    assert [t.tensor for t in judged.tensors] == 2 * ["y", "grad_gate", "grad_up"]
    assert [t.verdict for t in judged.tensors] == ["PASS"] * 3 + ["FAIL"] * 3
    said = "nondeterministic: y differs from run to run (1 repeats with other bits), each judged"
    assert said in judged.record.notes
    assert ("state is kept between calls" in judged.tensors[3].reason) == (number == 2)


def test_repeats_of_a_large_case_with_other_bits_may_be_right() -> None:
    target, _ = _counting(2, 1 + torch.finfo(torch.float32).eps)
    spec = replace(GATED, target=target)
    judged = judged_of(spec, case_of(spec, "float32"), replace(BY_ROWS, repeats=2))
    assert judged.record.verdict == "PASS" and len(judged.tensors) == 6
    assert any("differs from run to run" in note for note in judged.record.notes)


def test_a_repeat_that_writes_into_its_input_fails() -> None:
    calls = [0]

    def target(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = gated(gate, up)
        calls[0] += 1
        if calls[0] == 2:
            up.detach().mul_(2.0)
        return y

    spec = replace(GATED, target=target, grads=())
    judged = judged_of(spec, case_of(spec, "float32"), replace(BY_ROWS, repeats=2))
    assert judged.record.verdict == "FAIL"
    assert "the input `up` was written to" in judged.tensors[-1].reason
