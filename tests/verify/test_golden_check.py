"""Golden against itself: sums that FP64 cannot settle are recomputed exactly."""

from __future__ import annotations

import math
from typing import Any

import torch

from bridge.verify import KernelSpec
from bridge.verify.case import Case
from bridge.verify.execute import Result, run
from bridge.verify.golden import Lifted, run_golden
from bridge.verify.golden_check import checked_golden
from tests.verify.corpus.pairs import full, normal


def _spec(reference: Any, inputs: tuple[str, ...] = ("x",)) -> KernelSpec:
    return KernelSpec(
        name="sums",
        reference=reference,
        target=reference,
        sample=normal(full),
        inputs=inputs,
        outputs=("y",),
        kind="reduction",
        shapes=((4, 16),),
        dtypes=("float32",),
    )


def _checked(spec: KernelSpec, *inputs: torch.Tensor) -> tuple[torch.Tensor, tuple[str, ...]]:
    case = Case(name="c", family="declared", dtype="float32", inputs=inputs, attrs={})
    reference = run(spec.reference, spec, case)
    assert isinstance(reference, Result)
    golden, notes = checked_golden(spec, case, reference)
    return golden.outputs["y"], notes


def _cancelling(width: int) -> torch.Tensor:
    """Rows of FP32 numbers whose sums are 1e-12 of their terms."""
    generator = torch.Generator().manual_seed(5)
    half = 1e6 * torch.randn(3, width, generator=generator)
    return torch.cat((half, -half, 1e-6 * torch.randn(3, width, generator=generator)), 1)[
        :, torch.randperm(3 * width, generator=generator)
    ]


def test_a_sum_that_fp64_cannot_settle_is_rounded_once() -> None:
    x = _cancelling(500)
    spec = _spec(lambda x: x.sum(-1))
    exact = [math.fsum(row) for row in x.double().tolist()]
    case = Case(name="c", family="declared", dtype="float32", inputs=(x,), attrs={})
    assert run_golden(spec, case).outputs["y"].tolist() != exact
    y, notes = _checked(spec, x)
    assert y.tolist() == exact
    assert len(notes) == 1 and "of 3 elements of y" in notes[0] and "math.fsum" in notes[0]
    assert "doubtful" not in notes[0]


def test_products_lose_nothing_either() -> None:
    x = _cancelling(64)
    y, notes = _checked(_spec(lambda x, w: x @ w, ("x", "w")), x, torch.full((192, 1), 1.1))
    exact = [math.fsum(float(v) * float(torch.tensor(1.1)) for v in row) for row in x.double()]
    assert notes and all(
        math.isclose(a, b, rel_tol=1e-9) for a, b in zip(y[:, 0].tolist(), exact, strict=True)
    )


def test_terms_that_round_themselves_are_said_to_stay_doubtful() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        third = x.sum(-1, keepdim=True) / 3
        return ((x - third) * 1e12 - x * 1e12 + third * 1e12).sum(-1)

    _, notes = _checked(_spec(reference), _cancelling(50).abs())
    assert notes and "recomputed" in notes[0]


def test_what_is_too_long_to_go_through_is_said() -> None:
    x = _cancelling(1 << 17)
    _, notes = _checked(_spec(lambda x: x.sum(-1)), x)
    assert notes and "not recomputed" in notes[0] and "terms in all" in notes[0]


def test_ordinary_sums_leave_no_note() -> None:
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    y, notes = _checked(_spec(lambda x: (x * x).mean(-1)), x)
    assert notes == () and torch.equal(y, (x.double() * x.double()).mean(-1))


def test_experts_products_are_made_in_fp64() -> None:
    """torch's grouped product, which has no FP64 of its own: forward and backward, group by group."""
    generator = torch.Generator().manual_seed(0)
    rows, weights = (
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((7, 16), (3, 16, 8))
    )
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    with Lifted():
        product = torch._grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=ends)
        found = torch.autograd.grad(product.square().sum(), (rows, weights))
    plain = torch.cat([rows[:2] @ weights[0], rows[2:2] @ weights[1], rows[2:] @ weights[2]])
    torch.testing.assert_close(product, plain)
    for one, two in zip(found, torch.autograd.grad(plain.square().sum(), (rows, weights)), strict=True):
        torch.testing.assert_close(one, two)
