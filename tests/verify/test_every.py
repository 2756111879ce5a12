"""All values of a 16-bit dtype, where a kernel maps each element by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bridge.verify import KernelSpec
from bridge.verify.every import FAMILY, all_values
from bridge.verify.judge import judge
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from bridge.verify.weigh import Judgement
from tests.verify.corpus import losses, norms, pointwise
from tests.verify.corpus.pairs import full, normal

QUICK = Options(power=False, repeats=1, max_edges=1)
Unary = Callable[[torch.Tensor], torch.Tensor]


def _spec(target: Unary, reference: Unary = torch.nn.functional.silu, dtype: str = "float16") -> KernelSpec:
    return KernelSpec(
        name="unary",
        reference=lambda x: reference(x.float()).to(x.dtype),
        target=target,
        sample=normal(full),
        inputs=("x",),
        outputs=("y",),
        kind="elementwise",
        shapes=((4, 16),),
        dtypes=(dtype,),
    )


def _judged(spec: KernelSpec) -> Judgement:
    cases = [case for case in plan_cases(spec, options=QUICK) if case.family == FAMILY]
    assert len(cases) == 1
    return judge(spec, cases, options=QUICK)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_pattern_is_there_once_and_nan_apart(dtype: torch.dtype) -> None:
    values = all_values(dtype)
    words = values.view(torch.int16)
    assert len(set(words.tolist())) == 1 << 16 and values.numel() % 256 == 0
    rows = torch.isnan(values).view(-1, 256)
    mixed = rows.any(1) & ~torch.isnan(values).view(-1, 256).all(1)
    assert int(mixed.sum()) <= 1 and bool((values.view(-1, 256)[mixed].nan_to_num(1.0) == 1.0).all())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_right_kernel_passes_on_all_of_them(dtype: str) -> None:
    found = _judged(_spec(_silu, dtype=dtype))
    assert found.outcome == "PASS", found.summary
    assert found.cases[0].notes == ()


def test_one_wrong_value_of_65536_fails() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x == 2.671875, x, _silu(x))

    spec = _spec(wrong)
    others = [case for case in plan_cases(spec, options=QUICK) if case.family != FAMILY]
    assert judge(spec, others, options=QUICK).outcome == "PASS"
    assert _judged(spec).outcome == "FAIL"


def test_infinities_must_stay_where_the_formula_has_them() -> None:
    clamped = _judged(_spec(lambda x: _silu(x).clamp(-60000, 60000)))
    assert clamped.outcome == "FAIL" and "+Inf" in str(clamped.tensors[0].structure)


def test_nan_at_an_infinite_input_is_forgiven_where_golden_is_infinite() -> None:
    wobbly = _judged(_spec(lambda x: (_silu(x).float() * (1 + 0 * torch.cos(x.float()))).to(x.dtype)))
    assert wobbly.outcome == "PASS", wobbly.summary


def test_a_lost_sign_of_zero_is_told_but_no_failure() -> None:
    found = _judged(_spec(lambda x: _silu(x) + 0.0))
    assert found.outcome == "PASS"
    assert any("sign of zero" in note for note in found.cases[0].notes)


def test_only_formulas_that_map_each_element_by_itself_get_the_case() -> None:
    pairs = {p.name: p for p in (*norms.PAIRS, *losses.PAIRS, *pointwise.PAIRS)}
    for name, unary in (
        ("tanh by exp overflows", True),
        ("zero padding in the maximum", False),
        ("positions off by one", False),
        ("exclusive for inclusive sum", False),
        ("silu rounded before the product", False),
    ):
        spec = pairs[name].make(False)
        spec = replace(spec, dtypes=("float16",))
        assert any(c.family == FAMILY for c in plan_cases(spec, options=QUICK)) is unary, name
    assert not any(c.family == FAMILY for c in plan_cases(_spec(_silu, dtype="float32"), options=QUICK))
