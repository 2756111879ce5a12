"""A diff as JUnit XML: the outcome, each suspect, each verdict."""

from __future__ import annotations

from bridge.report.diff_model import build_diff_view
from bridge.report.junit import Suite
from bridge.report.verdict_junit import add_verdict
from bridge.report.verdict_model import build_view
from bridge.verify.diff_document import DiffDocument


def render(document: DiffDocument) -> str:
    """Return the diff as JUnit XML."""
    view = build_diff_view(document)
    facts = [("outcome", document.outcome), *view.facts, *view.matching, *view.provenance]
    suite = Suite(f"bridge {document.kind}", facts=facts, created=document.created)
    nonfinite = "\n".join(f"{side}: {text}" for side, text in view.nonfinite)
    suite.case(
        f"bridge.{document.kind}", "outcome", document.outcome, message=view.sentence, detail=nonfinite
    )
    for line in view.suspects:
        suite.case(
            f"bridge.{document.kind}.suspect",
            line.suspect.key,
            "FAIL",
            message=line.suspect.reason or f"suspect {line.cells[0]}",
            detail="\n".join(f"{label}: {text}" for label, text in line.notes),
        )
    for verdict in document.verdicts:
        add_verdict(suite, build_view(verdict))
    return suite.xml()
