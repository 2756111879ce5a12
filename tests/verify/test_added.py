"""Results without rows: whose sums over blocks are the reference's own, and how they are added up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge.verify import KernelSpec
from bridge.verify.added import Cascade, may_add
from bridge.verify.apart import rows_apart
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from tests.verify.corpus.pairs import full, normal


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=70))
def test_a_cascade_adds_every_term_once(terms: list[int]) -> None:
    total = Cascade()
    for term in terms:
        total.add(torch.tensor(float(term)))
    assert float(total.sum()) == sum(terms)


def test_a_cascade_is_as_accurate_as_pairs() -> None:
    terms = torch.randn(4096, generator=torch.Generator().manual_seed(0)).abs()
    total, one = Cascade(), torch.zeros(())
    for term in terms:
        total.add(term)
        one = one + term
    exact = math.fsum(terms.tolist())
    assert abs(float(total.sum()) - exact) < 2e-7 * exact < abs(float(one) - exact)


def test_a_cascade_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one term"):
        Cascade().sum()


def _may(reference: Any, dtype: str) -> bool:
    spec = KernelSpec(
        name="scaled",
        reference=reference,
        target=reference,
        sample=normal(full, lambda shape: shape[1:]),
        inputs=("x", "weight"),
        grads=("x", "weight"),
        outputs=("y",),
        kind="reduction",
        shapes=((96, 40),),
        dtypes=(dtype,),
    )
    case = plan_cases(spec, options=Options(sweeps=False, power=False))[0]
    return may_add(spec, case, rows_apart(spec, case))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_sums_in_fp32_that_are_rounded_at_the_end_may_be_added_up(dtype: str) -> None:
    assert _may(lambda x, w: (x.float() * w.float()).to(x.dtype), dtype)


@pytest.mark.parametrize(
    "reference",
    [
        lambda x, w: x * w,
        lambda x, w: x.float().to(x.dtype) * w,
        lambda x, w: (x.float() * (1 + w).float()).to(x.dtype),
        lambda x, w: (x.float() * w.to(x.dtype).float()).to(w.dtype),
        lambda x, w: torch.lerp(x, 2 * x, w.expand_as(x)),
    ],
    ids=["product in 16 bits", "weight in 16 bits", "sum in 16 bits", "dtype of the weight", "refuses it"],
)
def test_a_reference_that_rounds_on_the_way_is_run_whole(reference: Any) -> None:
    assert not _may(reference, "float16")
    assert _may(reference, "float32")
