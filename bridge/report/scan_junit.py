"""A scan as JUnit XML: the verdict and each finding; thousands of calls that passed are a number."""

from __future__ import annotations

from bridge.report.junit import Suite
from bridge.report.scan_model import build_scan_view
from bridge.verify.diff_document import ScanDocument


def render(document: ScanDocument) -> str:
    """Return the scan as JUnit XML."""
    view = build_scan_view(document)
    facts = [("verdict", document.verdict), *view.facts, *view.provenance]
    suite = Suite("bridge scan", facts=facts, created=document.created)
    suite.case(
        "bridge.scan",
        "verdict",
        document.verdict,
        message=view.sentence,
        detail="\n".join(t for _, t in view.nonfinite),
    )
    for item in document.findings:
        detail = "\n".join(part for part in (item.evidence, item.next_command) if part)
        suite.case(f"bridge.scan.{item.op}", item.key, "FAIL", message=item.cause, detail=detail)
    return suite.xml()
