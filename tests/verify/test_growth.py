"""Error over length: noise or bias, with its confidence interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bridge.verify import KernelSpec
from bridge.verify.growth import LENGTHS, SEEDS, fit, measure_growth, spread_of
from bridge.verify.judge import judge
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from tests.verify.corpus import benign
from tests.verify.corpus.pairs import full, normal, sequential_sum

PLAIN = Options(sweeps=False, power=False, repeats=1)


def _truncated_sum(x: torch.Tensor) -> torch.Tensor:
    """Every addition rounded toward zero: errors of one sign."""
    total = torch.zeros(x.shape[:-1])
    for part in x.unbind(-1):
        wide = total.double() + part.double()
        near = wide.float()
        total = torch.where(near.double().abs() > wide.abs(), near.nextafter(torch.zeros_like(near)), near)
    return total


def _spec(target: Callable[..., Any]) -> KernelSpec:
    return KernelSpec(
        name="row_sum",
        reference=lambda x: x.abs().sum(-1),
        target=lambda x: target(x.abs()),
        sample=normal(full),
        inputs=("x",),
        outputs=("y",),
        kind="reduction",
        shapes=((8, 256),),
        dtypes=("float32",),
    )


def test_the_exponent_and_its_interval() -> None:
    lengths = [n for n in LENGTHS for _ in range(2)]
    wobble = [1.1, 0.9] * len(LENGTHS)
    noise = fit(lengths, [n**0.5 * w for n, w in zip(lengths, wobble, strict=True)])
    assert noise is not None and noise.low < 0.5 < noise.high and noise.high - noise.low < 0.2
    exact = fit(lengths, [float(n) for n in lengths])
    assert exact is not None and exact.low == pytest.approx(1.0) and exact.high == pytest.approx(1.0)
    assert fit([32, 32, 32], [1.0, 2.0, 3.0]) is None
    assert fit([32, 64, 128], [0.0, 0.0, 1.0]) is None


def test_legal_orders_grow_like_noise_and_truncation_like_a_bias() -> None:
    def growth(target: Callable[..., Any]) -> Any:
        spec = _spec(target)
        case = plan_cases(spec, options=PLAIN)[0]
        found = measure_growth(spec, case, "y", seed=0, device="cpu")
        assert found is not None
        return found

    legal = growth(lambda x: sequential_sum(x, -1))
    assert not legal.biased and legal.target.low < 0.75
    biased = growth(_truncated_sum)
    assert biased.biased and biased.target.low > 0.75 and biased.reference.high < 0.75
    assert biased.lengths == LENGTHS and biased.target.points == SEEDS * len(LENGTHS)


def test_windows_of_a_captured_call_serve_as_lengths() -> None:
    spec = _spec(lambda x: sequential_sum(x, -1))
    case = replace(plan_cases(spec, options=PLAIN)[0], family="captured")
    found = measure_growth(spec, case, "y", seed=0, device="cpu")
    assert found is not None and found.lengths == (32, 64, 128, 256)


def test_the_analysis_stands_in_the_verdict_where_the_gate_is_not_valid() -> None:
    spec = benign.cancelling()
    found = judge(spec, plan_cases(spec, options=PLAIN), options=PLAIN)
    y = next(t for t in found.tensors if t.tensor == "y" and not t.gate_valid)
    assert y.growth is not None and not y.growth.biased and "95 %" in y.growth.statistic
    assert "grows like n^p" in y.reason
    assert y.target_spread is not None and y.target_spread.largest == pytest.approx(y.target_error)
    assert all(t.growth is None for t in found.tensors if t.gate_valid)


def test_the_distribution_of_errors() -> None:
    spread = spread_of(
        torch.tensor([1.0, 2.0, 5.0, float("nan")]), torch.tensor([1.0, 1.0, 1.0, 1.0]).double()
    )
    assert spread is not None
    assert (spread.median, spread.largest, spread.mean) == (1.0, 4.0, pytest.approx(5 / 3))
    assert spread_of(torch.tensor([float("nan")]), torch.ones(1).double()) is None
