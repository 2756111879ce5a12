"""Diagnosis names slips of index, count, sign and step; their right twins pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bridge.verify.judge import judge
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from bridge.verify.registry import load_spec
from tests.verify.corpus import slips, state
from tests.verify.corpus.pairs import Pair

DECLARED = Options(power=False, repeats=4, sweeps=False)
SWEPT = Options(power=False, repeats=2, max_edges=2)
torch.set_num_threads(1)


@pytest.mark.parametrize("pair", (*slips.PAIRS, *state.PAIRS, *slips.SWEPT), ids=lambda pair: pair.name)
def test_a_slip_is_named_and_its_twin_passes(pair: Pair) -> None:
    options = SWEPT if pair in slips.SWEPT else DECLARED
    wrong, right = pair.make(True), pair.make(False)
    judgement = judge(wrong, plan_cases(wrong, options=options), options=options)
    assert judgement.outcome == "FAIL"
    assert {t.tensor for t in judgement.tensors if t.verdict == "FAIL"} == pair.tensors
    assert judgement.diagnosis is not None
    assert pair.cause in judgement.diagnosis.cause
    twin = judge(right, plan_cases(right, options=options), options=options)
    assert twin.outcome == "PASS", twin.summary


CACHED = """
import torch
from bridge.verify import KernelSpec

TABLE = {}

def target(x, pos):
    row = TABLE.setdefault(pos.shape, pos * 0.5)
    return x + row

def sample(shape, dtype, generator, device):
    x = torch.randn(shape, generator=generator, device=device).to(dtype)
    start = int(torch.randint(1, 90, (1,), generator=generator, device=device))
    return x, torch.arange(start, start + shape[-1], device=device)

SPEC = KernelSpec(name="cached", reference=lambda x, pos: x + pos * 0.5, target=target, sample=sample,
                  inputs=("x", "pos"), outputs=("y",), kind="elementwise", shapes=((6, 16), (3, 16)),
                  dtypes=("float32",))
"""


def test_state_kept_from_an_earlier_call_is_named(tmp_path: Path) -> None:
    """Repeats agree with each other: only a fresh load of the file shows that the first call was right."""
    file = tmp_path / "cached.py"
    file.write_text(CACHED)
    spec = load_spec(str(file)).spec
    judgement = judge(spec, plan_cases(spec, options=DECLARED), options=DECLARED)
    assert judgement.outcome == "FAIL"
    assert judgement.diagnosis is not None
    assert "state is kept between calls" in judgement.diagnosis.cause


def test_each_step_of_the_workflow_leaves_its_evidence() -> None:
    spec = slips.PAIRS[0].make(False)
    steps = judge(spec, plan_cases(spec, options=DECLARED), options=DECLARED).coverage.steps
    assert [step.split()[0] for step in steps] == [str(n) for n in range(1, 10)]
    assert "x float32 -> " in steps[0] and "sums in float32" in steps[0] and "grad_x float32" in steps[0]
    assert "gate valid on 4 of 4" in steps[3]
    assert steps[8] == "9 diagnosis: nothing failed"
