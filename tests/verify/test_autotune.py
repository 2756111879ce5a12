"""Every configuration of an autotuned kernel is judged alone."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from bridge.verify import KernelSpec
from bridge.verify.autotune import each_config, pinned, tuners_of
from bridge.verify.judge import judge
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from tests.verify.corpus.pairs import full, normal

PLAIN = Options(sweeps=False, power=False, repeats=1)


@pytest.fixture
def autotuned(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from tests.verify import autotuned

    return importlib.reload(autotuned)


def _spec(autotuned: ModuleType, wrong_block: int) -> KernelSpec:
    return KernelSpec(
        name="double",
        reference=lambda x: 2 * x,
        target=lambda x: autotuned.double(x, wrong_block),
        sample=normal(full),
        inputs=("x",),
        outputs=("y",),
        kind="elementwise",
        shapes=((4, 48), (2, 64)),
        dtypes=("float32",),
    )


def test_a_configuration_that_tuning_did_not_pick_is_judged_too(autotuned: ModuleType) -> None:
    spec = _spec(autotuned, wrong_block=64)
    found = judge(spec, plan_cases(spec, options=PLAIN), options=PLAIN)
    failed = [t for t in found.tensors if t.verdict == "FAIL"]
    assert found.outcome == "FAIL" and len(failed) == 1
    assert failed[0].reason.startswith("double_kernel with BLOCK: 64")
    assert any("2 configurations, each judged alone" in note for note in found.cases[0].notes)
    assert len(found.tensors) == 4  # the picked one on both cases, and each configuration on the first


def test_right_configurations_pass(autotuned: ModuleType) -> None:
    spec = _spec(autotuned, wrong_block=0)
    found = judge(spec, plan_cases(spec, options=PLAIN), options=PLAIN)
    assert found.outcome == "PASS" and found.kernels == ("double_kernel",)


def test_the_autotuner_is_left_as_it_was(autotuned: ModuleType) -> None:
    spec = _spec(autotuned, wrong_block=0)
    case = plan_cases(spec, options=PLAIN)[0]
    tuners = tuners_of(spec, case)
    before = list(tuners[0].configs)
    assert len(list(each_config(spec, case))) == 2
    with pytest.raises(ZeroDivisionError), pinned(tuners[0], before[1]):
        raise ZeroDivisionError
    assert tuners[0].configs == before and len(tuners) == 1


def test_a_configuration_that_raises_is_noted_and_does_not_end_the_run(autotuned: ModuleType) -> None:
    spec = _spec(autotuned, wrong_block=0)

    def target(x: torch.Tensor) -> torch.Tensor:
        if autotuned.double_kernel.configs[0].kwargs["BLOCK"] == 64:
            raise RuntimeError("out of resource: shared memory")
        return autotuned.double(x)  # type: ignore[no-any-return]

    from dataclasses import replace

    spec = replace(spec, target=target)
    found = judge(spec, plan_cases(spec, options=PLAIN), options=PLAIN)
    assert found.outcome == "PASS"
    assert any("BLOCK: 64" in note and "out of resource" in note for note in found.cases[0].notes)
