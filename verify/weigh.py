"""What judged cases come to together: outcome, power, diagnosis, coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from bridge.verify.deeds import cause_of
from bridge.verify.diagnosis import diagnose
from bridge.verify.evidence import Evidence
from bridge.verify.options import Options
from bridge.verify.power import measure_power
from bridge.verify.spec import KernelSpec
from bridge.verify.steps import steps_of
from bridge.verify.summary import coverage, overall, sentence
from bridge.verify.tasks import Kept, has_room
from bridge.verify.verdict import (
    CaseRecord,
    Constants,
    Coverage,
    Diagnosis,
    Outcome,
    Power,
    TensorVerdict,
    worst_outcome,
)

#: Cases with more input elements than this are not kept for diagnosis.
_KEPT_ELEMENTS = 1 << 18
#: What is said where nothing shows that the inputs could have revealed a fault.
_POWERLESS = "power: no wrong variant could be tried on these inputs"


@dataclass(slots=True, kw_only=True)
class Judgement:
    """The parts of a Verdict that judging makes; the caller adds provenance and fidelity."""

    outcome: Outcome
    summary: str
    tensors: tuple[TensorVerdict, ...]
    cases: tuple[CaseRecord, ...]
    diagnosis: Diagnosis | None
    power: Power
    coverage: Coverage
    kernels: tuple[str, ...]  #: Triton kernels or custom ops that the target was seen to run
    raised: frozenset[str] = frozenset()  #: cases on which the target raised
    never_ran: str | None = None  #: why, where the target raised on every case: nothing was judged


@dataclass(slots=True)
class JudgedCase:
    """One case after judging."""

    record: CaseRecord
    tensors: list[TensorVerdict] = field(default_factory=list)
    refused: str | None = None
    raised: str | None = None  #: one line about a target that raised, whether or not it may
    tiles: tuple[int, ...] = ()
    evidence: Evidence | None = None  #: kept for failing cases and some others, while they are small
    faults: dict[str, str] = field(default_factory=dict)  #: misdeeds of the target, by tensor
    differing: dict[str, int] = field(default_factory=dict)  #: repeats with other bits, by tensor


def weigh(
    spec: KernelSpec,
    judged: list[JudgedCase],
    *,
    constants: Constants,
    options: Options,
    power: Power | None = None,
) -> Judgement:
    """What the judged cases come to together: outcome, power, diagnosis, coverage.

    Args:
        power: measured already; None: measured here, where nothing failed.
    """
    tensors = tuple(t for j in judged for t in j.tensors)
    outcome = overall(judged)
    if not options.power or outcome == "FAIL":
        power = Power()
    elif power is None:
        power = _power(spec, judged, constants)
    if power.not_revealed and not power.revealed:
        outcome = worst_outcome([outcome, "INCONCLUSIVE"])
    diagnosis = _diagnosis(spec, judged) if outcome == "FAIL" else None
    covered = coverage(judged, options)
    if options.power and outcome != "FAIL" and not (power.revealed or power.not_revealed):
        covered = msgspec.structs.replace(covered, not_covered=(*covered.not_covered, _POWERLESS))
    return Judgement(
        outcome=outcome,
        summary=sentence(spec.name, outcome, judged, diagnosis),
        tensors=tensors,
        cases=tuple(j.record for j in judged),
        diagnosis=diagnosis,
        power=power,
        coverage=msgspec.structs.replace(covered, steps=steps_of(spec, judged, diagnosis, options.repeats)),
        kernels=tuple(dict.fromkeys(k for j in judged for k in j.record.launches)),
        raised=frozenset(j.record.name for j in judged if j.raised is not None),
        never_ran=judged[0].raised if judged and all(j.raised is not None for j in judged) else None,
    )


def keep_little(one: JudgedCase, before: list[JudgedCase]) -> None:
    """Drop the tensors of a case unless diagnosis may need them: peak memory is one case's."""
    if one.evidence is not None and not worth_keeping(
        one.evidence, [kept_of(j.evidence) for j in before if j.evidence is not None]
    ):
        one.evidence = None


def worth_keeping(e: Evidence, before: Sequence[Kept]) -> bool:
    """Whether evidence is small, and among the first of its kind after what was kept `before`."""
    return sum(t.numel() for t in e.case.inputs) <= _KEPT_ELEMENTS and has_room(kept_of(e), before)


def kept_of(e: Evidence, number: int = 0) -> Kept:
    """The facts about evidence that decide what else is kept."""
    return Kept(number=number, dtype=e.case.dtype, family=e.case.family, failed=bool(e.failed))


def _power(spec: KernelSpec, judged: list[JudgedCase], constants: Constants) -> Power:
    evidence = [j.evidence for j in judged if j.evidence is not None and not j.evidence.failed]
    tiles = tuple(sorted({t for j in judged for t in j.tiles}))
    return measure_power(spec, evidence, constants, tiles)


def _diagnosis(spec: KernelSpec, judged: list[JudgedCase]) -> Diagnosis:
    evidence = [j.evidence for j in judged if j.evidence is not None]
    tiles = tuple(sorted({t for j in judged for t in j.tiles}))
    failing, passing = [e for e in evidence if e.failed], [e for e in evidence if not e.failed]
    known = any(name in e.target.faults for e in failing for name in e.failed)
    found = None if known else _misdeed(judged)
    if found is None and not failing:
        found = _seen(judged)
    return found or diagnose(spec, failing, passing, tiles)


def _misdeed(judged: list[JudgedCase]) -> Diagnosis | None:
    """A misdeed on a case that left no evidence: it is large, or the target raised."""
    for one in judged:
        for tensor in (t for t in one.tensors if t.verdict == "FAIL" and t.tensor in one.faults):
            cause, evidence = cause_of(one.faults[tensor.tensor], tensor.tensor, tensor.case)
            return Diagnosis(cause=cause, explained=1.0, evidence=evidence)
    return None


def _seen(judged: list[JudgedCase]) -> Diagnosis | None:
    """What was seen of a target that left nothing to try variants on."""
    failed = [(one, t) for one in judged for t in one.tensors if t.verdict == "FAIL"]
    for _, tensor in failed:
        if tensor.structure is not None:
            text = f"structure: {tensor.structure}"
            return Diagnosis(cause=text, explained=1.0, evidence=f"seen on {tensor.case}")
    for one, tensor in failed:
        if tensor.tensor in one.differing:
            count = one.differing[tensor.tensor]
            evidence = (
                f"{tensor.tensor} differs from run to run ({count} repeats with other bits) "
                f"on {tensor.case}, which is too large to try variants on"
            )
            return Diagnosis(cause="unexplained", evidence=evidence)
    return None
