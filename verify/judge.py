"""Cases in, verdict parts out. Runs in the current process; isolation is the caller's business."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from bridge.errors import KernelError, NothingJudgedError
from bridge.verify.autotune import each_config
from bridge.verify.byrows import ByRows, measure, settle
from bridge.verify.case import Case
from bridge.verify.doubted import repeats_blamed
from bridge.verify.eager import is_large, run_eager, tidy
from bridge.verify.every import FAMILY as EVERY
from bridge.verify.every import zero_signs
from bridge.verify.evidence import Evidence
from bridge.verify.execute import Result, run_target, tensor_names
from bridge.verify.nearby import beside, far_case, near_case, near_result
from bridge.verify.options import Options
from bridge.verify.plan import OWN_FAMILIES
from bridge.verify.raised import broke_gpu, fault, gradless, in_words, lacks_memory, refusal
from bridge.verify.repeats import judge_repeats, repeat
from bridge.verify.spec import KernelSpec
from bridge.verify.structure import meta_mismatch, name_of
from bridge.verify.verdict import (
    CaseRecord,
    Constants,
    Outcome,
    TensorVerdict,
    worst_outcome,
)
from bridge.verify.weigh import JudgedCase, Judgement, keep_little, weigh
from bridge.verify.whole import Whole


def judge(
    spec: KernelSpec,
    cases: Sequence[Case],
    *,
    constants: Constants | None = None,
    options: Options | None = None,
) -> Judgement:
    """Judge `spec.target` on every case.

    Args:
        constants: the gate's; those of the spec when None.
        options: see Options.

    Raises:
        KernelError: the reference raised on a declared or captured case, or the target broke the GPU.
        NothingJudgedError: there are no cases.
    """
    options = options or Options()
    constants = constants or constants_of(spec)
    if not cases:
        raise NothingJudgedError(
            f"{spec.name} has no cases to judge; capture a step that runs it or widen --dtype"
        )
    judged: list[JudgedCase] = []
    for case in cases:
        one = judge_case(spec, case, constants=constants, options=options)
        if one is not None:
            keep_little(one, judged)
            judged.append(one)
    return weigh(spec, judged, constants=constants, options=options)


def constants_of(spec: KernelSpec) -> Constants:
    """The gate's constants as the spec declares them."""
    return Constants(
        fudge_factor=spec.fudge_factor,
        project_atol=spec.project_atol,
        max_reference_relative_error=spec.max_reference_relative_error,
    )


def judge_case(spec: KernelSpec, case: Case, *, constants: Constants, options: Options) -> JudgedCase | None:
    """Reference, target, golden and noise, then every tensor; None when the case is dropped."""
    start = time.perf_counter()
    own = case.family in OWN_FAMILIES
    try:
        eager = run_eager(spec, case, options)
    except KernelError:
        raise
    except Exception as error:
        if not own:
            return None
        raise KernelError(refusal(spec, case, "reference", error)) from error
    reference = eager.result
    if own and (text := gradless(spec, reference.grads)) is not None:
        raise KernelError(text)
    tidy(case, options)
    try:
        target = _target_result(spec, case, options)
    except Exception as error:
        if broke_gpu(error):
            raise KernelError(refusal(spec, case, "target", error)) from error
        return _without_target(spec, case, reference, error, time.perf_counter() - start)
    if isinstance(target, Result) and eager.plan is None and beside(target, case):
        case = near_case(case)
        reference, target = near_result(reference, case), near_result(target, case)
        eager = replace(eager, result=reference)
    tidy(case, options)
    yardstick = measure(spec, case, eager, constants=constants, options=options)
    if isinstance(target, Result):
        yardstick, tensors = settle(yardstick, spec, case, target, constants=constants, options=options)
    else:
        tensors = [_structural(name, case, target, reference) for name in tensor_names(spec)]
    launches = target.kernels if isinstance(target, Result) else ()
    judged = JudgedCase(record=_record(case, (*case.notes, *yardstick.notes), launches), tensors=tensors)
    if isinstance(target, Result):
        differing = {name: len(others) for name, others in target.differing.items()}
        if own and is_large(case, options) and not options.recorded:
            found, differing = _judge_repeats(spec, case, target, yardstick, constants, options)
            judged.tensors += found
        judged.tensors = repeats_blamed(judged.tensors, target)
        if (case.configs or case.family == "captured") and not options.recorded and target.autotuned:
            _judge_configs(spec, case, judged, reference, yardstick, target.device)
        judged.tensors = yardstick.conditioned(judged.tensors, target)
        judged.faults, judged.differing = dict(target.faults), differing
        for name, count in differing.items():
            text = f"nondeterministic: {name} differs from run to run ({count} repeats with other bits)"
            judged.record = _noted(judged.record, f"{text}, each judged")
        if case.family == EVERY:
            judged.record = _zeros_noted(judged.record, reference, target)
        judged.tiles = target.tiles
        if isinstance(yardstick, Whole):
            judged.evidence = yardstick.evidence(target, judged.tensors)
        elif not options.recorded and (options.power or any(t.verdict == "FAIL" for t in judged.tensors)):
            judged.evidence = _on_some_rows(spec, yardstick, judged.tensors, constants, options)
    verdict = worst_outcome([t.verdict for t in judged.tensors] or ["PASS WITH LIMITATIONS"])
    judged.record = _with(judged.record, verdict, time.perf_counter() - start)
    return judged


def _target_result(spec: KernelSpec, case: Case, options: Options) -> Result | str:
    if options.recorded:
        if case.recorded is None:
            return "has no recorded result for this case; capture it with its outputs"
        return Result(outputs=dict(case.recorded.outputs), grads=dict(case.recorded.grads))
    result = run_target(spec, case, twice=case.family in OWN_FAMILIES)
    if isinstance(result, Result) and case.family in OWN_FAMILIES and not is_large(case, options):
        repeat(spec, case, result, options)
    return result


def _judge_repeats(
    spec: KernelSpec,
    case: Case,
    target: Result,
    yardstick: ByRows | Whole,
    constants: Constants,
    options: Options,
) -> tuple[list[TensorVerdict], dict[str, int]]:
    """Repeats of a large case; see `judge_repeats`."""

    def settled(again: Result) -> list[TensorVerdict]:
        near = near_result(again, case)
        return settle(yardstick, spec, case, near, constants=constants, options=options)[1]

    far, release = far_case(case, target.device), isinstance(yardstick, ByRows)
    return judge_repeats(spec, far, target, settled, options, release=release)


def _on_some_rows(
    spec: KernelSpec,
    yardstick: ByRows,
    tensors: Sequence[TensorVerdict],
    constants: Constants,
    options: Options,
) -> Evidence | None:
    """A few rows of a large case for power and diagnosis; None where the target fares worse on them alone."""
    little = replace(options, large_bytes=sys.maxsize, repeats=1)
    try:
        one = judge_case(spec, yardstick.some_rows(), constants=constants, options=little)
    except KernelError:
        return None
    failed = {t.tensor for t in tensors if t.verdict == "FAIL"}
    if one is None or one.evidence is None or not failed.issuperset(one.evidence.failed):
        return None
    return one.evidence


def _judge_configs(
    spec: KernelSpec,
    case: Case,
    judged: JudgedCase,
    reference: Result,
    yardstick: ByRows | Whole,
    device: str,
) -> None:
    """Judge every autotune configuration alone; what each gives stands beside the tuned result."""
    tried = []
    for words, made in each_config(spec, far_case(case, device)):
        tried.append(words)
        if isinstance(made, Exception):
            judged.record = _noted(judged.record, f"{words} raised {type(made).__name__}: {made}"[:200])
            continue
        found = (
            [_structural(name, case, made, reference) for name in tensor_names(spec)]
            if isinstance(made, str)
            else yardstick.tensors(near_result(made, case))
        )
        judged.tensors += [msgspec.structs.replace(t, reason=f"{words}: {t.reason}") for t in found]
    judged.record = _noted(judged.record, f"autotune: {len(tried)} configurations, each judged alone")


def _noted(record: CaseRecord, text: str) -> CaseRecord:
    return msgspec.structs.replace(record, notes=(*record.notes, text))


def _zeros_noted(record: CaseRecord, reference: Result, target: Result) -> CaseRecord:
    """Say where zeros have another sign than the reference's: equal numbers, so no failure, but no secret."""
    eager = reference.named()
    for name, got in target.named().items():
        want = eager.get(name)
        if got is None or want is None or meta_mismatch(got, want) is not None:
            continue
        if got.is_floating_point():
            count = zero_signs(want, got)
            if count:
                text = f"sign of zero: {count} zeros of {name} have another sign than the reference's"
                record = _noted(record, text)
    return record


def _structural(name: str, case: Case, text: str, reference: Result) -> TensorVerdict:
    like = reference.named().get(name)
    return TensorVerdict(
        tensor=name,
        case=case.name,
        verdict="FAIL",
        dtype=name_of(like.dtype) if like is not None else case.dtype,
        shape=tuple(like.shape) if like is not None else (),
        structure=f"target {text}",
        reason=f"structure: target {text}",
    )


def _without_target(
    spec: KernelSpec, case: Case, reference: Result, error: Exception, seconds: float
) -> JudgedCase:
    """The target raised: a FAIL where it is to run, a limitation where nobody promised that it would."""
    refuses = case.family not in OWN_FAMILIES or lacks_memory(error)
    notes = (*case.notes, *((f"refused: {in_words(error)}",) if refuses else ()))
    text = fault(spec, case, error)
    verdict: Outcome = "PASS WITH LIMITATIONS" if refuses else "FAIL"
    return JudgedCase(
        record=_with(_record(case, notes), verdict, seconds),
        tensors=[] if refuses else [_structural(n, case, text, reference) for n in tensor_names(spec)],
        refused=in_words(error) if refuses else None,
        raised=refusal(spec, case, "target", error),
    )


def _record(case: Case, notes: tuple[str, ...], launches: tuple[str, ...] = ()) -> CaseRecord:
    return CaseRecord(
        name=case.name,
        family=case.family,
        dtype=case.dtype,
        shapes=tuple(tuple(t.shape) for t in case.inputs),
        attrs=dict(case.attrs),
        launches=launches,
        notes=notes,
    )


def _with(record: CaseRecord, verdict: Outcome, seconds: float) -> CaseRecord:
    return msgspec.structs.replace(record, verdict=verdict, seconds=seconds)
