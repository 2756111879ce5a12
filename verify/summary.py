"""What all judged cases come to: the overall outcome, its sentence, and what was covered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridge.verify.options import Options
from bridge.verify.plan import OWN_FAMILIES
from bridge.verify.raised import RAISED
from bridge.verify.verdict import Coverage, Diagnosis, Outcome, TensorVerdict, worst_outcome

if TYPE_CHECKING:
    from bridge.verify.weigh import JudgedCase

#: A summary is one sentence that a person reads in a terminal; details stand in the table.
LONGEST = 160


def overall(judged: Sequence[JudgedCase]) -> Outcome:
    """FAIL from anywhere; a limitation only where no declared or captured case judged the tensor properly."""
    if any(t.verdict == "FAIL" for j in judged for t in j.tensors):
        return "FAIL"
    outcomes: list[Outcome] = ["PASS"]
    by_tensor: dict[tuple[str, str], list[Outcome]] = {}
    for j in judged:
        if j.refused is not None:
            outcomes.append("PASS WITH LIMITATIONS")
        if j.record.family in OWN_FAMILIES:
            for t in j.tensors:
                by_tensor.setdefault((t.tensor, t.dtype), []).append(t.verdict)
        elif any(t.verdict == "INCONCLUSIVE" for t in j.tensors):
            outcomes.append("PASS WITH LIMITATIONS")
    for verdicts in by_tensor.values():
        outcomes.append("PASS" if "PASS" in verdicts else worst_outcome(verdicts))
    return worst_outcome(outcomes)


def sentence(name: str, outcome: Outcome, judged: Sequence[JudgedCase], diagnosis: Diagnosis | None) -> str:
    """The answer in one sentence, never at odds with the table below it."""
    tensors = [t for j in judged for t in j.tensors]
    if outcome == "FAIL":
        return failure(name, [t for t in tensors if t.verdict == "FAIL"], _own_cases(judged), diagnosis)
    if outcome == "PASS":
        return f"{name} passes on all {len(judged)} cases{_limited(judged)}{_unsteady(judged)}"
    reasons = [t.reason for t in tensors if t.verdict == outcome]
    if outcome == "INCONCLUSIVE" and not reasons:
        return f"{name}: these inputs could not have revealed any of the faults tried; see power"
    refused = [f"{j.record.name} refused" for j in judged if j.refused]
    return f"{name}: {outcome}: {(reasons or refused or ['see coverage'])[0]}"


def _limited(judged: Sequence[JudgedCase]) -> str:
    """How many of the cases passed with limitations only; a PASS must not hide them."""
    count = sum(any(t.verdict == "PASS WITH LIMITATIONS" for t in j.tensors) for j in judged)
    over = sum(any(t.verdict == "PASS" and _over(t) for t in j.tensors) for j in judged)
    if over and not count:
        return f"; on {over} of them the gate alone is over, and the noise budget, which is kept, decides"
    if not count:
        return ", within the declared gate and every companion check"
    return (
        f"; on {count} of them a tensor is too ill-conditioned for the gate and was held against the noise "
        "envelope (see not covered)"
    )


def _over(tensor: TensorVerdict) -> bool:
    return (
        tensor.gate_valid
        and tensor.target_error is not None
        and tensor.threshold is not None
        and tensor.target_error > tensor.threshold
    )


def _unsteady(judged: Sequence[JudgedCase]) -> str:
    """Run-to-run differences: legal while every repeat passes, and nothing to keep quiet about."""
    count = sum(any(note.startswith("nondeterministic") for note in j.record.notes) for j in judged)
    return f"; results differ from run to run on {count} of them, every run passes" if count else ""


def _own_cases(judged: Sequence[JudgedCase]) -> frozenset[str]:
    return frozenset(j.record.name for j in judged if j.record.family in OWN_FAMILIES)


def failure(
    name: str, failed: Sequence[TensorVerdict], own: frozenset[str], diagnosis: Diagnosis | None
) -> str:
    """Kernel, tensors, by how much, and the best explanation, in at most LONGEST characters.

    Args:
        failed: every failed tensor of every case, at least one.
        own: names of declared and captured cases; an excess there is told before that of an added case.
    """
    names = list(dict.fromkeys(t.tensor for t in failed))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    worst = max(failed, key=lambda t: (t.case in own, _excess(t)[0]))
    if worst.structure is not None and worst.structure.startswith(RAISED):
        return _raised(name, worst, len({t.case for t in failed}) - 1)
    text = f"{_clipped(name, 30)} is wrong in {_clipped(shown, 40)}: {_clipped(_excess(worst)[1], 50)}"
    if diagnosis is None:
        return text
    known = not diagnosis.cause.startswith("unexplained")
    if known and diagnosis.cause.endswith(_excess(worst)[1]):
        return text
    share = f" ({diagnosis.explained:.0%})" if known and diagnosis.explained is not None else ""
    cause = diagnosis.cause.removeprefix("structure: ")
    return f"{text}; {_clipped(cause, max(12, LONGEST - len(text) - len(share) - 2))}{share}"


def _raised(name: str, tensor: TensorVerdict, others: int) -> str:
    """A target that raised left no error to measure: where, and what it said."""
    more = f"; fails on {others} more case{'s' if others > 1 else ''}" if others else ""
    said = (tensor.structure or "").removeprefix(RAISED).rpartition(" on ")[0]
    text = f"{_clipped(name, 30)} does not run on {_clipped(tensor.case, 40)}: {said}"
    return _clipped(text, LONGEST - len(more)) + more


def _excess(tensor: TensorVerdict) -> tuple[float, str]:
    """By how much a failed tensor is over, for ordering and in words."""
    failing = [(name, c) for name, c in tensor.companions.items() if not c.passed]
    if tensor.structure is not None:
        return float("inf"), tensor.reason.removeprefix("structure: ")
    error, threshold = tensor.target_error, tensor.threshold
    if tensor.gate_valid and error is not None and threshold and error > threshold:
        return error / threshold, f"{error / threshold:.3g} times the threshold"
    if failing:
        ratios = [
            (float("inf") if c.value is None else c.value / c.limit if c.limit else c.value, n, c)
            for n, c in failing
        ]
        size, name, check = max(ratios, key=lambda item: item[0])
        value = "not finite" if check.value is None else f"{check.value:.3g}"
        return size, f"{name} {value}, limit {check.limit:.3g}"
    return 0.0, tensor.reason


def _clipped(text: str, length: int) -> str:
    """`text` in at most `length` characters, cut at a word."""
    if len(text) <= length:
        return text
    cut = text[: length - 3]
    return (cut.rsplit(" ", 1)[0] if " " in cut[length // 2 :] else cut).rstrip(" ,;:(") + "..."


def coverage(judged: Sequence[JudgedCase], options: Options) -> Coverage:
    """Shapes, dtypes and families judged on, and what was not covered, each with its reason."""
    shapes = dict.fromkeys(str(j.record.shapes[0]) for j in judged if j.record.shapes)
    limited = [
        f"{j.record.name}: {t.tensor}: {t.reason}"
        for j in judged
        for t in j.tensors
        if t.verdict in ("PASS WITH LIMITATIONS", "INCONCLUSIVE")
    ]
    refused = [f"{j.record.name}: the target refused ({j.refused})" for j in judged if j.refused]
    return Coverage(
        shapes=tuple(shapes),
        dtypes=tuple(dict.fromkeys(j.record.dtype for j in judged)),
        families=tuple(dict.fromkeys(j.record.family for j in judged)),
        repeats=options.repeats,
        not_covered=tuple(refused + limited),
    )
