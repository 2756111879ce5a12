"""The verdict in GitHub-flavoured Markdown."""

from __future__ import annotations

from bridge.report.markdown import code, escape, folded, mark, table
from bridge.report.numbers import percent, plural, short
from bridge.report.verdict_model import COLUMNS, GATE, Group, View, build_view
from bridge.verify.verdict import Verdict

#: GitHub cuts a comment at 65,536 characters; the worst results are the ones to keep.
MAX_ROWS = 150

_RIGHT = frozenset(COLUMNS[1:5])


def render(verdict: Verdict) -> str:
    """Return the verdict as Markdown."""
    view = build_view(verdict)
    blocks = [*verdict_blocks(verdict), _limits(view), _all_cases(view), _provenance(view)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def verdict_blocks(verdict: Verdict) -> list[str]:
    """Return a verdict's answer, table, cause and failed checks, for a report that holds several."""
    view = build_view(verdict)
    return [
        f"### {mark(view.outcome)}: `{code(verdict.op)}`",
        escape(view.sentence),
        table(COLUMNS, (_cells(group) for group in view.groups), right=_RIGHT),
        _diagnosis(view),
        _checks(view),
    ]


def _cells(group: Group) -> list[str]:
    row = group.worst
    first = f"**{escape(group.tensor)}** {escape(row.case)}"
    return [first, *map(escape, row.cells[1:6]), mark(row.outcome)]


def _diagnosis(view: View) -> str:
    found = view.verdict.diagnosis
    lines = []
    if found is not None:
        share = (
            f" (reproduces {percent(found.explained)} of the error)" if found.explained is not None else ""
        )
        lines.append(f"**Cause:** {escape(found.cause)}{share}")
        for label, text in (("Where", found.where), ("Evidence", found.evidence)):
            if text:
                lines.append(f"{label}: {escape(text)}")
    if view.verdict.drawn:
        lines.append(f"Never drawn by the spec's own samples: {escape('; '.join(view.verdict.drawn))}")
    return "  \n".join(lines)


def _checks(view: View) -> str:
    failed = [margin for margin in view.margins if not margin.passed and margin.check != GATE]
    rows = [
        (
            escape(margin.check),
            escape(margin.tensor),
            short(margin.worst.value, missing="not finite"),
            short(margin.worst.limit),
            margin.worst.size,
            escape(margin.worst.detail or margin.worst.case),
        )
        for margin in failed
    ]
    if not rows:
        return ""
    head = ("Failed companion", "Tensor", "Value", "Limit", "Value/limit", "Where")
    return table(head, rows, right=head[2:5])


def _limits(view: View) -> str:
    verdict = view.verdict
    lines = []
    if verdict.power.not_revealed:
        lines.append(f"**Not revealed by these inputs:** {escape('; '.join(verdict.power.not_revealed))}")
    lines.append(f"**Not covered:** {escape('; '.join(verdict.coverage.not_covered) or 'nothing was named')}")
    for label, items in (
        ("Shapes", verdict.coverage.shapes),
        ("Dtypes", verdict.coverage.dtypes),
        ("Inputs", verdict.coverage.families),
    ):
        if items:
            lines.append(f"{label}: {escape(', '.join(items))}")
    return "  \n".join(lines)


def _all_cases(view: View) -> str:
    rows = [row for group in view.groups for row in group.rows]
    if len(rows) <= len(view.groups):
        return ""
    rows.sort(key=lambda row: row.rank, reverse=True)
    body = table(
        ("Tensor", "Case", *COLUMNS[1:]),
        (
            [escape(row.entry.tensor), escape(row.case), *map(escape, row.cells[1:6]), mark(row.outcome)]
            for row in rows[:MAX_ROWS]
        ),
        right=_RIGHT,
    )
    more = f"\n\n{plural(len(rows) - MAX_ROWS, 'more result')}, none worse" if len(rows) > MAX_ROWS else ""
    return folded(f"All {plural(len(rows), 'result')}, worst first", body + more)


def _provenance(view: View) -> str:
    fidelity = view.verdict.fidelity
    launched = ", ".join(fidelity.kernels) or "yes" if fidelity.launched else "no kernel launch was seen"
    facts = [
        *view.constants,
        ("replay", f"{fidelity.status} {fidelity.detail}".strip()),
        ("launched", launched),
        *view.provenance,
    ]
    body = table(("", ""), ([escape(label), f"`{code(value)}`"] for label, value in facts))
    return folded("Constants and provenance", body)
