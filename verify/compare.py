"""One tensor of one case: structure, gate, companions, and the verdict they add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from bridge.verify.companions import NOISE_FACTOR, Compared, noise_budget, statistics
from bridge.verify.envelope import Envelope
from bridge.verify.gate import Gate, measure
from bridge.verify.local import error_map, line_gates, tile_gate, worst_elements
from bridge.verify.structure import Mismatch, first_mismatch, meta_mismatch, name_of
from bridge.verify.ulp import histogram, round_to
from bridge.verify.verdict import Companion, Constants, Outcome, TensorVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Trio:
    """Golden (FP64), reference and target (own dtype) of one tensor; None where a gradient is missing."""

    golden: torch.Tensor | None
    reference: torch.Tensor | None
    target: torch.Tensor | None


def judge_tensor(
    name: str,
    case: str,
    trio: Trio,
    *,
    constants: Constants,
    envelope: Envelope | None,
    elementwise: bool,
    nonfinite_inputs: bool = False,
    unstable: torch.Tensor | None = None,
    undefined: torch.Tensor | None = None,
    fault: str | None = None,
    exact: bool = False,
    demand_inf: bool = False,
    tiles: tuple[int, ...] = (),
    brief: bool = False,
) -> TensorVerdict:
    """Judge one tensor.

    Args:
        name: as in the verdict table; `grad_x` for a gradient.
        case: name of the case.
        constants: of the gate, declared before the target ran.
        envelope: legal noise; None leaves the reference's own error as the only measure.
        elementwise: apply the ULP rule for elementwise kernels.
        nonfinite_inputs: the inputs hold NaN or Inf on purpose.
        unstable: elements where golden itself jumps under a tiny move of the inputs (ties).
        undefined: elements in rows whose inputs hold NaN; kernels that drop a NaN are free there.
        fault: a misdeed seen while the target ran; it fails the tensor whatever the numbers.
        exact: no legal implementation can differ from golden in any bit on these inputs.
        demand_inf: golden's infinities must not become finite even if the inputs hold NaN or Inf.
        tiles: extents seen in the kernel's launches.
        brief: leave out histogram, map and worst elements.
    """
    reference, target, golden = trio.reference, trio.target, trio.golden
    if reference is None or golden is None:
        wrong = target is not None and bool((target != 0).any())
        text = "gradient is not zero where the reference has none" if wrong else None
        dtype, shape = (name_of(target.dtype), tuple(target.shape)) if target is not None else ("", ())
        return TensorVerdict(
            tensor=name,
            case=case,
            verdict="FAIL" if wrong else "PASS",
            dtype=dtype,
            shape=shape,
            structure=text,
        )
    mismatch = (
        "no gradient where the reference has one" if target is None else meta_mismatch(target, reference)
    )
    if mismatch is not None or target is None:
        return TensorVerdict(
            tensor=name,
            case=case,
            verdict="FAIL",
            dtype=name_of(reference.dtype),
            shape=tuple(reference.shape),
            structure=mismatch,
            reason=fault or f"structure: {mismatch}",
        )
    if not reference.dtype.is_floating_point:
        return _discrete(name, case, golden, reference, target, fault, unstable)
    wide = Compared(
        golden=golden.to(torch.float64),
        reference=reference.to(torch.float64),
        target=target.to(torch.float64),
        keep=torch.ones_like(target, dtype=torch.bool),
        dtype=reference.dtype,
        envelope=envelope,
        elementwise=elementwise,
    )
    free = undefined if unstable is None else (unstable if undefined is None else unstable | undefined)
    mismatch_of_kinds = settle_finite(wide, nonfinite_inputs, free, demand_inf)
    structure = None if mismatch_of_kinds is None else mismatch_of_kinds.told(target.numel())
    gate = measure(
        wide.golden, wide.reference, wide.target, dtype=wide.dtype, constants=constants, keep=wide.keep
    )
    companions = _companions(wide, constants, tiles)
    if exact and bool((wide.reference == wide.golden).all()):
        companions["exact integers"] = _bit_for_bit(wide)
    found = weigh_tensor(
        name,
        case,
        gate,
        companions,
        dtype=reference.dtype,
        shape=reference.shape,
        structure=structure,
        fault=fault,
    )
    if brief:
        return found
    return msgspec.structs.replace(
        found,
        histogram=histogram(*wide.compared(), wide.dtype),
        error_map=error_map(wide, gate.threshold),
        worst=worst_elements(wide),
    )


def weigh_tensor(
    name: str,
    case: str,
    gate: Gate,
    companions: dict[str, Companion],
    *,
    dtype: torch.dtype,
    shape: Sequence[int],
    structure: str | None,
    fault: str | None,
) -> TensorVerdict:
    """What gate and companions come to, without the pictures.

    Args:
        dtype, shape: of the tensor, as the reference has them.
        structure: the difference in structure, in words.
        fault: a misdeed that no number excuses.
    """
    verdict, reason, companions = decide(gate, companions, structure, fault)
    return TensorVerdict(
        tensor=name,
        case=case,
        verdict=verdict,
        dtype=name_of(dtype),
        shape=tuple(shape),
        reason=reason,
        reference_error=number(gate.reference_error),
        target_error=number(gate.target_error),
        rounding_floor=number(gate.rounding_floor),
        threshold=number(gate.threshold),
        reference_relative_error=number(gate.reference_relative_error),
        gate_valid=gate.valid,
        structure=structure,
        companions=companions,
    )


def settle_finite(
    data: Compared, nonfinite_inputs: bool, unstable: torch.Tensor | None, demand_inf: bool
) -> Mismatch | None:
    """Set which elements can be compared; return the structural mismatch among non-finite ones."""
    expected = round_to(data.golden, data.dtype)
    jumpy = torch.zeros_like(data.keep) if unstable is None else unstable
    if data.envelope is not None:
        # Noise that reaches an overflow says that the reference may overflow: nothing is demanded there.
        within = data.golden.abs() + NOISE_FACTOR * data.envelope.rms <= torch.finfo(data.dtype).max
        jumpy = jumpy | (~within & torch.isfinite(expected))
    structure, _ = first_mismatch(
        torch.where(jumpy, expected, data.target),
        expected,
        data.reference,
        forgive_dropped_nan=nonfinite_inputs,
        demand_inf=demand_inf,
    )
    data.keep = (
        torch.isfinite(data.golden)
        & torch.isfinite(expected)
        & torch.isfinite(data.reference)
        & torch.isfinite(data.target)
        & ~jumpy
    )
    if bool(data.keep.all()):
        return structure  # nothing to set aside, and no copies of it all
    zero = torch.zeros((), dtype=torch.float64, device=data.golden.device)
    data.golden = torch.where(torch.isfinite(data.golden), data.golden, zero)
    if data.envelope is not None:
        data.envelope = Envelope(
            rms=torch.where(data.keep, data.envelope.rms, zero), draws=data.envelope.draws
        )
    data.reference = torch.where(data.keep, data.reference, data.golden)
    return structure


def _bit_for_bit(data: Compared) -> Companion:
    """How many elements differ from golden where every intermediate value is exactly representable."""
    wrong = data.target != data.golden
    count = int(wrong.sum())
    where = tuple(int(i) for i in wrong.nonzero()[0].tolist()) if count else ()
    return Companion(
        value=float(count),
        limit=0.0,
        passed=count == 0,
        detail=f"{count} of {wrong.numel()} elements differ, first at {where}" if count else "",
        note="integers on which every legal order and accumulator gives the same bits",
    )


def _companions(data: Compared, constants: Constants, tiles: tuple[int, ...]) -> dict[str, Companion]:
    found = {"noise budget": noise_budget(data)}
    found |= line_gates(data, constants)
    found |= tile_gate(data, constants, tiles)
    found |= statistics(data)
    return found


def decide(
    gate: Gate, companions: dict[str, Companion], structure: str | None, fault: str | None
) -> tuple[Outcome, str, dict[str, Companion]]:
    """Verdict, the reason for it, and the companions with a note where one of them decided."""
    budget = companions["noise budget"]
    if fault is not None:
        return "FAIL", fault, companions
    if structure is not None:
        return "FAIL", f"structure: {structure}", companions
    failed = [name for name, check in companions.items() if not check.passed]
    if not gate.valid:
        return _without_gate(gate, budget, failed, companions)
    if failed:
        text = ", ".join(f"{name} {_short(companions[name])}" for name in failed)
        return "FAIL", f"{'gate and ' if not gate.passes else ''}{text}", companions
    if not gate.passes:
        note = (
            f"the gate alone is over ({gate.ratio:.2f} of its threshold): the reference's one draw is lucky; "
            f"every element is within the legal noise budget ({budget.value:.2f} of 1), which decides"
        )
        return "PASS", note, companions | {"noise budget": _noted(budget, note)}
    return "PASS", f"error is {gate.ratio:.2f} of the threshold", companions


def _without_gate(
    gate: Gate, budget: Companion, failed: list[str], companions: dict[str, Companion]
) -> tuple[Outcome, str, dict[str, Companion]]:
    lead = f"gate not valid (reference {gate.reference_relative_error:.0%} off golden)"
    value = float("inf") if budget.value is None else budget.value
    if not failed:
        return (
            "PASS WITH LIMITATIONS",
            f"{lead}; target within the same noise envelope ({value:.2f} of 1)",
            companions,
        )
    if value > 4.0:
        return "FAIL", f"{lead}; target {value:.3g} times outside the legal noise envelope", companions
    return (
        "INCONCLUSIVE",
        f"{lead}; target near the edge of the noise envelope ({', '.join(failed)})",
        companions,
    )


def _noted(check: Companion, note: str) -> Companion:
    return Companion(
        value=check.value, limit=check.limit, passed=check.passed, detail=check.detail, note=note
    )


def _short(check: Companion) -> str:
    value = "not finite" if check.value is None else f"{check.value:.3g}"
    return f"{value} > {check.limit:.3g}" + (f" ({check.detail})" if check.detail else "")


def _discrete(
    name: str,
    case: str,
    golden: torch.Tensor,
    reference: torch.Tensor,
    target: torch.Tensor,
    fault: str | None,
    unstable: torch.Tensor | None,
) -> TensorVerdict:
    """Integer and boolean outputs: equal to golden or the reference, element by element, but for ties."""
    wrong, off = differing(golden, reference, target, unstable)
    return discrete_verdict(
        name, case, dtype=reference.dtype, shape=tuple(reference.shape), wrong=wrong, off=off, fault=fault
    )


def differing(
    golden: torch.Tensor, reference: torch.Tensor, target: torch.Tensor, unstable: torch.Tensor | None
) -> tuple[int, int]:
    """How many discrete elements equal neither golden nor the reference, and how many of these two differ."""
    wrong = (target != reference) & (target.to(torch.float64) != golden.to(torch.float64))
    if unstable is not None:
        wrong &= ~unstable
    return int(wrong.sum()), int((reference != golden).sum())


def discrete_verdict(
    name: str,
    case: str,
    *,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    wrong: int,
    off: int,
    fault: str | None,
) -> TensorVerdict:
    """The verdict on a discrete tensor from the counts of `differing`."""
    total = math.prod(shape)
    text = f"{wrong} of {total} discrete elements equal neither golden nor the reference" if wrong else None
    reason = fault or text or "equal to golden or the reference everywhere"
    return TensorVerdict(
        tensor=name,
        case=case,
        verdict="FAIL" if fault or wrong else "PASS",
        dtype=name_of(dtype),
        shape=shape,
        reason=reason,
        structure=text,
        gate_valid=True,
        reference_error=float(off),
        target_error=float(wrong),
        rounding_floor=0.0,
        threshold=0.0,
        reference_relative_error=0.0,
    )


def number(value: float) -> float | None:
    """A value that JSON can hold."""
    return value if value == value and abs(value) != float("inf") else None
