"""What a diff report shows, computed once for every renderer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bridge.report.calls import CallRow, call_row, rows_with
from bridge.report.numbers import plural, short
from bridge.verify.diff_document import STATUSES, Attribution, DiffDocument, NonFinite, Side, Suspect

#: Columns of the suspects, most likely first.
SUSPECT_COLUMNS = ("#", "Call", "Op", "Phase", "Origin", "Born", "Inherited", "Verdict")

CALL_COLUMNS = ("Row", "Call", "Op", "Phase", "Status", "Origin", "Input diff", "Output diff", "Noise")

#: MatchKind and Origin, in the words of a reader who knows neither.
_MATCHED = {
    "override": "by --overrides",
    "key": "by key",
    "moved": "by place (key changed)",
    "structure": "by structure (same op, shapes and producers)",
    "renamed": "by place in the graph (another op)",
    "statistics": "by closest statistics",
    "module": "as a whole module (other ops inside)",
}
_CAUSES = {
    "born": "born in the call itself",
    "inherited": "inherited from its inputs",
    "amplified": "inherited and amplified",
    "nondeterministic": "nondeterministic (random or unrepeatable)",
    "entered": "entered from outside the step",
    "unknown": "of unknown cause",
}

_UNEQUAL = frozenset(STATUSES.index(name) for name in ("differs", "only a", "only b"))
_ROUNDED = frozenset(STATUSES.index(name) for name in ("rounding", "differs", "only a", "only b"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectLine:
    """One suspect, ready to paint."""

    suspect: Suspect
    cells: tuple[str, ...]  #: by SUSPECT_COLUMNS
    notes: tuple[tuple[str, str], ...]  #: label, text


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffView:
    """One diff or ab report."""

    document: DiffDocument
    sentence: str
    facts: tuple[tuple[str, str], ...]
    suspects: tuple[SuspectLine, ...]
    nonfinite: tuple[tuple[str, str], ...]  #: side, sentence
    matching: tuple[tuple[str, str], ...]
    provenance: tuple[tuple[str, str], ...]

    @property
    def outcome(self) -> str:
        return self.document.outcome

    def first_rows(self, limit: int) -> list[CallRow]:
        """Return the first rows beyond the noise, or that differ at all where none is."""
        table = self.document.table
        found = list(rows_with(table.status, _UNEQUAL, limit))
        if not found:
            found = list(rows_with(table.status, _ROUNDED, limit))
        return [call_row(table, row) for row in found]


def build_diff_view(document: DiffDocument) -> DiffView:
    """Compute everything that a report of two runs shows."""
    return DiffView(
        document=document,
        sentence=_capital(document.summary) or _sentence(document),
        facts=(
            ("A", _side(document.a)),
            ("B", _side(document.b)),
            ("Compared", _compared(document)),
        ),
        suspects=tuple(_suspect(i, item) for i, item in enumerate(document.suspects, 1)),
        nonfinite=tuple(nonfinite_line(item) for item in document.nonfinite),
        matching=_matching(document),
        provenance=_provenance(document),
    )


def call_cells(row: CallRow) -> tuple[str, ...]:
    """Return the texts of CALL_COLUMNS."""
    return (
        str(row.row),
        row.key,
        row.op,
        row.phase,
        row.status,
        row.origin or "-",
        difference(row.in_difference),
        difference(row.out_difference),
        short(row.noise),
    )


def difference(value: float | None) -> str:
    """Return a relative difference; exactly zero is said in words."""
    return "bit-equal" if value == 0 else short(value)


def _side(side: Side) -> str:
    parts = [side.path]
    if side.step is not None:
        parts.append(f"step {side.step}")
    parts.append(plural(side.calls, "call"))
    if len(side.ranks) > 1:
        parts.append(plural(len(side.ranks), "rank"))
    parts.append(f"{side.with_tensors:,} with tensors" if side.with_tensors else "digests only")
    loss = side.metrics.get("loss")
    if loss is not None:
        parts.append(f"loss {loss:.6g}")
    if not side.complete:
        parts.append("incomplete")
    return ", ".join(parts)


def _compared(document: DiffDocument) -> str:
    coverage = document.coverage
    words = {
        "equal": "equal",
        "rounding": "within rounding",
        "differs": "beyond it",
        "incomparable": "not comparable",
    }
    counts = [
        f"{coverage.by_status[name]:,} {word}" for name, word in words.items() if coverage.by_status.get(name)
    ]
    text = plural(coverage.pairs, "paired call")
    if counts:
        text += ": " + ", ".join(counts)
    if coverage.only_a or coverage.only_b:
        text += f"; {coverage.only_a:,} only in A, {coverage.only_b:,} only in B"
    return text


def _capital(summary: str) -> str:
    """A sentence that opens a report; names at its start stay as they are."""
    return f"The{summary[3:]}" if summary.startswith("the ") else summary


def _sentence(document: DiffDocument) -> str:
    pairs = plural(document.coverage.pairs, "paired call")
    match document.outcome:
        case "IDENTICAL":
            return f"The two runs are bit-identical in {pairs}."
        case "SAME WITHIN ROUNDING":
            return f"The two runs differ by rounding only, in {pairs}."
        case "NOTHING MATCHED":
            return "No call of one run has a counterpart in the other."
        case "INCONCLUSIVE":
            return f"The {pairs} do not settle whether the runs diverge."
    if document.suspects:
        first = document.suspects[0]
        return f"The runs part at {first.key} ({first.op}): {first.reason or 'first suspect'}."
    if document.first_divergence is not None:
        row = call_row(document.table, document.first_divergence)
        return f"The runs part at {row.key} ({row.op})."
    return "The runs diverge."


def _suspect(number: int, item: Suspect) -> SuspectLine:
    found = item.attribution
    notes = [("Why", item.reason), *attribution_facts(found), ("Source", item.source or "")]
    notes += [("Kernel", item.kernel or ""), ("Next", item.next_command)]
    if found is not None and found.detail and item.reason.startswith(found.detail):
        notes.remove(("Evidence", found.detail))
    return SuspectLine(
        suspect=item,
        cells=(
            str(number),
            item.key,
            item.op,
            item.phase or "-",
            found.origin if found and found.origin else "-",
            short(found.born) if found else "-",
            short(found.inherited) if found else "-",
            item.verdict or "-",
        ),
        notes=tuple((label, text) for label, text in notes if text),
    )


def attribution_facts(found: Attribution | None) -> list[tuple[str, str]]:
    """Return the numbers behind an attribution as labelled lines."""
    if found is None:
        return []
    lines = []
    basis = {"replay": "by replay", "structure": "by what the calls are told to do", "digest": "from digests"}
    if found.basis:
        lines.append(("Attributed", f"{found.origin or 'no difference'} {basis[found.basis]}"))
    numbers = [
        ("born |B(xB) - A(xB)|", found.born),
        ("inherited |A(xB) - A(xA)|", found.inherited),
        ("gain", found.gain),
        ("condition", found.condition),
        ("repeats of A", found.repeat),
        ("A against golden", found.reference_error),
        ("B against golden", found.target_error),
        ("threshold", found.threshold),
    ]
    text = ", ".join(f"{name} {short(value)}" for name, value in numbers if value is not None)
    if text:
        lines.append(("Numbers", text + (f" ({found.tensor})" if found.tensor else "")))
    if found.detail:
        lines.append(("Evidence", found.detail))
    return lines


def nonfinite_line(item: NonFinite) -> tuple[str, str]:
    """Return the side and a sentence about the first non-finite value of one run."""
    counts = (("NaN", item.nan), ("+Inf", item.pos_inf), ("-Inf", item.neg_inf))
    kinds = ", ".join(f"{count:,} {name}" for name, count in counts if count) or "non-finite values"
    verb = "comes in with" if item.entered else "makes"
    text = f"{item.key} ({item.op}, {item.phase}) {verb} {kinds} in {item.tensor}"
    if item.because:
        text += f": {item.because}"
    if item.elements:
        shown = ", ".join("[" + ", ".join(map(str, index)) + "]" for index in item.elements[:5])
        text += f"; first at {shown}"
    if item.reach:
        text += f"; {plural(item.reach, 'later call')} carry it on"
    return item.side, text + (f" ({item.source})" if item.source else "")


def _matching(document: DiffDocument) -> tuple[tuple[str, str], ...]:
    coverage = document.coverage
    untraced = "none traced to a call" if coverage.by_status.get("differs") else "none beyond rounding"
    return (
        ("Matched", _counted(coverage.by_match, _MATCHED, "no calls")),
        ("Differences", _counted(coverage.by_origin, _CAUSES, untraced)),
        ("Tensors", f"{coverage.tensors:,} pairs, {coverage.elementwise:,} of them element by element"),
        ("Replayed", plural(coverage.replayed, "call")),
    )


def _counted(counts: dict[str, int], words: dict[str, str], none: str) -> str:
    """Counts behind what their names mean, the largest first."""
    pairs = sorted(counts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{words.get(name, name)} {count:,}" for name, count in pairs if name and count) or none


def listed(counts: dict[str, int]) -> str:
    """Return counts by name, the largest first."""
    pairs: Iterable[tuple[str, int]] = sorted(counts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{count:,} {name or 'unnamed'}" for name, count in pairs if count) or "-"


def _provenance(document: DiffDocument) -> tuple[tuple[str, str], ...]:
    facts = [
        ("created", document.created),
        ("command", " ".join(document.command)),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(document.versions.items()))),
        ("constants", ", ".join(f"{name} {value:g}" for name, value in sorted(document.constants.items()))),
    ]
    for side in (document.a, document.b):
        facts += [
            (f"{side.label} command", " ".join(side.command)),
            (f"{side.label} device", side.device),
            (f"{side.label} seed", "" if side.seed is None else str(side.seed)),
            (f"{side.label} dtypes", ", ".join(side.dtypes)),
            (f"{side.label} versions", ", ".join(f"{name} {v}" for name, v in sorted(side.versions.items()))),
            (f"{side.label} problems", "; ".join(side.problems)),
        ]
    return tuple((label, value) for label, value in facts if value)
