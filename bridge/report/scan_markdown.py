"""A scan in GitHub-flavoured Markdown."""

from __future__ import annotations

from bridge.report.diff_markdown import facts_table
from bridge.report.markdown import code, escape, folded, mark, table
from bridge.report.numbers import plural
from bridge.report.scan_model import (
    FINDING_COLUMNS,
    SCAN_COLUMNS,
    ScanView,
    build_scan_view,
    finding_cells,
    scan_cells,
)
from bridge.verify.diff_document import ScanDocument

MAX_CALLS = 50


def render(document: ScanDocument) -> str:
    """Return the scan as Markdown."""
    view = build_scan_view(document)
    blocks = [
        f"### {mark(view.outcome)}: `{code(document.capture.path)}`",
        escape(view.sentence),
        "  \n".join(f"**{escape(label)}:** {escape(text)}" for label, text in view.facts),
        _findings(view),
        "  \n".join(f"**Non-finite:** {escape(text)}" for _, text in view.nonfinite),
        _calls(view),
        folded("Not judged", facts_table(view.not_judged)) if view.not_judged else "",
        folded("Provenance", facts_table(view.provenance)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _findings(view: ScanView) -> str:
    found = view.document.findings
    if not found:
        return ""
    rows = (
        [
            *(escape(cell) for cell in finding_cells(i, item)),
            escape(item.evidence),
            f"`{code(item.next_command)}`",
        ]
        for i, item in enumerate(found, 1)
    )
    return table((*FINDING_COLUMNS, "Evidence", "Next"), rows, right=("#", "Calls"))


def _calls(view: ScanView) -> str:
    rows = view.worst_rows(MAX_CALLS)
    if not rows:
        return ""
    body = table(
        SCAN_COLUMNS,
        ([escape(cell) for cell in scan_cells(row)] for row in rows),
        right=("Ref/golden", "Target error", "Threshold", "Margin"),
    )
    return folded(f"{plural(len(rows), 'call')}, worst first", body)
