"""How much of a large case the reference is run on at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.verify.rows import (
    BY_ROWS,
    as_whole,
    case_of,
    judged_of,
    rms,
    spec_of,
)


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32 inside", "16 bits throughout"])
def test_of_the_reference_only_what_cannot_be_added_up_is_run_on_the_whole(narrow: bool) -> None:
    """Rows of the reference are run a block at a time, and with them sums that FP32 holds until the end."""
    seen: list[tuple[int, tuple[bool, ...]]] = []
    plain = rms()

    def reference(x: torch.Tensor, weight: torch.Tensor, **attrs: Any) -> torch.Tensor:
        if x.dtype == torch.float16:
            seen.append((x.shape[0], (x.requires_grad, weight.requires_grad)))
        if narrow:
            return x * weight
        made: torch.Tensor = plain.reference(x, weight, **attrs)
        return made

    target = (lambda x, weight, **attrs: x * weight) if narrow else plain.target
    spec = replace(plain, reference=reference, target=target)
    case = case_of(spec, "float16")
    seen.clear()
    assert judged_of(spec, case, BY_ROWS).record.verdict == "PASS"
    whole = [needs for rows, needs in seen if rows == 96]
    assert whole == ([(False, True)] if narrow else [])
    assert sum(rows for rows, needs in seen if needs == (True, not narrow)) >= 96


def test_a_golden_beside_a_reference_whose_rows_depend_on_each_other_is_made_whole() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return (x.float() - x.float().mean()).to(x.dtype)

    as_whole(spec_of(reference, golden=lambda x: x - 0.0), "float32", "its rows depend on each other")


def test_a_reference_that_takes_many_rows_in_another_way_is_run_whole() -> None:
    def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.t().contiguous() if len(x) == 96 else 2 * x), x.sum(0)

    spec = spec_of(reference, outputs=("y", "total"), grads=())
    as_whole(spec, "float16", "y does not follow the number of rows")
