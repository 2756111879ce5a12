"""Judge a verdict again: its stored errors under other constants, or the whole bundle anew.

Neither needs the machine that made the verdict. From stored errors no tensor is needed and torch is not
loaded; a new run needs the capture and the kernel, and says what is no longer the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bridge.errors import UsageError
from bridge.verify.kernelfile import split_source
from bridge.verify.request import ConstantChoice, Event, Request
from bridge.verify.verdict import (
    Constants,
    Outcome,
    TensorVerdict,
    Verdict,
    worst_outcome,
)

#: Companions that are the gate itself on parts of the tensor: their stored values carry the old constants.
_GATE_LIKE = ("row gate", "column gate", "tile gate")


def rejudge(verdict: Verdict, choice: ConstantChoice) -> Verdict:
    """Apply other constants to the stored errors of every tensor.

    Companions keep their stored values; those that are the gate of a row, column or tile were measured
    against the old constants, and say so.

    Raises:
        UsageError: the constants could not judge anything, or the document contradicts itself.
    """
    choice.check()
    contradictions = audit(verdict)
    if contradictions:
        raise UsageError(
            f"the verdict does not follow from its own numbers: {contradictions[0]}; judge again"
        )
    constants = choice.over(verdict.constants)
    if constants == verdict.constants:
        return verdict
    tensors = tuple(_rejudge(entry, verdict.constants, constants) for entry in verdict.tensors)
    outcome = _overall(verdict, tensors)
    changed = [
        entry for entry, old in zip(tensors, verdict.tensors, strict=True) if entry.verdict != old.verdict
    ]
    told = ", ".join(
        f"{name} {getattr(verdict.constants, name):g} -> {getattr(constants, name):g}"
        for name in Constants.__struct_fields__
        if getattr(verdict.constants, name) != getattr(constants, name)
    )
    summary = (
        f"{outcome} under re-declared constants ({told}), {verdict.verdict} under those declared before the "
        f"run; {len(changed)} of {len(tensors)} tensor verdicts changed"
    )
    return msgspec.structs.replace(
        verdict,
        verdict=outcome,
        summary=summary,
        constants=constants,
        tensors=tensors,
        cases=tuple(
            msgspec.structs.replace(
                record,
                verdict=worst_outcome(
                    [e.verdict for e in tensors if e.case == record.name] or [record.verdict]
                ),
            )
            for record in verdict.cases
        ),
    )


def audit(verdict: Verdict) -> tuple[str, ...]:
    """Where the stored verdict does not follow from the stored numbers, in words; () for a whole document."""
    found: list[str] = []
    constants = verdict.constants
    for entry in verdict.tensors:
        where = f"{entry.tensor} of {entry.case}"
        if entry.verdict == "PASS" and entry.structure is not None:
            found.append(f"{where} passes although its structure differs")
        if entry.verdict == "PASS" and any(not check.passed for check in entry.companions.values()):
            found.append(f"{where} passes although a companion check failed")
        if entry.threshold is None or entry.reference_error is None or entry.rounding_floor is None:
            continue
        floor = max(constants.project_atol, entry.rounding_floor)
        threshold = constants.fudge_factor * entry.reference_error + floor
        if not math.isclose(threshold, entry.threshold, rel_tol=1e-9, abs_tol=0.0):
            found.append(
                f"the threshold of {where} is {entry.threshold:.9g}, its errors give {threshold:.9g}"
            )
    worst = worst_outcome([entry.verdict for entry in verdict.tensors] or [verdict.verdict])
    if worst == "FAIL" and verdict.verdict != "FAIL":
        found.append(f"the verdict is {verdict.verdict} although a tensor fails")
    return tuple(found)


def _rejudge(entry: TensorVerdict, old: Constants, new: Constants) -> TensorVerdict:
    numbers = (
        entry.reference_error,
        entry.target_error,
        entry.rounding_floor,
        entry.reference_relative_error,
    )
    if entry.structure is not None or any(number is None for number in numbers):
        return entry
    reference, target, floor, relative = (float(number or 0.0) for number in numbers)
    floor_old, floor_new = max(old.project_atol, floor), max(new.project_atol, floor)
    # The relative error is over max(max|golden|, absolute floor); only the floor's part can change.
    scale = reference / relative if relative > 0 else 0.0
    if scale > 0 and floor_new > floor_old and floor_new > scale:
        relative = reference / floor_new
    valid = relative <= new.max_reference_relative_error
    threshold = new.fudge_factor * reference + floor_new
    verdict, reason = _decide(entry, passes=target <= threshold, valid=valid, ratio=_ratio(target, threshold))
    return msgspec.structs.replace(
        entry,
        threshold=threshold,
        reference_relative_error=relative,
        gate_valid=valid,
        verdict=verdict,
        reason=reason,
    )


def _ratio(error: float, threshold: float) -> float:
    if error == 0:
        return 0.0
    return error / threshold if threshold > 0 else float("inf")


def _decide(entry: TensorVerdict, *, passes: bool, valid: bool, ratio: float) -> tuple[Outcome, str]:
    did_pass = (
        entry.target_error is not None
        and entry.threshold is not None
        and entry.target_error <= entry.threshold
    )
    if (passes, valid) == (did_pass, entry.gate_valid):
        return entry.verdict, entry.reason
    failed = [name for name, check in entry.companions.items() if not check.passed]
    if entry.verdict == "FAIL" and (failed or did_pass):
        told = [
            f"{name}, measured against the old constants" if name in _GATE_LIKE else name for name in failed
        ]
        return "FAIL", f"still fails: {', '.join(told) or entry.reason}"
    if not valid:
        return (
            "INCONCLUSIVE",
            "the gate is not valid under these constants; run it again for the conditioning analysis",
        )
    if not passes:
        return "FAIL", f"error is {ratio:.2f} of the re-declared threshold"
    return "PASS", f"error is {ratio:.2f} of the re-declared threshold"


def _overall(verdict: Verdict, tensors: Sequence[TensorVerdict]) -> Outcome:
    """The worst tensor; what else held the verdict back (a fallback, say) still does."""
    before = worst_outcome([entry.verdict for entry in verdict.tensors] or [verdict.verdict])
    after = worst_outcome([entry.verdict for entry in tensors] or [verdict.verdict])
    if after == before:
        return verdict.verdict
    if before in ("PASS", "FAIL") and verdict.verdict != before:
        return worst_outcome([after, verdict.verdict])
    return after


def stored_request(verdict: Verdict, choice: ConstantChoice) -> Request:
    """The request of a verdict, to be asked again, with other constants where given.

    Raises:
        UsageError: the verdict does not hold one, or what it names is gone.
    """
    if not verdict.provenance.request:
        raise UsageError("this verdict does not say how it was asked for; judge again with `bridge verify`")
    try:
        request = msgspec.convert(verdict.provenance.request, Request)
    except msgspec.ValidationError as error:
        raise UsageError(f"the request stored in this verdict cannot be read: {error}") from None
    if request.op is None and request.kernel is None and request.reference is None:
        raise UsageError(
            "this verdict is of a KernelSpec made in Python; call bridge.verify.verify_kernel again"
        )
    given = {name: getattr(verdict.constants, name) for name in Constants.__struct_fields__}
    for name in Constants.__struct_fields__:
        if getattr(choice, name) is not None:
            given[name] = getattr(choice, name)
    request = msgspec.structs.replace(request, constants=ConstantChoice(**given))
    kernel = None if request.kernel is None else split_source(request.kernel)[0]
    for what, path in (("capture", request.capture), ("kernel file", kernel)):
        if path is not None and not Path(path).exists():
            raise UsageError(
                f"the {what} of this verdict, {path}, is gone; name it again with `bridge verify`"
            )
    return request


def rerun(
    verdict: Verdict,
    choice: ConstantChoice,
    *,
    timeout: float = 300.0,
    progress: Callable[[Event], None] | None = None,
) -> tuple[Verdict, tuple[str, ...]]:
    """Ask for the verdict again and say what is no longer the same.

    Raises:
        BridgeError: as `bridge verify` does.
    """
    from bridge.verify.isolate import verify_isolated

    again = verify_isolated(stored_request(verdict, choice), timeout=timeout, progress=progress)
    return again, differences(verdict, again)


def differences(old: Verdict, new: Verdict) -> tuple[str, ...]:
    """What changed between two verdicts of one request, in words."""
    found: list[str] = []
    before, after = old.provenance, new.provenance
    if before.kernel_sha256 != after.kernel_sha256:
        found.append(f"kernel source changed ({before.kernel_file})")
    for name in sorted({*before.versions, *after.versions}):
        if before.versions.get(name) != after.versions.get(name):
            found.append(
                f"{name} {before.versions.get(name, 'absent')} -> {after.versions.get(name, 'absent')}"
            )
    if before.device != after.device:
        found.append(f"device {before.device} -> {after.device}")
    digests = {record.name: record.input_digests for record in old.cases}
    inputs = [r.name for r in new.cases if r.name in digests and digests[r.name] != r.input_digests]
    if inputs:
        found.append(f"inputs of {len(inputs)} cases changed, first {inputs[0]}")
    names = {record.name for record in new.cases}
    missing = [record.name for record in old.cases if record.name not in names]
    if missing:
        found.append(f"{len(missing)} cases are gone, first {missing[0]}")
    errors = {(entry.tensor, entry.case): entry.target_error for entry in old.tensors}
    moved = [
        entry
        for entry in new.tensors
        if (entry.tensor, entry.case) in errors and errors[entry.tensor, entry.case] != entry.target_error
    ]
    if moved:
        first = moved[0]
        was = errors[first.tensor, first.case]
        found.append(
            f"{len(moved)} target errors changed, first {first.tensor} of {first.case}: "
            f"{_number(was)} -> {_number(first.target_error)}"
        )
    return tuple(found)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
