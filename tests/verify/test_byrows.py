"""Large cases in blocks of rows: the verdicts of the whole, and the whole where rows depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bridge.verify import KernelSpec
from bridge.verify.blocks import Pass, plan_blocks, surer_rows
from bridge.verify.case import Case
from bridge.verify.envelope import measure_noise
from bridge.verify.execute import Result, run
from bridge.verify.golden import run_golden
from bridge.verify.judge import constants_of, judge, judge_case
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from bridge.verify.sweeps import SWEEPS, changed
from bridge.verify.weigh import JudgedCase
from tests.verify.corpus import norms
from tests.verify.corpus.pairs import full, normal

WHOLE = Options(sweeps=False, power=False, repeats=1)
BY_ROWS = replace(WHOLE, large_bytes=1)
MADE = "golden and noise were made in "
#: Numbers that golden, reference and target alone decide.
GATE = ("reference_error", "target_error", "rounding_floor", "threshold", "reference_relative_error")


def _rms(target: Any = None, shape: tuple[int, ...] = (96, 80)) -> KernelSpec:
    spec = norms.rms("norm")(False)
    return replace(spec, shapes=(shape,), target=target or spec.target)


def _spec(reference: Any, target: Any = None, **changes: Any) -> KernelSpec:
    fields: dict[str, Any] = {
        "name": "made",
        "reference": reference,
        "target": target or reference,
        "sample": normal(full),
        "inputs": ("x",),
        "grads": ("x",),
        "outputs": ("y",),
        "kind": "reduction",
        "shapes": ((96, 80),),
        "dtypes": ("float16", "float32"),
    }
    return KernelSpec(**(fields | changes))


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def _labelled(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str) -> Any:
    return (
        torch.randn(shape, generator=generator, device=device).to(dtype),
        torch.randint(shape[1], shape[:1], generator=generator, device=device),
    )


GATED = _spec(
    _gated, sample=normal(full, full), inputs=("gate", "up"), grads=("gate", "up"), kind="elementwise"
)
LOSS = _spec(_loss, sample=_labelled, inputs=("logits", "labels"), grads=("logits",))


def _case(spec: KernelSpec, dtype: str) -> Case:
    return plan_cases(replace(spec, dtypes=(dtype,)), options=WHOLE)[0]


def _judged(spec: KernelSpec, case: Case, options: Options) -> JudgedCase:
    judged = judge_case(spec, case, constants=constants_of(spec), options=options)
    assert judged is not None
    return judged


def _both(spec: KernelSpec, case: Case) -> JudgedCase:
    """The case judged by rows; its verdicts, gates and companions are those of the whole."""
    whole, rows = _judged(spec, case, WHOLE), _judged(spec, case, BY_ROWS)
    assert any(note.startswith(MADE) for note in rows.record.notes), rows.record.notes
    assert rows.record.verdict == whole.record.verdict
    for one, other in zip(rows.tensors, whole.tensors, strict=True):
        assert (one.tensor, one.verdict, one.structure) == (other.tensor, other.verdict, other.structure)
        assert one.gate_valid == other.gate_valid
        assert list(one.companions) == list(other.companions)
        # Sums over rows come in another order: golden's agree to some 1e-16, the reference's as FP32 does.
        summed = one.shape != tuple(case.inputs[0].shape)
        for name in GATE:
            scale = 1e-12 if not summed else (1e-9 if name in ("target_error", "rounding_floor") else 0.5)
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=scale), (one.tensor, name)
        assert one.histogram is not None and other.histogram is not None
        assert one.histogram.target == other.histogram.target
        assert one.histogram.reference == other.histogram.reference or summed
        assert one.error_map == other.error_map or summed
        for name, check in one.companions.items():
            assert check.passed == other.companions[name].passed, (one.tensor, name)
    return rows


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (_rms(), "float16"),
        (_rms(), "float32"),
        (GATED, "float16"),
        (_spec(_softmax), "float16"),
        (LOSS, "float32"),
    ],
    ids=["norm-float16", "norm-float32", "gated", "softmax", "loss"],
)
def test_a_right_kernel_passes_with_the_numbers_of_the_whole(spec: KernelSpec, dtype: str) -> None:
    assert _both(spec, _case(spec, dtype)).record.verdict == "PASS"


@pytest.mark.parametrize("shape", [(2, 96, 40), (96, 2, 40), (80, 80)])
def test_rows_may_lie_along_any_leading_axis_and_a_weight_be_as_long(shape: tuple[int, ...]) -> None:
    spec = _rms(shape=shape)
    assert _both(spec, _case(spec, "float16")).record.verdict == "PASS"


def _wrong(spec: KernelSpec, change: Callable[[torch.Tensor], None]) -> KernelSpec:
    def target(*inputs: torch.Tensor, **attrs: Any) -> torch.Tensor:
        y: torch.Tensor = spec.target(*inputs, **attrs)
        other = y.detach().clone()
        change(other)
        return y + (other - y.detach())

    return replace(spec, target=target)


@pytest.mark.parametrize("rows", [slice(24, 26), slice(93, 96)])
def test_wrong_rows_at_the_edge_of_a_block_fail(rows: slice) -> None:
    def change(y: torch.Tensor) -> None:
        y[rows] *= 1.5

    spec = _wrong(_rms(), change)
    judged = _both(spec, _case(spec, "float32"))
    assert {t.tensor for t in judged.tensors if t.verdict == "FAIL"} == {"y"}
    wrong = range(*rows.indices(96))
    assert {element.index[0] for element in judged.tensors[0].worst} <= set(wrong)
    assert f"{len(wrong)} of 96 rows over" in judged.tensors[0].companions["row gate"].detail


def test_rows_missing_from_the_gradient_of_a_weight_fail() -> None:
    spec = _rms(norms.rms_kernel(weight_sum="floor", rows=64))
    judged = _both(spec, _case(spec, "float32"))
    assert {t.tensor for t in judged.tensors if t.verdict == "FAIL"} == {"grad_weight"}


def test_the_noise_of_a_sum_over_rows_is_that_of_the_whole_sum() -> None:
    spec = _rms(shape=(2048, 8))
    case = _case(spec, "float32")
    shares = []
    for options in (WHOLE, BY_ROWS):
        found = {t.tensor: t for t in _judged(spec, case, options).tensors}["grad_weight"]
        value = found.companions["noise budget"].value
        assert value is not None
        shares.append(value)
    assert shares[1] == pytest.approx(shares[0], rel=1.0)


@pytest.mark.parametrize("name", ["NaN in one row", "all zero"])
def test_odd_rows(name: str) -> None:
    spec = _rms()
    case = _case(spec, "float16")
    if name == "all zero":
        case.inputs[0][10:13] = 0.0
    else:
        sweep = next(s for s in SWEEPS if "NaN" in s.name and s.on != "grad_output")
        case = replace(
            case, inputs=(changed(case.inputs[0], sweep, torch.Generator().manual_seed(0)), case.inputs[1])
        )
        assert bool(torch.isnan(case.inputs[0]).any())
    assert _both(spec, case).record.verdict == "PASS"


def test_layouts() -> None:
    spec = _rms()
    case = _case(spec, "float16")
    upstream = case.grad_outputs[0]
    turned = replace(case, inputs=(case.inputs[0].t().contiguous().t(), case.inputs[1]))
    assert _both(spec, turned).record.verdict == "PASS"
    repeated = replace(case, grad_outputs=(upstream[:1].expand_as(upstream),))
    assert _both(spec, repeated).record.verdict == "PASS"


def _whole(spec: KernelSpec, dtype: str, why: str) -> None:
    case = _case(spec, dtype)
    judged = _judged(spec, case, BY_ROWS)
    assert any(note.startswith("golden was made whole") and why in note for note in judged.record.notes)
    plain = _judged(spec, case, WHOLE)
    assert judged.tensors == plain.tensors


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
    _whole(_spec(reference), "float32", "its rows depend on each other")


def test_an_average_over_rows_is_judged_as_a_whole() -> None:
    spec = replace(LOSS, reference=lambda x, y: _loss(x, y).mean(), target=lambda x, y: _loss(x, y).mean())
    _whole(spec, "float32", "its rows depend on each other")


def test_a_gate_that_is_not_valid_is_analysed_on_the_whole() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return (x + 1e4) - 1e4

    spec = _spec(reference, kind="elementwise", dtypes=("float32",), sample=normal(full, scale=1e-3))
    _whole(spec, "float32", "the gate of y is not valid")


def test_a_row_that_reads_another_noise_is_judged_as_a_whole() -> None:
    """A large weight is no part of a block."""
    spec = _spec(
        lambda x, w: x.float() @ w.float(),
        sample=normal(full, lambda shape: (shape[1], shape[1])),
        inputs=("x", "w"),
        grads=("x", "w"),
        kind="matmul",
        shapes=((96, 24),),
    )
    _whole(spec, "float32", "what belongs to all rows is too large")


def test_small_cases_are_left_as_they_are() -> None:
    spec = _rms()
    judged = _judged(spec, _case(spec, "float32"), Options(sweeps=False, power=False))
    assert judged.record.notes == () and judged.evidence is not None


@pytest.mark.parametrize("spec", [_spec(_softmax), LOSS], ids=["softmax", "loss"])
def test_noise_does_not_depend_on_where_tensors_lie_in_memory(spec: KernelSpec) -> None:
    case = _case(spec, "float32")
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
    spec = replace(GATED, target=lambda gate, up: _gated(gate, up) * (1 + 4 * torch.finfo(torch.float32).eps))
    case = _case(spec, "float32")
    plan = plan_blocks(spec, case, seed=0)
    found = surer_rows(plan, [3, 40, 95])
    assert set(found) == {"y", "grad_gate", "grad_up"} and set(found["y"]) == {3, 40, 95}
    few = {b.start: b.noise["y"].rms.clone() for b in Pass(plan, [(40, 41)], check=False)}
    more = {b.start: b.noise["y"].rms for b in Pass(plan, [(40, 41)], check=False, sure=found)}
    assert torch.equal(more[40][0], torch.maximum(few[40][0], found["y"][40]))
    assert float(more[40].mean()) > float(few[40].mean())


def _run(spec: KernelSpec, case: Case) -> Result:
    result = run(spec.reference, spec, case)
    assert isinstance(result, Result)
    return result


def _counting(wrong: int | None, scale: float) -> tuple[Any, list[int]]:
    """A target that is off in call number `wrong`, and its calls; the third lies between two others."""
    calls = [0]

    def target(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return _gated(gate, up) * (scale if calls[0] == wrong else 1.0)

    return target, calls


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("large_bytes", [1, 4 << 20], ids=["rows", "whole"])
def test_every_repeat_of_a_large_case_is_judged(number: int, large_bytes: int) -> None:
    options = replace(BY_ROWS, repeats=3, large_bytes=large_bytes)
    target, calls = _counting(number, 1.5)
    spec = replace(GATED, target=target)
    judged = _judged(spec, _case(spec, "float32"), options)
    assert calls[0] >= 4 and judged.record.verdict == "FAIL"
    assert [t.tensor for t in judged.tensors] == 2 * ["y", "grad_gate", "grad_up"]
    assert [t.verdict for t in judged.tensors] == ["PASS"] * 3 + ["FAIL"] * 3
    said = "nondeterministic: y differs from run to run (1 repeats with other bits), each judged"
    assert said in judged.record.notes
    assert ("state is kept between calls" in judged.tensors[3].reason) == (number == 2)


def test_repeats_of_a_large_case_with_other_bits_may_be_right() -> None:
    target, _ = _counting(2, 1 + torch.finfo(torch.float32).eps)
    spec = replace(GATED, target=target)
    judged = _judged(spec, _case(spec, "float32"), replace(BY_ROWS, repeats=2))
    assert judged.record.verdict == "PASS" and len(judged.tensors) == 6
    assert any("differs from run to run" in note for note in judged.record.notes)


def test_a_repeat_that_writes_into_its_input_fails() -> None:
    calls = [0]

    def target(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = _gated(gate, up)
        calls[0] += 1
        if calls[0] == 2:
            up.detach().mul_(2.0)
        return y

    spec = replace(GATED, target=target, grads=())
    judged = _judged(spec, _case(spec, "float32"), replace(BY_ROWS, repeats=2))
    assert judged.record.verdict == "FAIL"
    assert "the input `up` was written to" in judged.tensors[-1].reason


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32 inside", "16 bits throughout"])
def test_of_the_reference_only_what_cannot_be_added_up_is_run_on_the_whole(narrow: bool) -> None:
    """Rows of the reference are run a block at a time, and with them sums that FP32 holds until the end."""
    seen: list[tuple[int, tuple[bool, ...]]] = []
    plain = _rms()

    def reference(x: torch.Tensor, weight: torch.Tensor, **attrs: Any) -> torch.Tensor:
        if x.dtype == torch.float16:
            seen.append((x.shape[0], (x.requires_grad, weight.requires_grad)))
        if narrow:
            return x * weight
        made: torch.Tensor = plain.reference(x, weight, **attrs)
        return made

    target = (lambda x, weight, **attrs: x * weight) if narrow else plain.target
    spec = replace(plain, reference=reference, target=target)
    case = _case(spec, "float16")
    seen.clear()
    assert _judged(spec, case, BY_ROWS).record.verdict == "PASS"
    whole = [needs for rows, needs in seen if rows == 96]
    assert whole == ([(False, True)] if narrow else [])
    assert sum(rows for rows, needs in seen if needs == (True, not narrow)) >= 96


def test_a_golden_beside_a_reference_whose_rows_depend_on_each_other_is_made_whole() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return (x.float() - x.float().mean()).to(x.dtype)

    _whole(_spec(reference, golden=lambda x: x - 0.0), "float32", "its rows depend on each other")


def test_a_reference_that_takes_many_rows_in_another_way_is_run_whole() -> None:
    def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.t().contiguous() if len(x) == 96 else 2 * x), x.sum(0)

    spec = _spec(reference, outputs=("y", "total"), grads=())
    _whole(spec, "float16", "y does not follow the number of rows")


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

    spec = _spec(
        reference,
        fused,
        sample=cancelling,
        inputs=("mean", "grad"),
        grads=(),
        kind="elementwise",
        dtypes=("bfloat16",),
    )
    judged = _judged(spec, _case(spec, "bfloat16"), options)
    assert judged.record.verdict == "PASS", [t.reason for t in judged.tensors]


@pytest.mark.parametrize("misdeed", ["state", "input", "random"])
def test_a_misdeed_on_a_large_case_is_the_cause(misdeed: str) -> None:
    calls = [0]

    def target(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = _gated(gate, up)
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
    case = _case(spec, "float32")
    found = judge(spec, [case], options=replace(BY_ROWS, repeats=2))
    assert found.outcome == "FAIL" and found.diagnosis is not None
    told = {
        "state": "state is kept between calls",
        "input": "overwrites its input in place",
        "random": "y depends on the run, not on the inputs alone",
    }
    assert told[misdeed] in found.diagnosis.cause


def _all_large(target: Any = None) -> tuple[KernelSpec, Case]:
    spec = replace(GATED, target=target or _gated, shapes=((2100, 520),))
    return spec, _case(spec, "float16")


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
        return _gated(gate, up) * torch.where(gate[:, :1] > 3.0, 1.5, 1.0).to(gate.dtype)

    spec, case = _all_large(target)
    assert 0 < int((case.inputs[0][:, 0] > 3.0).sum()) < 9
    found = judge(spec, [case], options=BY_ROWS)
    assert found.diagnosis is not None
    assert found.diagnosis.where.startswith("y on (2100, 520) float16, "), found.diagnosis
