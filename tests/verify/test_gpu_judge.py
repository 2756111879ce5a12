"""What the interpreter cannot show: TF32 dots, native bfloat16, atomics in any order, real autotuning."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bridge.verify import KernelSpec
from bridge.verify.judge import judge
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from bridge.verify.weigh import Judgement
from tests.verify.corpus.pairs import full, normal

pytestmark = pytest.mark.gpu

QUICK = Options(power=False, repeats=2, max_edges=4)


@pytest.fixture(scope="module")
def kernels() -> Any:
    from tests.verify import gpu_kernels

    return gpu_kernels


def _spec(name: str, reference: Callable[..., Any], target: Callable[..., Any], **more: Any) -> KernelSpec:
    fields: dict[str, Any] = {
        "sample": normal(full),
        "inputs": ("x",),
        "outputs": ("y",),
        "kind": "elementwise",
        "shapes": ((8, 96), (3, 33)),
        "dtypes": ("float32",),
    }
    return KernelSpec(name=name, reference=reference, target=target, **(fields | more))


def _judged(spec: KernelSpec, options: Options = QUICK) -> Judgement:
    return judge(spec, plan_cases(spec, options=options, device="cuda"), options=options)


def _operands(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str) -> Any:
    rows, cols, depth = shape
    return (
        torch.randn(rows, depth, generator=generator, device=device).to(dtype),
        torch.randn(depth, cols, generator=generator, device=device).to(dtype),
    )


@pytest.mark.parametrize(("precision", "outcome"), [("ieee", "PASS"), ("tf32", "FAIL")])
def test_a_dot_in_tf32_fails_where_fp32_is_meant(kernels: Any, precision: str, outcome: str) -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    spec = _spec(
        "matmul",
        lambda a, b: a @ b,
        lambda a, b: kernels.matmul(a, b, precision),
        sample=_operands,
        inputs=("a", "b"),
        kind="matmul",
        shapes=((64, 48, 96), (33, 65, 40)),
    )
    found = _judged(spec)
    assert found.outcome == outcome, found.summary
    exact = [t.companions["exact integers"] for t in found.tensors if "exact integers" in t.companions]
    assert exact and all(check.passed for check in exact) is (outcome == "PASS")


@pytest.mark.parametrize(("early", "outcome"), [(False, "PASS"), (True, "FAIL")])
def test_native_bfloat16_on_every_value(kernels: Any, early: bool, outcome: str) -> None:
    spec = _spec(
        "silu",
        lambda x: torch.nn.functional.silu(x.float()).to(x.dtype),
        lambda x: kernels.silu(x, early),
        dtypes=("bfloat16",),
    )
    found = _judged(spec)
    assert found.outcome == outcome, found.summary
    assert "every value" in found.coverage.families


def test_atomics_that_differ_from_run_to_run_are_told_and_pass(kernels: Any) -> None:
    spec = _spec(
        "column_sum",
        lambda x: x.sum(0),
        lambda x: kernels.column_sum(x, 0),
        kind="reduction",
        shapes=((8192, 64),),
    )
    found = _judged(spec, Options(power=False, sweeps=False, repeats=5))
    assert found.outcome == "PASS", found.summary
    assert any("nondeterministic: y" in note for note in found.cases[0].notes)
    assert "run to run" in found.summary


def test_atomics_that_lose_a_row_fail_whatever_the_order(kernels: Any) -> None:
    spec = _spec(
        "column_sum",
        lambda x: x.sum(0),
        lambda x: kernels.column_sum(x, 1),
        kind="reduction",
        shapes=((8192, 64), (33, 65)),
    )
    assert _judged(spec).outcome == "FAIL"


@pytest.mark.parametrize(("wrong", "outcome"), [(0, "PASS"), (32, "FAIL"), (64, "FAIL")])
def test_every_configuration_is_judged_whichever_tuning_picks(
    monkeypatch: pytest.MonkeyPatch, wrong: int, outcome: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from tests.verify import autotuned

    module = importlib.reload(autotuned)  # other tests load it for the interpreter
    spec = _spec("double", lambda x: 2 * x, lambda x: module.double(x, wrong))
    found = _judged(spec, Options(power=False, sweeps=False, repeats=1))
    assert found.outcome == outcome, found.summary
    assert any("2 configurations, each judged alone" in note for note in found.cases[0].notes)
    if wrong:
        assert any(f"BLOCK: {wrong}" in t.reason for t in found.tensors if t.verdict == "FAIL")


def test_memory_that_was_never_written_is_named_on_the_gpu(kernels: Any) -> None:
    def target(x: torch.Tensor) -> torch.Tensor:
        work = torch.empty(x.shape[0] + 1, x.shape[1], device=x.device)
        work[: x.shape[0]] = x
        return work.sum(0)

    spec = _spec("slack", lambda x: x.sum(0), target, kind="reduction")
    found = _judged(spec, Options(power=False, sweeps=False, repeats=1))
    assert found.outcome == "FAIL"
    assert found.diagnosis is not None and "never written" in found.diagnosis.cause


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["offset_rmsnorm", "layer_norm", "softmax", "fused_swiglu"])
def test_a_large_case_takes_at_most_twelve_times_its_largest_input(name: str, dtype: str) -> None:
    """Drawing it, reference, target with its repeats, golden and noise: all that torch allocates."""
    from bridge.verify.registry import load_spec

    options = Options(sweeps=False, power=False, repeats=3)
    spec = replace(load_spec(name).spec, shapes=((4096, 4096),), dtypes=(dtype,))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = judge(spec, plan_cases(spec, device="cuda", options=options), options=options)
    peak = torch.cuda.max_memory_allocated() - before
    assert found.outcome == "PASS", [t.reason for t in found.tensors]
    assert found.cases[0].notes[0].startswith("golden and noise were made in ")
    unit = 4096 * 4096 * getattr(torch, dtype).itemsize
    assert peak <= 12 * unit, peak / unit


@pytest.mark.parametrize("large_bytes", [1 << 12, 4 << 20], ids=["large", "small"])
def test_results_on_the_host_fail_by_their_structure(large_bytes: int) -> None:
    spec = _spec("host", lambda x: 2 * x, lambda x: (2 * x).cpu())
    options = Options(repeats=3, large_bytes=large_bytes, max_edges=4)
    found = judge(spec, plan_cases(spec, device="cuda", options=options), options=options)
    assert found.outcome == "FAIL"
    assert found.diagnosis is not None and "device must be cuda:0" in found.diagnosis.cause
    assert {t.tensor for t in found.tensors if t.verdict == "FAIL"} == {"y"}
