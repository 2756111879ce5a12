"""A scan for a terminal: the answer, the findings, the worst calls."""

from __future__ import annotations

from bridge.report.scan_model import (
    FINDING_COLUMNS,
    SCAN_COLUMNS,
    ScanView,
    build_scan_view,
    finding_cells,
    scan_cells,
)
from bridge.report.terminal import Painter, align, plain
from bridge.verify.diff_document import ScanDocument

#: Rows listed, and with `verbose`.
ROWS = (10, 100)


def render(document: ScanDocument, *, color: bool, width: int, verbose: bool) -> str:
    """Return the scan as text; `verbose` lists more calls."""
    view = build_scan_view(document)
    painter = _ScanPainter(color=color, width=width)
    lines = painter.headline(view.outcome, view.sentence, view.facts)
    for block in (
        painter.findings(view),
        painter.nonfinite(view),
        painter.calls(view, ROWS[verbose]),
        painter.limits(view),
    ):
        if block:
            lines += ["", *block]
    return "\n".join(lines) + "\n"


class _ScanPainter(Painter):
    def findings(self, view: ScanView) -> list[str]:
        found = view.document.findings
        if not found:
            return []
        cells = [[plain(cell) for cell in finding_cells(i, item)] for i, item in enumerate(found, 1)]
        head, *body = align([FINDING_COLUMNS, *cells], right=(2,), width=self.width)
        lines = ["Findings", self.cut(head)]
        for item, text in zip(found, body, strict=True):
            lines.append(self.cut(text))
            for label, note in (("Evidence", item.evidence), ("Next", item.next_command)):
                if note:
                    lines += self.note(label, note)
        return lines

    def nonfinite(self, view: ScanView) -> list[str]:
        return [part for _, text in view.nonfinite for part in self.wrap("Non-finite", text)]

    def calls(self, view: ScanView, limit: int) -> list[str]:
        rows = view.worst_rows(limit)
        if not rows:
            return []
        # The key stands on a line of its own, so that it can be copied whole.
        cells = [[plain(cell) for cell in scan_cells(row)[1:]] for row in rows]
        head, *body = align([SCAN_COLUMNS[1:], *cells], right=(3, 4, 5, 6), width=self.width)
        lines = ["Worst calls", head]
        for row, text in zip(rows, body, strict=True):
            lines += [self.cut(text), *self.indent(": ".join(part for part in (row.key, row.reason) if part))]
        return lines

    def limits(self, view: ScanView) -> list[str]:
        return [
            part
            for reason, count in view.not_judged
            for part in self.wrap("Not judged", f"{count}: {reason}")
        ]
