"""A diff in GitHub-flavoured Markdown."""

from __future__ import annotations

from bridge.report.diff_model import (
    CALL_COLUMNS,
    SUSPECT_COLUMNS,
    DiffView,
    SuspectLine,
    build_diff_view,
    call_cells,
)
from bridge.report.markdown import code, escape, folded, mark, table
from bridge.report.numbers import plural
from bridge.report.verdict_markdown import verdict_blocks
from bridge.verify.diff_document import DiffDocument

#: GitHub cuts a comment at 65,536 characters.
MAX_SUSPECTS = 10
MAX_CALLS = 50


def render(document: DiffDocument) -> str:
    """Return the diff as Markdown."""
    view = build_diff_view(document)
    blocks = [
        f"### {mark(view.outcome)}: `{code(document.a.label)}` against `{code(document.b.label)}`",
        escape(view.sentence),
        _lines(view.facts),
        _mismatches(view),
        _suspects(view),
        _lines(tuple((f"Non-finite in {side}", text) for side, text in view.nonfinite)),
    ]
    for verdict in document.verdicts:
        blocks += verdict_blocks(verdict)
    blocks += [
        _lines((("Not covered", "; ".join(document.coverage.not_covered) or "nothing was named"),)),
        _calls(view),
        folded("Matching and provenance", facts_table((*view.matching, *view.provenance))),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _lines(facts: tuple[tuple[str, str], ...]) -> str:
    return "  \n".join(f"**{escape(label)}:** {escape(text)}" for label, text in facts)


def facts_table(facts: tuple[tuple[str, str], ...]) -> str:
    """Return labelled values as a table of two columns."""
    return table(("", ""), ([escape(label), escape(value)] for label, value in facts))


def _mismatches(view: DiffView) -> str:
    found = view.document.mismatches
    if not found:
        return ""
    rows = ([escape(item.what), escape(item.a), escape(item.b), escape(item.meaning)] for item in found)
    return table(("Mismatch", "A", "B", "Meaning"), rows)


def _suspects(view: DiffView) -> str:
    if not view.suspects:
        return ""
    shown = view.suspects[:MAX_SUSPECTS]
    rows = ([escape(cell) for cell in line.cells] for line in shown)
    body = table(SUSPECT_COLUMNS, rows, right=("#", "Born", "Inherited"))
    left = len(view.suspects) - len(shown)
    more = f"\n\n{plural(left, 'more suspect')} in the report" if left else ""
    return "\n\n".join([body + more, _why(shown[0])])


def _why(line: SuspectLine) -> str:
    """The first suspect's reasons, spelled out."""
    return "  \n".join(
        f"{label}: `{code(text)}`" if label == "Next" else f"{label}: {escape(text)}"
        for label, text in line.notes
    )


def _calls(view: DiffView) -> str:
    rows = view.first_rows(MAX_CALLS)
    if not rows:
        return ""
    body = table(
        CALL_COLUMNS,
        ([escape(cell) for cell in call_cells(row)] for row in rows),
        right=("Row", "Input diff", "Output diff", "Noise"),
    )
    return folded(f"First {plural(len(rows), 'call')} that differ", body)
