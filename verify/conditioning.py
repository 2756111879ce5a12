"""When the gate is not valid: how ill-conditioned the worst element is, and how two legal orders differ."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from bridge.verify.case import Case
from bridge.verify.golden import widen
from bridge.verify.spec import KernelSpec


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
