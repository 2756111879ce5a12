"""Replay fidelity: does the target, run again on the captured inputs, give what the run recorded?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from bridge.verify.case import Case
from bridge.verify.execute import run
from bridge.verify.raised import broke_gpu
from bridge.verify.spec import KernelSpec
from bridge.verify.verdict import Fidelity

#: Further runs that measure the target's own spread, when the first does not give the recorded bits.
_REPLAYS = 2

Status = Literal["bit-equal", "within spread", "differs"]
_ORDER: tuple[Status, ...] = ("bit-equal", "within spread", "differs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One captured case against its record."""

    case: str
    status: Status
    detail: str


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and values; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| in FP64 over elements that are finite in both; inf where only one is."""
    if a.shape != b.shape:
        return float("inf")
    x, y = a.detach().double().cpu(), b.detach().double().cpu()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return float("inf")
    gap = (x - y)[x.isfinite()].abs()
    return float(gap.max()) if gap.numel() else 0.0


def replay(spec: KernelSpec, case: Case) -> Replayed | None:
    """Run the target again on one captured case; None where there is nothing to compare.

    That is: the run recorded no result, or the target gives none, which judging has told.
    """
    recorded = _recorded(case)
    if not recorded:
        return None
    try:
        first = _results(spec, case, reference=False)
    except Exception as error:
        if broke_gpu(error):
            raise
        return None
    if not first:
        return None
    unequal = [name for name, tensor in recorded.items() if not same_bits(first[name], tensor)]
    if not unequal:
        return Replayed(case=case.name, status="bit-equal", detail=f"{', '.join(recorded)} bit-equal")
    again = [_results(spec, case, reference=False) for _ in range(_REPLAYS)]
    beyond: list[str] = []
    worst = ""
    for name in unequal:
        spread = max(distance(first[name], other[name]) for other in again)
        gap = distance(first[name], recorded[name])
        text = f"{name} differs from the record by {gap:.3g}, between {1 + _REPLAYS} replays by {spread:.3g}"
        worst = worst or text
        if gap > spread:
            beyond.append(text)
    if not beyond:
        return Replayed(case=case.name, status="within spread", detail=worst)
    return Replayed(case=case.name, status="differs", detail=_explained(spec, case, recorded, beyond[0]))


def _explained(spec: KernelSpec, case: Case, recorded: Mapping[str, torch.Tensor], text: str) -> str:
    """Add what the run did instead, where that can be told."""
    eager = _results(spec, case, reference=True)
    if all(same_bits(eager[name], tensor) for name, tensor in recorded.items()):
        return (
            f"{text}; the record equals the eager reference bit for bit: this run did not use the kernel here"
        )
    return text


def _recorded(case: Case) -> dict[str, torch.Tensor]:
    if case.recorded is None:
        return {}
    grads = {f"grad_{name}": tensor for name, tensor in case.recorded.grads.items()}
    return {**case.recorded.outputs, **grads}


def _results(spec: KernelSpec, case: Case, *, reference: bool) -> dict[str, torch.Tensor]:
    """Every result by name; {} where the callable returned something else, which the judge has told."""
    result = run(spec.reference if reference else spec.target, spec, case)
    if isinstance(result, str):
        return {}
    empty = torch.empty(0)
    return {name: empty if tensor is None else tensor for name, tensor in result.named().items()}


def summarise(
    replayed: Sequence[Replayed],
    *,
    captured: int,
    captured_on: str,
    here: str,
    kernels: Sequence[str],
    recorded: bool,
) -> Fidelity:
    """One Fidelity for all captured cases: the worst of them, with its numbers.

    Args:
        captured: how many captured calls were judged.
        captured_on: device of the run; here: device of the replay.
        kernels: what the target was seen to launch.
        recorded: the captured outputs themselves were judged.
    """
    launched = bool(kernels)
    if recorded:
        return Fidelity(
            status="recorded",
            detail="judged as the run recorded them; the kernel was not run",
            launched=launched,
            kernels=tuple(kernels),
        )
    if not replayed:
        detail = (
            "the run recorded nothing that the kernel's own outputs could be compared with"
            if captured
            else ""
        )
        return Fidelity(detail=detail, launched=launched, kernels=tuple(kernels))
    worst = max(replayed, key=lambda item: _ORDER.index(item.status))
    equal = sum(item.status == "bit-equal" for item in replayed)
    detail = f"{equal} of {len(replayed)} captured calls reproduced bit for bit"
    if worst.status != "bit-equal":
        detail += f"; {worst.case}: {worst.detail}"
        if captured_on and captured_on != here:
            detail += f"; captured on {captured_on}, replayed on {here}"
    return Fidelity(status=worst.status, detail=detail, launched=launched, kernels=tuple(kernels))
