"""The verdict for a terminal: the answer first, worst first, aligned."""

from __future__ import annotations

from bridge.report.numbers import percent, plural, short
from bridge.report.terminal import Painter, align, plain
from bridge.report.verdict_model import COLUMNS, GATE, Group, Margin, Row, View, build_view
from bridge.verify.verdict import Verdict

#: Columns of numbers stand to the right.
_RIGHT = frozenset(COLUMNS[1:5])


def render(verdict: Verdict, *, color: bool, width: int, verbose: bool) -> str:
    """Return the verdict as text; `verbose` shows every case, not only the worst of each tensor."""
    view = build_view(verdict)
    painter = _VerdictPainter(color=color, width=width)
    lines = painter.headline(view.outcome, view.sentence, view.facts)
    lines += ["", *painter.table(view.groups, verbose=verbose)]
    for block in (painter.checks(view), painter.diagnosis(view), painter.limits(view), painter.footer(view)):
        if block:
            lines += ["", *block]
    return "\n".join(lines) + "\n"


def verdict_lines(verdict: Verdict, like: Painter) -> list[str]:
    """Return a verdict's answer, table and cause, for a report that holds several."""
    view = build_view(verdict)
    painter = _VerdictPainter(color=like.color, width=like.width)
    lines = painter.headline(view.outcome, view.sentence, ())
    lines += painter.table(view.groups, verbose=False)
    return lines + painter.diagnosis(view)


class _VerdictPainter(Painter):
    def table(self, groups: tuple[Group, ...], *, verbose: bool) -> list[str]:
        if not groups:
            return ["No tensor was judged."]
        rows = [row for group in groups for row in (group.rows if verbose else group.rows[:1])]
        head, *body = self.fit([[plain(cell) for cell in row.cells] for row in rows])
        tallies = {id(group.worst): group.tally for group in groups}
        lines = [head]
        for row, line in zip(rows, body, strict=True):
            word = row.outcome
            lines.append(line[: -len(word)] + self.paint(word, word))
            lines += self.case_lines(row, "" if verbose else tallies[id(row)])
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

    def case_lines(self, row: Row, tally: str) -> list[str]:
        parts = [row.case]
        if row.told:
            parts.append(row.told)
        return self.indent(": ".join(parts) + (f"  [{tally}]" if tally else ""))

    def checks(self, view: View) -> list[str]:
        margins = [margin for margin in view.margins if margin.check != GATE]
        if not margins:
            return []
        # What failed, else what came closest: the full list is in the HTML report.
        failed = [margin for margin in margins if not margin.passed]
        shown = failed or _closest(margins)
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
            where = plain(worst.detail or worst.case)
            rows.append(
                (
                    plain(margin.check),
                    plain(margin.tensor),
                    short(worst.value, missing="not finite"),
                    short(worst.limit),
                    worst.size,
                    where,
                )
            )
        lines = align(rows, right=(2, 3, 4), width=self.width)
        if len(shown) < len(margins):
            lines.append(f"{plural(len(margins) - len(shown), 'other companion check')} passed")
        return [self.cut(line) for line in lines]

    def diagnosis(self, view: View) -> list[str]:
        found = view.verdict.diagnosis
        lines: list[str] = []
        if found is not None:
            share = (
                f" (explains {percent(found.explained)} of the error)" if found.explained is not None else ""
            )
            lines += self.wrap("Cause", found.cause + share)
            for label, text in (
                ("Where", found.where),
                ("Evidence", found.evidence),
                ("Alternatives", "; ".join(found.alternatives)),
            ):
                if text:
                    lines += self.wrap(label, text)
        if view.verdict.drawn:
            lines += self.wrap("Never drawn", "; ".join(view.verdict.drawn))
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


def _closest(margins: list[Margin]) -> list[Margin]:
    """The three companions that came closest to their limit, each on its worst tensor."""
    worst: dict[str, Margin] = {}
    for margin in sorted(margins, key=lambda margin: margin.worst.rank, reverse=True):
        worst.setdefault(margin.check, margin)
    return list(worst.values())[:3]
