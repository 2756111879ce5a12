"""The verdict as JUnit XML: one test case per tensor and case, and one for the whole."""

from __future__ import annotations

from bridge.report.junit import Suite
from bridge.report.numbers import exact, short
from bridge.report.verdict_model import GATE, Row, View, build_view
from bridge.verify.verdict import Verdict


def render(verdict: Verdict) -> str:
    """Return the verdict as JUnit XML."""
    view = build_view(verdict)
    facts = [("verdict", verdict.verdict), *view.constants, *view.provenance]
    suite = Suite(f"bridge verify {verdict.op}", facts=facts, created=verdict.provenance.created)
    add_verdict(suite, view)
    return suite.xml()


def add_verdict(suite: Suite, view: View) -> None:
    """Add the whole verdict and each of its results to a suite."""
    verdict = view.verdict
    group = f"bridge.{verdict.op}"
    suite.case(group, "verdict", verdict.verdict, message=view.sentence, detail=_limits(view))
    seconds = {case.name: case.seconds for case in verdict.cases}
    for tensor in view.groups:
        for row in tensor.rows:
            suite.case(
                f"{group}.{tensor.tensor}",
                row.case,
                row.outcome,
                message=_message(row),
                detail=_detail(row),
                seconds=seconds.get(row.case),
                facts=_numbers(row),
            )


def _numbers(row: Row) -> list[tuple[str, str]]:
    entry = row.entry
    facts = [
        ("verdict", entry.verdict),
        ("dtype", entry.dtype),
        ("shape", "x".join(map(str, entry.shape))),
        ("reference_error", exact(entry.reference_error)),
        ("target_error", exact(entry.target_error)),
        ("rounding_floor", exact(entry.rounding_floor)),
        ("threshold", exact(entry.threshold)),
        ("reference_relative_error", exact(entry.reference_relative_error)),
        ("gate_valid", str(entry.gate_valid).lower()),
        ("condition", exact(entry.condition)),
    ]
    for name, item in entry.companions.items():
        facts.append((f"companion {name}", f"{exact(item.value)} (limit {exact(item.limit)})"))
    return facts


def _message(row: Row) -> str:
    entry = row.entry
    return (
        entry.reason
        or entry.structure
        or (
            f"{entry.tensor}: target error {short(entry.target_error, missing='not finite')}, "
            f"threshold {short(entry.threshold)}"
        )
    )


def _detail(row: Row) -> str:
    lines = []
    for name, point in row.checks:
        if not point.passed:
            value = short(point.value, missing="not finite")
            what = name if name == GATE else f"companion {name}"
            lines.append(f"{what}: value {value}, limit {short(point.limit)}, {point.size} {point.detail}")
    return "\n".join(line.rstrip() for line in lines)


def _limits(view: View) -> str:
    found = view.verdict.diagnosis
    lines = [f"cause: {found.cause}", found.where, found.evidence] if found else []
    lines += [f"not revealed: {name}" for name in view.verdict.power.not_revealed]
    return "\n".join(line for line in lines if line)
