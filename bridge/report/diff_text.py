"""A diff for a terminal: the answer, the suspects, the first calls that differ."""

from __future__ import annotations

from bridge.report.diff_model import SUSPECT_COLUMNS, DiffView, build_diff_view, call_cells
from bridge.report.terminal import Painter, align, plain
from bridge.report.verdict_text import verdict_lines
from bridge.verify.diff_document import DiffDocument

#: Rows listed, and with `verbose`.
ROWS = (10, 100)
#: Suspects listed, and with `verbose`.
SUSPECTS = (5, 100)


def render(document: DiffDocument, *, color: bool, width: int, verbose: bool) -> str:
    """Return the diff as text; `verbose` lists more suspects and calls."""
    view = build_diff_view(document)
    painter = _DiffPainter(color=color, width=width)
    lines = painter.headline(view.outcome, view.sentence, view.facts)
    blocks = [painter.mismatches(view), painter.suspects(view, SUSPECTS[verbose]), painter.nonfinite(view)]
    blocks += [verdict_lines(verdict, painter) for verdict in document.verdicts]
    blocks += [painter.calls(view, ROWS[verbose]), painter.limits(view)]
    for block in blocks:
        if block:
            lines += ["", *block]
    return "\n".join(lines) + "\n"


class _DiffPainter(Painter):
    def mismatches(self, view: DiffView) -> list[str]:
        lines = []
        for item in view.document.mismatches:
            text = f"{item.what}: A {item.a}, B {item.b}" + (f"; {item.meaning}" if item.meaning else "")
            lines += self.wrap("Mismatch", text)
        return lines

    def suspects(self, view: DiffView, limit: int) -> list[str]:
        if not view.suspects:
            return []
        shown = view.suspects[:limit]
        cells = [[plain(cell) for cell in line.cells] for line in shown]
        # The key is what one copies: it stands on a line of its own, however long.
        head, *body = align(
            [(SUSPECT_COLUMNS[0], *SUSPECT_COLUMNS[2:]), *([c[0], *c[2:]] for c in cells)], right=(4, 5)
        )
        lines = ["Suspects, most likely first", head]
        for line, text in zip(shown, body, strict=True):
            lines.append(self.cut(text))
            lines += self.indent(line.cells[1])
            for label, note in line.notes:
                lines += self.note(label, note)
        left = len(view.suspects) - len(shown)
        return [*lines, f"{left} more in the report"] if left else lines

    def nonfinite(self, view: DiffView) -> list[str]:
        return [part for side, text in view.nonfinite for part in self.wrap("Non-finite", f"{side}: {text}")]

    def calls(self, view: DiffView, limit: int) -> list[str]:
        rows = view.first_rows(limit)
        if not rows:
            return []
        head: tuple[str, ...] = ("Call", "Op", "Phase", "Origin", "In", "Out", "Noise")
        cells: list[tuple[str, ...]] = [head]
        for row in rows:
            _, key, op, phase, status, origin, *numbers = map(plain, call_cells(row))
            cells.append((key, _shorten(op, 28), phase, status if origin == "-" else origin, *numbers))
        taken = sum(max(len(line[i]) for line in cells) + 2 for i in range(1, len(head)))
        # Long keys are cut in the middle: both ends tell.
        room = max(24, self.width - taken)
        lines = align(
            [(_shorten(line[0], room), *line[1:]) for line in cells], right=(4, 5, 6), width=self.width
        )
        return ["First calls that differ", *(self.cut(line) for line in lines)]

    def limits(self, view: DiffView) -> list[str]:
        lines = [part for label, text in view.matching for part in self.wrap(label, text)]
        not_covered = view.document.coverage.not_covered
        return lines + self.wrap("Not covered", "; ".join(not_covered) or "nothing was named")


def _shorten(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    front = room // 2 - 2
    return f"{text[:front]}...{text[front + 3 - room :]}"
