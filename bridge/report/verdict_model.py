"""What the reports show, computed once: every renderer paints these records and computes nothing.

No torch, no plotly, no HTML. All text in here is plain; renderers escape it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bridge.report.numbers import exact, percent, plural, ratio, short, times
from bridge.verify.verdict import OUTCOMES, Companion, Outcome, TensorVerdict, Verdict

#: The verdict table's columns, as the method's report rule names them.
COLUMNS = ("Tensor", "Ref/golden", "Condition", "Target error", "Threshold", "Gate valid", "Verdict")

#: Name of the stated gate among the checks; the others are companions.
GATE = "gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One check on one tensor in one case; it passes when ratio <= 1."""

    case: str
    ratio: float | None  #: value / limit; None: not finite, or another structure
    value: float | None
    limit: float | None
    passed: bool
    binding: bool  #: False: the gate was not valid here, so this number decided nothing
    detail: str = ""
    note: str = ""

    @property
    def rank(self) -> float:
        """The ratio to sort by; not finite is the worst."""
        return math.inf if self.ratio is None else self.ratio

    @property
    def size(self) -> str:
        """The ratio as text: "27.3x"; "-" where nothing was judged."""
        if self.ratio is not None:
            return times(self.ratio)
        if not self.binding:
            return "-"
        return "not finite" if self.value is None and self.limit is not None else "mismatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """One check of one tensor over all cases, worst first."""

    tensor: str
    check: str
    points: tuple[Point, ...]

    @property
    def worst(self) -> Point:
        return self.points[0]

    @property
    def passed(self) -> bool:
        return all(point.passed or not point.binding for point in self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the verdict table."""

    entry: TensorVerdict
    cells: tuple[str, ...]  #: one text per COLUMNS
    exact: tuple[str, ...]  #: the same with every digit
    checks: tuple[tuple[str, Point], ...]  #: gate first, then companions, worst first

    @property
    def case(self) -> str:
        return self.entry.case

    @property
    def outcome(self) -> Outcome:
        return self.entry.verdict

    @property
    def told(self) -> str:
        """The reason where a reader needs one: no PASS, or one that the stated gate did not give."""
        over = (self.entry.target_error or 0.0) > (self.entry.threshold or 0.0)
        return self.entry.reason if over or self.outcome != "PASS" else ""

    @property
    def rank(self) -> tuple[int, float, float]:
        """Sort key, the larger the worse: the outcome, then what failed, then the gate."""
        failed = [point.rank for _, point in self.checks if point.binding and not point.passed]
        return OUTCOMES.index(self.outcome), max(failed, default=0.0), self.checks[0][1].rank

    @property
    def decisive(self) -> tuple[str, Point]:
        """The check that decided: the worst of those that failed, else the gate."""
        failed = [check for check in self.checks if check[1].binding and not check[1].passed]
        return max(failed, key=lambda check: check[1].rank, default=self.checks[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All results of one tensor, worst first."""

    tensor: str
    rows: tuple[Row, ...]

    @property
    def worst(self) -> Row:
        return self.rows[0]

    @property
    def outcome(self) -> Outcome:
        return self.worst.outcome

    @property
    def tally(self) -> str:
        """ "3 of 43 cases FAIL", or "43 cases"."""
        same = sum(row.outcome == self.outcome for row in self.rows)
        if self.outcome == "PASS" or len(self.rows) == 1:
            return plural(len(self.rows), "case")
        return f"{same} of {plural(len(self.rows), 'case')} {self.outcome}"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One verify report."""

    verdict: Verdict
    sentence: str
    groups: tuple[Group, ...]  #: worst first
    margins: tuple[Margin, ...]  #: in the order of groups, gate before companions
    facts: tuple[tuple[str, str], ...]  #: the strip under the sentence
    constants: tuple[tuple[str, str], ...]
    provenance: tuple[tuple[str, str], ...]

    @property
    def outcome(self) -> Outcome:
        return self.verdict.verdict


def build_view(verdict: Verdict) -> View:
    """Compute everything that a report of `verdict` shows."""
    groups = _groups(verdict.tensors)
    return View(
        verdict=verdict,
        sentence=verdict.summary or _sentence(verdict, groups),
        groups=groups,
        margins=tuple(margin for group in groups for margin in _margins(group)),
        facts=_facts(verdict, groups),
        constants=_constants(verdict),
        provenance=_provenance(verdict),
    )


def _groups(entries: Iterable[TensorVerdict]) -> tuple[Group, ...]:
    rows: dict[str, list[Row]] = {}
    for entry in entries:
        rows.setdefault(entry.tensor, []).append(_row(entry))
    groups = [
        Group(tensor=tensor, rows=tuple(sorted(found, key=lambda row: row.rank, reverse=True)))
        for tensor, found in rows.items()
    ]
    return tuple(sorted(groups, key=lambda group: group.worst.rank, reverse=True))


def _row(entry: TensorVerdict) -> Row:
    gate = Point(
        case=entry.case,
        # Numbers of tensors that are not alike in structure say nothing, small as they may be.
        ratio=None if entry.structure is not None else ratio(entry.target_error, entry.threshold),
        value=entry.target_error,
        limit=entry.threshold,
        passed=entry.structure is None and _within(entry.target_error, entry.threshold),
        binding=entry.gate_valid or entry.structure is not None,
        detail=entry.structure or "",
    )
    checks = [(name, _point(entry.case, item)) for name, item in entry.companions.items()]
    checks.sort(key=lambda check: (not check[1].passed, check[1].rank), reverse=True)
    reference = short(entry.reference_error)
    if entry.reference_relative_error is not None:
        reference += f" ({percent(entry.reference_relative_error)})"
    missing = "not finite" if entry.reference_error is not None else "-"
    target = short(entry.target_error, missing=missing)
    if entry.structure is not None and not entry.target_error:
        # No element is left to measure, or all that are left agree: a 0 here would mislead.
        target = "mismatch"
    return Row(
        entry=entry,
        cells=(
            entry.tensor,
            reference,
            short(entry.condition),
            target,
            short(entry.threshold),
            "yes" if entry.gate_valid else "no",
            entry.verdict,
        ),
        exact=(
            entry.tensor,
            f"{exact(entry.reference_error)}; relative {exact(entry.reference_relative_error)}",
            exact(entry.condition),
            exact(entry.target_error),
            exact(entry.threshold),
            "yes" if entry.gate_valid else "no",
            entry.verdict,
        ),
        checks=((GATE, gate), *checks),
    )


def _within(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value <= limit


def _point(case: str, item: Companion) -> Point:
    return Point(
        case=case,
        ratio=ratio(item.value, item.limit),
        value=item.value,
        limit=item.limit,
        passed=item.passed,
        binding=True,
        detail=item.detail,
        note=item.note,
    )


def _margins(group: Group) -> list[Margin]:
    points: dict[str, list[Point]] = {GATE: []}
    for row in group.rows:
        for name, point in row.checks:
            points.setdefault(name, []).append(point)
    margins = [
        Margin(
            tensor=group.tensor,
            check=name,
            points=tuple(sorted(found, key=lambda point: (point.binding, point.rank), reverse=True)),
        )
        for name, found in points.items()
    ]
    gate, *companions = margins
    return [
        gate,
        *sorted(companions, key=lambda margin: (not margin.passed, margin.worst.rank), reverse=True),
    ]


def _sentence(verdict: Verdict, groups: tuple[Group, ...]) -> str:
    cases = plural(len({entry.case for entry in verdict.tensors}), "case")
    if not groups:
        return f"Nothing of {verdict.op} was judged."
    worst = groups[0].worst
    name, point = worst.decisive
    if verdict.verdict == "FAIL" and worst.outcome == "FAIL":
        reason = worst.entry.reason or point.detail or _against(name, point)
        cause = f" Cause: {verdict.diagnosis.cause}." if verdict.diagnosis else ""
        return f"{verdict.op} is wrong: {worst.entry.tensor} on {worst.case}, {reason}.{cause}"
    if verdict.verdict == "PASS":
        closest = _closest(worst, name, point)
        return f"{verdict.op} is as accurate as its reference in {cases}; closest call: {closest}."
    reason = worst.entry.reason or f"closest call: {_closest(worst, name, point)}"
    return f"{verdict.op}: {verdict.verdict} over {cases}; {worst.entry.tensor} on {worst.case}: {reason}."


def _closest(row: Row, name: str, point: Point) -> str:
    return f"{row.entry.tensor} on {row.case}, {_against(name, point)}"


def _against(name: str, point: Point) -> str:
    limit = "its threshold" if name == GATE else f"the limit of {name}"
    return f"{point.size} {limit}" if point.ratio is not None else f"{name} {point.size}"


def _facts(verdict: Verdict, groups: tuple[Group, ...]) -> tuple[tuple[str, str], ...]:
    judged = plural(len(verdict.tensors), "result")
    cases = {entry.case for entry in verdict.tensors}
    captured = sum(case.family == "captured" for case in verdict.cases)
    facts = [
        ("Judged", f"{judged}: {plural(len(groups), 'tensor')} x {plural(len(cases), 'case')}"),
        ("From the run", plural(captured, "captured call") if captured else "no captured call"),
        ("Dtypes", ", ".join(sorted({entry.dtype for entry in verdict.tensors})) or "-"),
        ("Device", verdict.provenance.device or "-"),
    ]
    if verdict.fidelity.status != "no capture":
        facts.append(("Replay", verdict.fidelity.status))
    return tuple(facts)


def _constants(verdict: Verdict) -> tuple[tuple[str, str], ...]:
    constants = verdict.constants
    return (
        ("fudge_factor", f"{constants.fudge_factor:g}"),
        ("project_atol", f"{constants.project_atol:g}"),
        ("max_reference_relative_error", f"{constants.max_reference_relative_error:g}"),
    )


def _provenance(verdict: Verdict) -> tuple[tuple[str, str], ...]:
    source = verdict.provenance
    facts = [
        ("created", source.created),
        ("command", " ".join(source.command)),
        ("device", source.device + (" (Triton interpreter)" if source.interpreter else "")),
        ("kernel", source.kernel_file or ""),
        ("kernel sha256", source.kernel_sha256 or ""),
        ("capture", source.capture or ""),
        ("seed", str(source.seed)),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(source.versions.items()))),
    ]
    return tuple((label, value) for label, value in facts if value)
