"""The verdict for a terminal: the answer first, worst first, aligned, ASCII, 100 columns or so."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import click

from bridge.report.model import COLUMNS, GATE, Group, Row, View, build_view
from bridge.report.numbers import percent, plural, short
from bridge.verify.verdict import Outcome, Verdict

WIDTH = 100

#: Blue and orange-red stay apart for colour-blind readers; the word says it anyway.
COLOURS: dict[Outcome, str] = {
    "PASS": "blue",
    "PASS WITH LIMITATIONS": "yellow",
    "INCONCLUSIVE": "magenta",
    "FAIL": "red",
}

#: Columns of numbers stand to the right.
_RIGHT = frozenset(COLUMNS[1:5])


def render_text(verdict: Verdict, *, color: bool = False, width: int = WIDTH, verbose: bool = False) -> str:
    """Return the verdict as text of `width` columns.

    Args:
        verdict: The document.
        color: Add terminal colours to the verdicts.
        width: Columns to fill; at least 80 are used.
        verbose: Show every case, not only the worst of each tensor.
    """
    view = build_view(verdict)
    painter = _Painter(color=color, width=max(80, width))
    lines = painter.headline(view)
    lines += ["", *painter.table(view.groups, verbose=verbose)]
    for block in (painter.checks(view), painter.diagnosis(view), painter.limits(view), painter.footer(view)):
        if block:
            lines += ["", *block]
    return "\n".join(lines) + "\n"


def align(rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), width: int = WIDTH) -> list[str]:
    """Return rows as lines with columns of equal width, two blanks apart, or one to fit `width`."""
    numbers = frozenset(right)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= width else " "
    return [
        gap.join(
            cell.rjust(size) if i in numbers else cell.ljust(size)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class _Painter:
    def __init__(self, *, color: bool, width: int) -> None:
        self.color = color
        self.width = width

    def paint(self, text: str, outcome: Outcome) -> str:
        return click.style(text, fg=COLOURS[outcome], bold=outcome == "FAIL") if self.color else text

    def wrap(self, label: str, text: str, *, indent: int = 14) -> list[str]:
        """Return `label` followed by `text`, wrapped and hanging at `indent`."""
        return textwrap.wrap(
            f"{label:<{indent}}{_plain(text)}",
            self.width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def headline(self, view: View) -> list[str]:
        body = self.wrap(view.outcome, view.sentence, indent=len(view.outcome) + 2)
        body[0] = self.paint(view.outcome, view.outcome) + body[0][len(view.outcome) :]
        return body + [line for label, value in view.facts for line in self.wrap(label, value)]

    def table(self, groups: tuple[Group, ...], *, verbose: bool) -> list[str]:
        if not groups:
            return ["No tensor was judged."]
        rows = [row for group in groups for row in (group.rows if verbose else group.rows[:1])]
        # The verdict is painted after alignment: colour codes have no width.
        head, *body = self.fit([[_plain(cell) for cell in row.cells] for row in rows])
        tallies = {id(group.worst): group.tally for group in groups}
        lines = [head]
        for row, line in zip(rows, body, strict=True):
            word = row.outcome
            lines.append(line[: -len(word)] + self.paint(word, word))
            lines += self.note(row, "" if verbose else tallies[id(row)])
        return lines

    def fit(self, cells: list[list[str]]) -> list[str]:
        """Return the table's lines, without the reference's relative error where it does not fit."""
        right = [i for i, name in enumerate(COLUMNS) if name in _RIGHT]
        lines = align([COLUMNS, *cells], right=right, width=self.width)
        if max(map(len, lines)) <= self.width:
            return lines
        reference = COLUMNS.index("Ref/golden")
        for row in cells:
            row[reference] = row[reference].partition(" (")[0]
        return align([COLUMNS, *cells], right=right, width=self.width)

    def note(self, row: Row, tally: str) -> list[str]:
        parts = [row.case]
        if row.entry.reason and row.outcome != "PASS":
            parts.append(row.entry.reason)
        text = _plain(": ".join(parts)) + (f"  [{tally}]" if tally else "")
        return textwrap.wrap(
            text, self.width, initial_indent="  ", subsequent_indent="  ", break_long_words=False
        )

    def checks(self, view: View) -> list[str]:
        margins = [margin for margin in view.margins if margin.check != GATE]
        if not margins:
            return []
        # What failed, else what came closest: the full list is in the HTML report.
        failed = [margin for margin in margins if not margin.passed]
        shown = failed or sorted(margins, key=lambda margin: margin.worst.rank, reverse=True)[:3]
        rows = [
            (
                "Failed companion" if failed else "Closest companion",
                "Tensor",
                "Value",
                "Limit",
                "Value/limit",
                "Where",
            )
        ]
        for margin in shown:
            worst = margin.worst
            where = _plain(worst.detail or worst.case)
            rows.append(
                (
                    _plain(margin.check),
                    _plain(margin.tensor),
                    short(worst.value, missing="not finite"),
                    short(worst.limit),
                    worst.size,
                    where,
                )
            )
        lines = align(rows, right=(2, 3, 4), width=self.width)
        if len(shown) < len(margins):
            lines.append(f"{plural(len(margins) - len(shown), 'other companion check')} passed")
        return [line if len(line) <= self.width else line[: self.width - 3] + "..." for line in lines]

    def diagnosis(self, view: View) -> list[str]:
        found = view.verdict.diagnosis
        if found is None:
            return []
        explained = (
            f" (explains {percent(found.explained)} of the error)" if found.explained is not None else ""
        )
        lines = self.wrap("Cause", found.cause + explained)
        for label, text in (("Where", found.where), ("Evidence", found.evidence)):
            if text:
                lines += self.wrap(label, text)
        if found.alternatives:
            lines += self.wrap("Alternatives", "; ".join(found.alternatives))
        return lines

    def limits(self, view: View) -> list[str]:
        verdict = view.verdict
        lines: list[str] = []
        if verdict.power.revealed or verdict.power.not_revealed:
            known = len(verdict.power.revealed)
            total = known + len(verdict.power.not_revealed)
            lines += self.wrap("Power", f"these inputs reveal {known} of {total} wrong variants")
            if verdict.power.not_revealed:
                lines += self.wrap("Not revealed", "; ".join(verdict.power.not_revealed))
        for label, items in (
            ("Shapes", verdict.coverage.shapes),
            ("Dtypes", verdict.coverage.dtypes),
            ("Inputs", verdict.coverage.families),
        ):
            if items:
                lines += self.wrap(label, ", ".join(items))
        lines += self.wrap("Not covered", "; ".join(verdict.coverage.not_covered) or "nothing was named")
        return lines

    def footer(self, view: View) -> list[str]:
        verdict = view.verdict
        fidelity = verdict.fidelity
        launched = ", ".join(fidelity.kernels) if fidelity.launched else "no kernel launch was seen"
        lines = self.wrap("Fidelity", "; ".join(part for part in (fidelity.status, fidelity.detail) if part))
        lines += self.wrap("Launched", launched or "yes")
        lines += self.wrap("Constants", ", ".join(f"{name} {value}" for name, value in view.constants))
        return lines


def _plain(text: str) -> str:
    """Return untrusted text without control characters, which could drive the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)
