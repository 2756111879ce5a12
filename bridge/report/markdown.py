"""The verdict in GitHub-flavoured Markdown, for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bridge.report.files import write_file
from bridge.report.model import COLUMNS, GATE, Group, View, build_view
from bridge.report.numbers import percent, plural, short
from bridge.report.palette import SYMBOLS
from bridge.verify.verdict import Outcome, Verdict

#: GitHub cuts a comment at 65,536 characters; the worst results are the ones to keep.
MAX_ROWS = 150

#: Markup; an underscore only where it is not inside a word; what makes a bare address a link.
_SPECIAL = re.compile(r"[\\`*\[\]<>#|~&@$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|:(?=//)|\.(?<=www\.)")

_RIGHT = frozenset(COLUMNS[1:5])


def render_markdown(verdict: Verdict) -> str:
    """Return the verdict as Markdown; untrusted text in it cannot form links, images or tags."""
    view = build_view(verdict)
    blocks = [
        f"### {_mark(view.outcome)}: `{code(verdict.op)}`",
        escape(view.sentence),
        table(COLUMNS, (_cells(group) for group in view.groups), right=_RIGHT),
        _diagnosis(view),
        _checks(view),
        _limits(view),
        _all_cases(view),
        _provenance(view),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def write_markdown(verdict: Verdict, path: Path | str) -> None:
    """Write the Markdown report; raises UsageError when the path cannot be written."""
    write_file(path, render_markdown(verdict))


def escape(text: str) -> str:
    """Return text that GitHub shows as it is, on one line: no markup, link, mention or formula."""
    # Entities work where a backslash does not: in tables and before an @mention.
    return _SPECIAL.sub(lambda found: "".join(f"&#{ord(char)};" for char in found[0]), " ".join(text.split()))


def code(text: str) -> str:
    """Return text for a code span: no backtick, no bar, one line."""
    return " ".join(text.split()).replace("`", "'").replace("|", "/")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> str:
    """Return a Markdown table; cells must be escaped already."""
    numbers = frozenset(right)
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "|".join("---:" if name in numbers else "---" for name in head) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _mark(outcome: Outcome) -> str:
    return f"{SYMBOLS[outcome]} {outcome}"


def _cells(group: Group) -> list[str]:
    row = group.worst
    first = f"**{escape(group.tensor)}** {escape(row.case)}"
    return [first, *map(escape, row.cells[1:6]), _mark(row.outcome)]


def _diagnosis(view: View) -> str:
    found = view.verdict.diagnosis
    if found is None:
        return ""
    explained = (
        f" (reproduces {percent(found.explained)} of the error)" if found.explained is not None else ""
    )
    lines = [f"**Cause:** {escape(found.cause)}{explained}"]
    lines += [
        f"{label}: {escape(text)}"
        for label, text in (("Where", found.where), ("Evidence", found.evidence))
        if text
    ]
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
            [escape(row.entry.tensor), escape(row.case), *map(escape, row.cells[1:6]), _mark(row.outcome)]
            for row in rows[:MAX_ROWS]
        ),
        right=_RIGHT,
    )
    more = f"\n\n{plural(len(rows) - MAX_ROWS, 'more result')}, none worse" if len(rows) > MAX_ROWS else ""
    return _folded(f"All {plural(len(rows), 'result')}, worst first", body + more)


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
    return _folded("Constants and provenance", body)


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
