"""The verdict as JUnit XML, for CI: one test case per tensor and case, and one for the whole."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from bridge.report.files import write_file
from bridge.report.model import GATE, Row, View, build_view
from bridge.report.numbers import exact, short
from bridge.verify.verdict import Outcome, Verdict

#: What XML 1.0 cannot hold at all, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

#: INCONCLUSIVE is an error and not a skip: CI shows a skip as green.
_ELEMENTS: dict[Outcome, str] = {"FAIL": "failure", "INCONCLUSIVE": "error"}


def write_junit(verdict: Verdict, path: Path | str) -> None:
    """Write JUnit XML; raises UsageError when the path cannot be written."""
    write_file(path, render_junit(verdict))


def render_junit(verdict: Verdict) -> str:
    """Return JUnit XML whose properties carry the numbers that decided each result."""
    view = build_view(verdict)
    suite = ElementTree.Element("testsuite", name=_text(f"bridge verify {verdict.op}"))
    facts = [("verdict", verdict.verdict), *view.constants, *view.provenance]
    _properties(suite, facts)
    outcomes: list[Outcome] = [verdict.verdict]
    _case(suite, _text(f"bridge.{verdict.op}"), "verdict", verdict.verdict, view.sentence, _limits(view))
    for group in view.groups:
        for row in group.rows:
            outcomes.append(row.outcome)
            seconds = _seconds(verdict, row.case)
            name = _text(f"bridge.{verdict.op}.{group.tensor}")
            item = _case(suite, name, _text(row.case), row.outcome, _message(row), _detail(row))
            if seconds is not None:
                item.set("time", f"{seconds:.6f}")
            _properties(item, _numbers(row))
    suite.set("tests", str(len(outcomes)))
    suite.set("failures", str(outcomes.count("FAIL")))
    suite.set("errors", str(outcomes.count("INCONCLUSIVE")))
    suite.set("skipped", "0")
    if verdict.provenance.created:
        suite.set("timestamp", _text(verdict.provenance.created))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _text(text: str) -> str:
    return _FORBIDDEN.sub("?", text)


def _case(
    suite: ElementTree.Element, group: str, name: str, outcome: Outcome, message: str, detail: str
) -> ElementTree.Element:
    item = ElementTree.SubElement(suite, "testcase", classname=group, name=name)
    kind = _ELEMENTS.get(outcome)
    if kind is not None:
        problem = ElementTree.SubElement(item, kind, type=outcome, message=_text(message))
        problem.text = _text(detail)
    return item


def _properties(parent: ElementTree.Element, facts: list[tuple[str, str]]) -> None:
    holder = ElementTree.Element("properties")
    for name, value in facts:
        ElementTree.SubElement(holder, "property", name=_text(name), value=_text(value))
    parent.insert(0, holder)


def _seconds(verdict: Verdict, case: str) -> float | None:
    return next((item.seconds for item in verdict.cases if item.name == case), None)


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
