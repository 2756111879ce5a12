"""Judge the output of one operator against its FP64 re-computation. Needs torch.

Where the op is linear in its inputs, the legal error is known without any reference: the same op on
magnitudes gives sum|t| and on squares sqrt(sum t^2), and FP32 accumulation in blocks stays within a few
roundings of those. Elsewhere the eager op in the same dtype is the yardstick, as in `bridge verify`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bridge.capture.record import Call
from bridge.errors import KernelError
from bridge.verify import floors
from bridge.verify.columns import short_op
from bridge.verify.rerun import rerun_wide
from bridge.verify.ulp import round_to, ulp_of
from bridge.verify.verdict import Constants, Outcome

#: Ops whose every output element is a sum of terms that the same op on |inputs| sums by magnitude.
_LINEAR = frozenset(
    "mm bmm addmm baddbmm dot mv sum mean cumsum embedding_dense_backward index_add scatter_add".split()
)
#: Of those, the ones with two factors, of which squares give sqrt(sum t^2).
_PRODUCTS = frozenset("mm bmm dot mv".split())
_BLOCK = 64.0  #: terms that any real kernel sums before it adds to a running total
ORDER = floors.ORDER_FACTOR
HAVE_ULP = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGate:
    """The numbers of one output. `ratio` is the worst error over its threshold; above 1 fails."""

    tensor: str
    verdict: Outcome
    ratio: float
    target_error: float
    reference_error: float
    threshold: float
    reference_relative_error: float
    reason: str = ""
    cause: str = ""
    where: tuple[int, ...] = ()


def judge_output(
    call: Call,
    inputs: Mapping[str, torch.Tensor],
    name: str,
    *,
    golden: torch.Tensor,
    reference: torch.Tensor | None,
    target: torch.Tensor,
    place: int = 0,
    constants: Constants | None = None,
    budget: torch.Tensor | None = None,
) -> OpGate:
    """Judge `target` (in its own dtype) against `golden` (FP64) and the eager `reference`.

    Args:
        call: the call, for its op and arguments.
        inputs: what it read, by path, unwidened.
        name: output's name.
        place: which output it is.
        budget: legal error per element beyond the last rounding; left out, made from the op.
    """
    constants = constants or Constants()
    if target.shape != golden.shape:
        return _plain(
            name, "FAIL", f"shape is {tuple(target.shape)}, FP64 gives {tuple(golden.shape)}", "wrong result"
        )
    if not (target.is_floating_point() or target.is_complex()):
        same = reference is None or bool(torch.equal(target, reference))
        return _plain(
            name,
            "PASS" if same else "FAIL",
            "" if same else "integers differ",
            "" if same else "wrong result",
        )
    if target.is_complex():
        golden, target = (
            torch.view_as_real(golden.to(torch.complex128)),
            torch.view_as_real(target.resolve_conj()),
        )
        reference = None if reference is None else torch.view_as_real(reference.resolve_conj())
        budget = None
    dtype = target.dtype
    expected = round_to(golden, dtype) if dtype in HAVE_ULP else golden
    broken = _structure(name, golden, expected, target, dtype)
    if broken is not None:
        return broken
    keep = golden.isfinite() & target.isfinite() & expected.isfinite()
    if not bool(keep.any()):
        return _plain(name, "PASS", "", "")
    error = torch.where(keep, (target.double() - golden).abs(), 0.0)
    floor = torch.where(keep, (expected - golden).abs(), 0.0)
    if dtype in HAVE_ULP:
        floor = torch.maximum(floor, ulp_of(torch.where(keep, golden, 0.0), dtype) / 2)
    linear = short_op(call.op) in _LINEAR
    if budget is None:
        budget = _budget(call, inputs, golden, target, place)
    reference_error = 0.0
    if reference is not None:
        reference_error = float(torch.where(keep, (reference.double() - golden).abs(), 0.0).max())
    scale = float(golden[keep].abs().max())
    relative = reference_error / max(scale, float(floor.max()), 1e-300)
    allowed = floor * (2.0 if linear else 1.0) + budget
    if not linear:
        allowed = allowed + constants.fudge_factor * reference_error
    allowed = allowed.clamp_min(1e-300)
    ratio_map = torch.where(error > 0, error / allowed, 0.0)
    ratio = float(ratio_map.max())
    at = int(ratio_map.reshape(-1).argmax())
    where = (
        tuple(int(i) for i in torch.unravel_index(torch.tensor(at), ratio_map.shape))
        if ratio_map.dim()
        else ()
    )
    verdict: Outcome = "PASS" if ratio <= 1 else "FAIL"
    reason, cause = "", ""
    if not linear and relative > constants.max_reference_relative_error:
        verdict = "INCONCLUSIVE"
        reason = f"the eager reference itself is {relative:.0%} off FP64: too ill-conditioned to judge"
    elif verdict == "FAIL":
        cause = _cause(call, inputs, golden, target, place) if linear else "wrong result"
        worst, limit = float(error.reshape(-1)[at]), float(allowed.reshape(-1)[at])
        reason = f"error {worst:.3g} at {where}, legal is {limit:.3g}"
    return OpGate(
        tensor=name,
        verdict=verdict,
        ratio=ratio if math.isfinite(ratio) else math.inf,
        target_error=float(error.max()),
        reference_error=reference_error,
        threshold=float(allowed.max()),
        reference_relative_error=relative,
        reason=reason,
        cause=cause,
        where=where,
    )


def _plain(name: str, verdict: Outcome, reason: str, cause: str) -> OpGate:
    return OpGate(
        tensor=name,
        verdict=verdict,
        ratio=0.0 if verdict == "PASS" else math.inf,
        target_error=0.0 if verdict == "PASS" else math.inf,
        reference_error=0.0,
        threshold=0.0,
        reference_relative_error=0.0,
        reason=reason,
        cause=cause,
    )


def _structure(
    name: str, golden: torch.Tensor, expected: torch.Tensor, target: torch.Tensor, dtype: torch.dtype
) -> OpGate | None:
    lost = golden.isfinite() & ~target.isfinite()
    if bool(lost.any()):
        where = tuple(int(i) for i in lost.nonzero()[0].tolist())
        exact = float(golden[where]) if where else float(golden)
        if not bool(expected[where].isfinite() if where else expected.isfinite()):
            said = str(dtype).removeprefix("torch.")
            return _plain(
                name, "FAIL", f"overflow at {where}: the exact {exact:.4g} does not fit {said}", "overflow"
            )
        return _plain(name, "FAIL", f"not finite at {where}, where FP64 gives {exact:.4g}", "wrong result")
    kept = golden.isnan() & ~target.isnan()
    if bool(kept.any()):
        where = tuple(int(i) for i in kept.nonzero()[0].tolist())
        return _plain(name, "FAIL", f"finite at {where}, where FP64 gives NaN", "wrong result")
    return None


def _budget(
    call: Call, inputs: Mapping[str, torch.Tensor], golden: torch.Tensor, target: torch.Tensor, place: int
) -> torch.Tensor:
    """Legal error per element beyond the last rounding."""
    unit = floors.EPS["float64"] / 2 if target.dtype == torch.float64 else floors.EPS["float32"] / 2
    name = short_op(call.op)
    magnitude = golden.abs().where(golden.isfinite(), 0.0)
    largest = max((tensor.numel() for tensor in inputs.values()), default=1)
    terms = max(1.0, largest / max(golden.numel(), 1))
    if name in ("mm", "bmm", "addmm", "baddbmm", "dot", "mv"):
        factors = list(inputs.values())[-2:]
        terms = float(factors[0].shape[-1]) if factors[0].dim() else 1.0
    if name in _LINEAR:
        try:
            total = rerun_wide(call, {path: _abs(t) for path, t in inputs.items()})[place].abs()
            spread = total
            if name in _PRODUCTS:
                spread = (
                    rerun_wide(call, {path: _square(t) for path, t in inputs.items()})[place].abs().sqrt()
                )
        except KernelError:
            return magnitude * ORDER * math.sqrt(terms) * unit
        return ORDER * unit * (math.sqrt(terms) * spread + math.sqrt(terms / _BLOCK + 1) * total)
    if floors.op_class(call.op, call.kind) == floors.ELEMENTWISE:
        # The inputs of a difference may be far larger than it is; their rounding is not the op's.
        return magnitude * floors.COMPUTE_ULPS * 2 * unit
    whole = float(magnitude.max()) if magnitude.numel() else 0.0
    return magnitude * floors.COMPUTE_ULPS * 2 * unit + whole * ORDER * math.sqrt(terms) * unit


def _abs(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs() if tensor.is_floating_point() else tensor


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().square() if tensor.is_floating_point() else tensor


def _cause(
    call: Call, inputs: Mapping[str, torch.Tensor], golden: torch.Tensor, target: torch.Tensor, place: int
) -> str:
    """Which lower precision of the factors explains the error, if one does."""
    error = float((target.double() - golden).abs().max())
    for cause, bits in (("TF32", 10), ("bfloat16 factors", 7)):
        lowered = {path: _rounded(tensor, bits) for path, tensor in inputs.items()}
        if _explained(call, lowered, place, target, golden, error):
            return cause
    terms = max(1.0, max(tensor.numel() for tensor in inputs.values()) / max(golden.numel(), 1))
    spacing = ulp_of(golden.abs().clamp_min(1e-300), target.dtype) if target.dtype in HAVE_ULP else None
    if spacing is not None and target.dtype in (torch.bfloat16, torch.float16):
        off = float(((target.double() - golden).abs() / spacing).median())
        if off < 4 * math.sqrt(terms):
            return "reduced-precision accumulation"
    return "wrong result"


def _explained(
    call: Call,
    inputs: Mapping[str, torch.Tensor],
    place: int,
    target: torch.Tensor,
    golden: torch.Tensor,
    error: float,
) -> bool:
    """Whether these inputs give the target far better than the right ones do."""
    try:
        variant = rerun_wide(call, inputs)[place]
    except KernelError:
        return False
    return float((target.double() - variant).abs().max()) < 0.25 * error


def _rounded(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """FP32 values rounded to `bits` of fraction, ties away (as tensor cores' TF32 conversion does)."""
    if tensor.dtype != torch.float32:
        return tensor
    drop = 23 - bits
    raw = tensor.contiguous().view(torch.int32)
    return ((raw + (1 << (drop - 1))) & ~((1 << drop) - 1)).view(torch.float32)
