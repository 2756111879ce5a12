"""Integers on which nothing may round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bridge.verify import KernelSpec
from bridge.verify.exact import FAMILY, exact_tensors
from bridge.verify.judge import judge
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from bridge.verify.weigh import Judgement
from tests.verify.corpus import losses, norms, pointwise
from tests.verify.corpus.pairs import full, fused, last, normal

QUICK = Options(power=False, repeats=1, max_edges=1)


def _probes(spec: KernelSpec) -> list[Any]:
    return [case for case in plan_cases(spec, options=QUICK) if case.family == FAMILY]


def _judged(spec: KernelSpec) -> Judgement:
    return judge(spec, _probes(spec), options=QUICK)


def _column_sum(lose: float) -> KernelSpec:
    """A sum over rows whose accumulator loses a little, far inside any noise budget."""
    apply = fused(
        lambda x: (x.sum(0) + lose * torch.cos(x.sum(0)), x),
        lambda x, g: g.expand(x.shape).clone(),
    )
    return KernelSpec(
        name="column_sum",
        reference=lambda x: x.sum(0),
        target=lambda x: apply(x),
        sample=normal(full),
        inputs=("x",),
        grads=("x",),
        outputs=("y",),
        kind="reduction",
        shapes=((512, 8),),
        dtypes=("float32",),
    )


def test_one_lost_bit_is_a_failure_that_no_budget_excuses() -> None:
    wrong = _judged(_column_sum(2e-6))
    failed = [t for t in wrong.tensors if t.verdict == "FAIL"]
    assert {t.tensor for t in failed} == {"y"}
    assert all("exact integers" in t.reason and t.companions["noise budget"].passed for t in failed)
    assert _judged(_column_sum(0.0)).outcome == "PASS"


def test_low_precision_dots_show_on_integers() -> None:
    for name in ("silent TF32", "fp16 accumulator"):
        pair = next(p for p in losses.PAIRS if p.name == name)
        for bad in (True, False):
            spec = replace(pair.make(bad), dtypes=("float32",))
            checks = [
                t.companions["exact integers"]
                for t in _judged(spec).tensors
                if "exact integers" in t.companions
            ]
            assert checks and all(c.passed for c in checks) is not bad


def test_what_rounds_is_not_called_exact() -> None:
    for pair in (norms.PAIRS[0], next(p for p in losses.PAIRS if p.name == "zero padding in the maximum")):
        spec = replace(pair.make(False), dtypes=("float32",))
        assert _probes(spec) == []
    layer = next(p for p in norms.PAIRS if p.name == "one-pass variance").make(False)
    assert {n for case in _probes(layer) for n in exact_tensors(layer, case)} == {"grad_bias"}


def test_division_counts_only_where_it_comes_out_even() -> None:
    def mean(width: int) -> KernelSpec:
        return KernelSpec(
            name="mean",
            reference=lambda x: x.mean(-1),
            target=lambda x: x.mean(-1),
            sample=normal(full),
            inputs=("x",),
            grads=("x",),
            outputs=("y",),
            kind="reduction",
            shapes=((4, width),),
            dtypes=("float32",),
        )

    assert {case.inputs[0].shape[-1] for case in _probes(mean(96))} == {64}
    spec = mean(64)
    assert all(exact_tensors(spec, case) == {"y", "grad_x"} for case in _probes(spec))


def test_sixteen_bit_results_are_exact_while_they_fit() -> None:
    spec = next(p for p in pointwise.PAIRS if p.name == "input taken as dense").make(False)
    spec = replace(spec, dtypes=("float16",))
    found = {case.name.rpartition(", ")[2]: exact_tensors(spec, case) for case in _probes(spec)}
    assert found["small integers"] == {"y", "grad_x", "grad_bias"}
    assert "grad_bias" not in found["large integers in grad_output"]


def test_integer_inputs_are_left_as_they_are() -> None:
    spec = losses.embedding(False)
    first = _probes(spec)[0]
    assert first.inputs[1].dtype == torch.int64 and exact_tensors(spec, first) == {"y", "grad_w"}
    assert last((3, 4)) == (4,)
