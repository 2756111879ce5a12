"""When the gate is not valid: how ill-conditioned the worst element is, and how two legal orders differ."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch

from bridge.verify.case import Case
from bridge.verify.golden import widen
from bridge.verify.growth import in_words, measure_growth, spread_of
from bridge.verify.options import Options
from bridge.verify.plan import OWN_FAMILIES
from bridge.verify.spec import KernelSpec
from bridge.verify.verdict import Outcome, TensorVerdict


def terms_of(spec: KernelSpec, case: Case, tensor: str) -> torch.Tensor | None:
    """FP64 terms whose sum over the last axis is `tensor`, as the spec declares them."""
    if spec.per_term is None:
        return None
    given = spec.per_term(*widen(case.inputs), **case.attrs)
    if isinstance(given, Mapping):
        found = given.get(tensor)
        return found if isinstance(found, torch.Tensor) else None
    return given if tensor == spec.outputs[0] else None


def condition_of(terms: torch.Tensor, element: tuple[int, ...]) -> float:
    """sum|t| / |sum t| of one output element; Inf when the terms cancel exactly."""
    row = terms[element].reshape(-1)
    total = abs(math.fsum(row.tolist()))
    return float(row.abs().sum()) / total if total > 0 else float("inf")


def two_orders(terms: torch.Tensor, element: tuple[int, ...]) -> tuple[float, float]:
    """The element summed in FP32, front to back and back to front, one term after the other."""
    row = terms[element].reshape(-1).to(torch.float32)
    return _sequential(row), _sequential(row.flip(0))


def _sequential(row: torch.Tensor) -> float:
    total = torch.zeros((), dtype=torch.float32, device=row.device)
    for term in row[: 1 << 16]:
        total = total + term
    return float(total)


def analysed(
    spec: KernelSpec,
    case: Case,
    verdict: TensorVerdict,
    results: tuple[Mapping[str, torch.Tensor | None], ...],
    *,
    options: Options,
    device: str,
) -> TensorVerdict:
    """A verdict without a valid gate, with what the conditioning says; any other as it is.

    Added are the condition number of the worst element and two FP32 orders of it, the distributions of both
    errors, and on declared and captured cases how they grow with the length: a target whose error grows like
    a bias where the reference's grows like noise fails.

    Args:
        results: all results of golden, reference and target, by tensor.
        device: where the target runs.
    """
    golden, reference, target = (named.get(verdict.tensor) for named in results)
    if verdict.gate_valid or verdict.structure is not None:
        return verdict
    verdict = _conditioned(spec, case, verdict)
    if golden is None or verdict.verdict == "FAIL":
        return verdict
    if reference is None or target is None or not reference.is_floating_point():
        return verdict
    verdict = msgspec.structs.replace(
        verdict,
        reference_spread=spread_of(reference, golden),
        target_spread=spread_of(target, golden),
    )
    if case.family not in OWN_FAMILIES or options.recorded:
        return verdict
    growth = measure_growth(spec, case, verdict.tensor, seed=options.seed, device=device)
    if growth is None:
        return verdict
    reason = f"{verdict.reason}; {in_words(growth)}"
    outcome: Outcome = "FAIL" if growth.biased else verdict.verdict
    return msgspec.structs.replace(verdict, growth=growth, reason=reason, verdict=outcome)


def _conditioned(spec: KernelSpec, case: Case, verdict: TensorVerdict) -> TensorVerdict:
    """Add the condition number of the worst element, and two FP32 orders, where the gate is not valid."""
    if not verdict.worst:
        return verdict
    terms = terms_of(spec, case, verdict.tensor)
    if terms is None:
        return verdict
    element = verdict.worst[0].index
    condition = condition_of(terms, element)
    forward, backward = two_orders(terms, element)
    text = (
        f"; condition number {condition:.3g}, two FP32 orders of the worst element give {forward:.6g} "
        f"and {backward:.6g}"
    )
    return msgspec.structs.replace(
        verdict, condition=condition if condition < float("inf") else None, reason=verdict.reason + text
    )
