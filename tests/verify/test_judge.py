"""Judging whole kernels: the corpus of wrong ones and their twins, and what a target may do wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bridge.errors import KernelError, NothingJudgedError, SpecError
from bridge.verify import KernelSpec
from bridge.verify.api import verify_kernel
from bridge.verify.judge import judge
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from bridge.verify.weigh import Judgement
from tests.verify.corpus import benign, losses, norms, pointwise
from tests.verify.corpus.pairs import Pair, full, normal

PAIRS = (*norms.PAIRS, *losses.PAIRS, *pointwise.PAIRS)
QUICK = Options(power=False, repeats=2, max_edges=10)
# Tensors are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)


def _judged(spec: KernelSpec, options: Options = QUICK) -> Judgement:
    return judge(spec, plan_cases(spec, options=options), options=options)


def _failed(judgement: Judgement) -> set[str]:
    return {t.tensor for t in judgement.tensors if t.verdict == "FAIL"}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_wrong_kernel_fails_in_the_tensors_it_gets_wrong(pair: Pair) -> None:
    spec = pair.make(True)
    judgement = _judged(replace(spec, dtypes=spec.dtypes[:1]))
    assert judgement.outcome == "FAIL"
    assert _failed(judgement) == pair.tensors
    assert judgement.diagnosis is not None and pair.cause in judgement.diagnosis.cause


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_its_twin_passes(pair: Pair) -> None:
    spec = pair.make(False)
    judgement = _judged(replace(spec, dtypes=spec.dtypes[-1:]))
    assert judgement.outcome == "PASS", judgement.summary


@pytest.mark.parametrize("make", benign.BENIGN, ids=lambda make: make.__name__)
def test_a_correct_kernel_is_not_flagged(make: Callable[[], KernelSpec]) -> None:
    judgement = _judged(make())
    legal = ("PASS WITH LIMITATIONS", "INCONCLUSIVE") if make is benign.cancelling else ("PASS",)
    assert judgement.outcome in legal, judgement.summary


def _double(**changes: Any) -> KernelSpec:
    fields: dict[str, Any] = {
        "name": "double",
        "reference": lambda x: 2 * x,
        "target": lambda x: x + x,
        "sample": normal(full),
        "inputs": ("x",),
        "grads": ("x",),
        "outputs": ("y",),
        "kind": "elementwise",
        "shapes": ((4, 16),),
        "dtypes": ("float32",),
    }
    return KernelSpec(**(fields | changes))


def test_equal_seeds_give_equal_verdicts() -> None:
    first, second = _judged(_double()), _judged(_double())
    assert first.tensors == second.tensors
    assert first.outcome == "PASS"


def test_wrong_structure_fails_with_its_reason() -> None:
    plain = Options(sweeps=False, power=False)
    for target, word in (
        (lambda x: (x, x), "2"),
        (lambda x: (2 * x)[:2], "shape"),
        (lambda x: (2 * x).double(), "dtype"),
        (lambda x: "no tensor", "str"),
    ):
        judgement = _judged(_double(target=target, grads=()), plain)
        assert judgement.outcome == "FAIL"
        assert word in str(judgement.tensors[0].structure)


def test_a_target_that_raises_on_every_case_is_an_error_naming_the_first() -> None:
    def target(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such tile")

    with pytest.raises(KernelError, match=r"double.*\(4, 16\) float32.*no such tile"):
        verify_kernel(_double(target=target))


def test_a_target_that_raises_on_some_declared_cases_fails_them_alone() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if x.shape == (3, 5):
                raise ValueError("no such tile\nand more")
            return x + x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if grad.shape == (2, 7):
                raise RuntimeError("no such backward")
            return 2 * grad

    spec = _double(target=Doubled.apply, shapes=((4, 16), (3, 5), (2, 7)))
    found = _judged(spec, Options(sweeps=False))
    assert found.outcome == "FAIL" and found.never_ran is None
    assert [case.verdict for case in found.cases] == ["PASS", "FAIL", "FAIL"]
    told = {(t.case, t.tensor): t.structure for t in found.tensors if t.structure is not None}
    assert told == {
        (case, tensor): f"target raised {text}"
        for case, text in (
            ("(3, 5) float32", "ValueError: no such tile on x (3, 5) float32"),
            ("(2, 7) float32", "RuntimeError: no such backward on x (2, 7) float32"),
        )
        for tensor in ("y", "grad_x")
    }
    assert (
        found.summary
        == "double does not run on (3, 5) float32: ValueError: no such tile; fails on 1 more case"
    )
    assert found.diagnosis is not None and "no such tile" in found.diagnosis.cause


def test_a_case_too_large_for_the_machine_is_no_failure() -> None:
    def target(x: torch.Tensor) -> torch.Tensor:
        if x.shape == (3, 5):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return x + x

    judgement = _judged(_double(target=target, shapes=((4, 16), (3, 5))), Options(sweeps=False))
    assert judgement.outcome == "PASS WITH LIMITATIONS"
    assert any("out of memory" in text for text in judgement.coverage.not_covered)


def test_a_reference_without_gradients_is_the_specs_error() -> None:
    with pytest.raises(KernelError, match=r"must give the gradients that `grads` names \(x\), got none"):
        _judged(_double(reference=lambda x: (2 * x).detach()))


def test_sample_draws_the_dtype_that_it_is_asked_for() -> None:
    with pytest.raises(SpecError, match="the dtype that it is given, float16, got float32"):
        _judged(_double(sample=lambda *a: (torch.randn(a[0], generator=a[2]),), dtypes=("float16",)))


def test_no_output_is_named_as_a_gradient_is() -> None:
    with pytest.raises(SpecError, match="`outputs` names 'grad_x'"):
        _double(outputs=("grad_x",))


def test_an_error_that_breaks_the_gpu_is_not_a_result_to_go_on_from() -> None:
    def target(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(KernelError, match=r"CUDA error: an illegal memory access"):
        _judged(_double(target=target), Options(sweeps=False))


def test_a_target_that_refuses_added_shapes_passes_with_limitations() -> None:
    def target(x: torch.Tensor) -> torch.Tensor:
        if x.shape != (4, 16):
            raise ValueError("only 4 x 16")
        return x + x

    judgement = _judged(_double(target=target))
    assert judgement.outcome == "PASS WITH LIMITATIONS"
    assert any("only 4 x 16" in text for text in judgement.coverage.not_covered)


def test_no_cases_is_nothing_judged() -> None:
    with pytest.raises(NothingJudgedError):
        judge(_double(), [])


def test_an_undeclared_dtype_is_refused() -> None:
    with pytest.raises(SpecError, match="float16"):
        plan_cases(_double(), dtypes=["float16"])


def test_power_lists_what_the_inputs_reveal() -> None:
    judgement = _judged(norms.PAIRS[0].make(False), Options(sweeps=False))
    assert "zeros are returned" in judgement.power.revealed
    assert any("epsilon" in text for text in (*judgement.power.revealed, *judgement.power.not_revealed))
    assert judgement.outcome == "PASS"


def test_inputs_that_reveal_nothing_are_inconclusive() -> None:
    def zeros(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str) -> Any:
        return (torch.zeros(shape, dtype=dtype, device=device),)

    judgement = _judged(_double(sample=zeros, grads=()), Options(sweeps=False))
    assert judgement.outcome == "INCONCLUSIVE"
