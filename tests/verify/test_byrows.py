"""Large cases in blocks of rows: the verdicts of the whole, and the whole where rows depend on each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bridge.verify import KernelSpec
from bridge.verify.blocks import Pass, plan_blocks, surer_rows
from bridge.verify.envelope import measure_noise
from bridge.verify.golden import run_golden
from bridge.verify.options import Options
from bridge.verify.sweeps import SWEEPS, changed
from tests.verify.corpus import norms
from tests.verify.corpus.pairs import full, normal
from tests.verify.rows import (
    BY_ROWS,
    GATED,
    LOSS,
    WHOLE,
    as_whole,
    both,
    case_of,
    gated,
    judged_of,
    loss,
    rms,
    softmax,
    spec_of,
    with_change,
)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (rms(), "float16"),
        (rms(), "float32"),
        (GATED, "float16"),
        (spec_of(softmax), "float16"),
        (LOSS, "float32"),
    ],
    ids=["norm-float16", "norm-float32", "gated", "softmax", "loss"],
)
def test_a_right_kernel_passes_with_the_numbers_of_the_whole(spec: KernelSpec, dtype: str) -> None:
    assert both(spec, case_of(spec, dtype)).record.verdict == "PASS"


@pytest.mark.parametrize("shape", [(2, 96, 40), (96, 2, 40), (80, 80)])
def test_rows_may_lie_along_any_leading_axis_and_a_weight_be_as_long(shape: tuple[int, ...]) -> None:
    spec = rms(shape=shape)
    assert both(spec, case_of(spec, "float16")).record.verdict == "PASS"


@pytest.mark.parametrize("rows", [slice(24, 26), slice(93, 96)])
def test_wrong_rows_at_the_edge_of_a_block_fail(rows: slice) -> None:
    def change(y: torch.Tensor) -> None:
        y[rows] *= 1.5

    spec = with_change(rms(), change)
    judged = both(spec, case_of(spec, "float32"))
    assert {t.tensor for t in judged.tensors if t.verdict == "FAIL"} == {"y"}
    wrong = range(*rows.indices(96))
    assert {element.index[0] for element in judged.tensors[0].worst} <= set(wrong)
    assert f"{len(wrong)} of 96 rows over" in judged.tensors[0].companions["row gate"].detail


def test_rows_missing_from_the_gradient_of_a_weight_fail() -> None:
    spec = rms(norms.rms_kernel(weight_sum="floor", rows=64))
    judged = both(spec, case_of(spec, "float32"))
    assert {t.tensor for t in judged.tensors if t.verdict == "FAIL"} == {"grad_weight"}


def test_the_noise_of_a_sum_over_rows_is_that_of_the_whole_sum() -> None:
    spec = rms(shape=(2048, 8))
    case = case_of(spec, "float32")
    shares = []
    for options in (WHOLE, BY_ROWS):
        found = {t.tensor: t for t in judged_of(spec, case, options).tensors}["grad_weight"]
        value = found.companions["noise budget"].value
        assert value is not None
        shares.append(value)
    assert shares[1] == pytest.approx(shares[0], rel=1.0)


@pytest.mark.parametrize("name", ["NaN in one row", "all zero"])
def test_odd_rows(name: str) -> None:
    spec = rms()
    case = case_of(spec, "float16")
    if name == "all zero":
        case.inputs[0][10:13] = 0.0
    else:
        sweep = next(s for s in SWEEPS if "NaN" in s.name and s.on != "grad_output")
        case = replace(
            case, inputs=(changed(case.inputs[0], sweep, torch.Generator().manual_seed(0)), case.inputs[1])
        )
        assert bool(torch.isnan(case.inputs[0]).any())
    assert both(spec, case).record.verdict == "PASS"


def test_layouts() -> None:
    spec = rms()
    case = case_of(spec, "float16")
    upstream = case.grad_outputs[0]
    turned = replace(case, inputs=(case.inputs[0].t().contiguous().t(), case.inputs[1]))
    assert both(spec, turned).record.verdict == "PASS"
    repeated = replace(case, grad_outputs=(upstream[:1].expand_as(upstream),))
    assert both(spec, repeated).record.verdict == "PASS"


@pytest.mark.parametrize(
    "reference",
    [
        lambda x: torch.softmax(x.float(), 0).to(x.dtype),
        lambda x: x.float().cumsum(0).to(x.dtype),
        lambda x: (x.float() * torch.arange(x.shape[0])[:, None]).to(x.dtype),
        lambda x: (x.float() + x.float().roll(1, 0)).to(x.dtype),
        lambda x: (x.float() - x.float().mean()).to(x.dtype),
        lambda x: x.float().reshape(-1, 2, x.shape[1]).flip(1).reshape(x.shape).to(x.dtype),
        lambda x: x.float().flip(0).to(x.dtype),
    ],
    ids=["softmax over rows", "running sum", "position", "neighbours", "mean of all", "pairs", "turned"],
)
def test_rows_that_depend_on_each_other_are_judged_as_a_whole(reference: Any) -> None:
    as_whole(spec_of(reference), "float32", "its rows depend on each other")


def test_an_average_over_rows_is_judged_as_a_whole() -> None:
    spec = replace(LOSS, reference=lambda x, y: loss(x, y).mean(), target=lambda x, y: loss(x, y).mean())
    as_whole(spec, "float32", "its rows depend on each other")


def test_a_gate_that_is_not_valid_is_analysed_on_the_whole() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return (x + 1e4) - 1e4

    spec = spec_of(reference, kind="elementwise", dtypes=("float32",), sample=normal(full, scale=1e-3))
    as_whole(spec, "float32", "the gate of y is not valid")


def test_a_row_that_reads_another_noise_is_judged_as_a_whole() -> None:
    """A large weight is no part of a block."""
    spec = spec_of(
        lambda x, w: x.float() @ w.float(),
        sample=normal(full, lambda shape: (shape[1], shape[1])),
        inputs=("x", "w"),
        grads=("x", "w"),
        kind="matmul",
        shapes=((96, 24),),
    )
    as_whole(spec, "float32", "what belongs to all rows is too large")


def test_small_cases_are_left_as_they_are() -> None:
    spec = rms()
    judged = judged_of(spec, case_of(spec, "float32"), Options(sweeps=False, power=False))
    assert judged.record.notes == () and judged.evidence is not None


@pytest.mark.parametrize("spec", [spec_of(softmax), LOSS], ids=["softmax", "loss"])
def test_noise_does_not_depend_on_where_tensors_lie_in_memory(spec: KernelSpec) -> None:
    case = case_of(spec, "float32")
    golden = run_golden(spec, case)
    held: list[torch.Tensor] = []
    found = []
    for count in (0, 1, 5):
        held += [torch.empty(96, 80) for _ in range(count)]
        found.append({name: e.rms for name, e in measure_noise(spec, case, golden, seed=0).items()})
    for other in found[1:]:
        assert all(torch.equal(rms, other[name]) for name, rms in found[0].items())


def test_few_unlucky_elements_are_drawn_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draw is as good as none: what is over its budget then is not when many are drawn."""
    monkeypatch.setattr("bridge.verify.blocks.draws_of", lambda case: 1)
    spec = replace(GATED, target=lambda gate, up: gated(gate, up) * (1 + 4 * torch.finfo(torch.float32).eps))
    case = case_of(spec, "float32")
    plan = plan_blocks(spec, case, seed=0)
    found = surer_rows(plan, [3, 40, 95])
    assert set(found) == {"y", "grad_gate", "grad_up"} and set(found["y"]) == {3, 40, 95}
    few = {b.start: b.noise["y"].rms.clone() for b in Pass(plan, [(40, 41)], check=False)}
    more = {b.start: b.noise["y"].rms for b in Pass(plan, [(40, 41)], check=False, sure=found)}
    assert torch.equal(more[40][0], torch.maximum(few[40][0], found["y"][40]))
    assert float(more[40].mean()) > float(few[40].mean())


@pytest.mark.parametrize("options", [WHOLE, BY_ROWS], ids=["whole", "rows"])
def test_where_terms_cancel_to_nothing_lucky_draws_fail_nobody(
    monkeypatch: pytest.MonkeyPatch, options: Options
) -> None:
    """A moment that meets its opposite: golden is next to nothing, and so are some draws of the noise."""
    monkeypatch.setattr("bridge.verify.blocks.draws_of", lambda case: 1)
    monkeypatch.setattr("bridge.verify.envelope.draws_of", lambda case: 1)

    def reference(mean: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return (0.9 * mean.float() + (1.0 - 0.9) * grad.float()).to(mean.dtype)

    def cancelling(shape: Any, dtype: Any, generator: Any, device: str) -> Any:
        mean, grad = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
        mean[::7, ::9], grad[::7, ::9] = -5.0, 45.0
        return mean, grad

    def fused(mean: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """One rounding less, as a multiply-add does it."""
        product = ((1.0 - 0.9) * grad.float()).double() + mean.double() * torch.tensor(0.9).double()
        return product.float().to(mean.dtype)

    spec = spec_of(
        reference,
        fused,
        sample=cancelling,
        inputs=("mean", "grad"),
        grads=(),
        kind="elementwise",
        dtypes=("bfloat16",),
    )
    judged = judged_of(spec, case_of(spec, "bfloat16"), options)
    assert judged.record.verdict == "PASS", [t.reason for t in judged.tensors]
