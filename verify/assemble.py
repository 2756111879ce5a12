"""The parts of a judgement -> the verdict document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from bridge.verify.case import Case
from bridge.verify.execute import tensor_names
from bridge.verify.request import Declared, Lost
from bridge.verify.spec import KernelSpec
from bridge.verify.verdict import (
    CaseRecord,
    Coverage,
    Fidelity,
    Outcome,
    Power,
    TensorVerdict,
    Verdict,
)
from bridge.verify.weigh import Judgement

#: How the structure of a tensor begins that a dead process left no result of.
LOST = "no result: "


def assemble(
    spec: KernelSpec,
    found: Judgement | None,
    *,
    declared: Declared,
    fidelity: Fidelity,
    lost: Sequence[tuple[Case, Lost]] = (),
    left_out: Sequence[str] = (),
    fallback: str | None = None,
    drawn: Sequence[str] = (),
) -> Verdict:
    """Put a verdict together.

    Args:
        found: what judging gave; None when every case was lost.
        declared: what was fixed before the target ran.
        lost: cases whose process died or hung: the kernel's failure.
        left_out: what was not judged, in words.
        fallback: why the target does not count as a kernel, in words; None: it does.
        drawn: what the run's inputs have that drawn ones lack, when that explains a failure.
    """
    fallen = [_lost_case(spec, case, item) for case, item in lost]
    records = [record for record, _ in fallen]
    tensors = [tensor for _, entries in fallen for tensor in entries]
    outcome: Outcome = "FAIL" if lost else "INCONCLUSIVE"
    summary = f"{spec.name} does not survive {lost[0][1].case}: {lost[0][1].reason}" if lost else ""
    coverage, power = Coverage(), Power()
    if found is not None:
        records += found.cases
        tensors += found.tensors
        coverage, power = found.coverage, found.power
        if not lost:
            outcome, summary = found.outcome, found.summary
    if drawn:
        summary += f"; drawn inputs pass, and lack this: {drawn[0]}"
    if fallback is not None and outcome != "FAIL":
        outcome, summary = "INCONCLUSIVE", fallback
    coverage = msgspec.structs.replace(coverage, not_covered=(*left_out, *coverage.not_covered))
    return Verdict(
        verdict=outcome,
        op=spec.name,
        summary=summary,
        constants=declared.constants,
        tensors=tuple(tensors),
        cases=tuple(_with_digests(record, declared.input_digests) for record in records),
        diagnosis=found.diagnosis if found is not None else None,
        power=power,
        coverage=coverage,
        fidelity=fidelity,
        provenance=declared.provenance,
        drawn=tuple(drawn),
    )


def _with_digests(record: CaseRecord, digests: Mapping[str, tuple[str, ...]]) -> CaseRecord:
    return msgspec.structs.replace(record, input_digests=digests.get(record.name, ()))


def _lost_case(spec: KernelSpec, case: Case, item: Lost) -> tuple[CaseRecord, list[TensorVerdict]]:
    """A crash leaves no tensor, so every output and gradient of the case fails with its reason."""
    record = CaseRecord(
        name=case.name,
        family=case.family,
        dtype=case.dtype,
        shapes=tuple(tuple(tensor.shape) for tensor in case.inputs),
        attrs=dict(case.attrs),
        verdict="FAIL",
        notes=(*case.notes, item.reason),
    )
    entries = [
        TensorVerdict(
            tensor=name,
            case=case.name,
            verdict="FAIL",
            dtype=case.dtype,
            shape=(),
            structure=f"{LOST}{item.reason}",
            reason=item.reason,
        )
        for name in tensor_names(spec)
    ]
    return record, entries
