"""What a scan report shows, computed once for every renderer."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.report.calls import ScanRow, scan_row
from bridge.report.diff_model import listed, nonfinite_line
from bridge.report.numbers import percent, plural, short, times
from bridge.verify.diff_document import ScanDocument, ScanFinding

FINDING_COLUMNS = ("#", "Cause", "Calls", "Op", "First call")

SCAN_COLUMNS = (
    "Call",
    "Op",
    "Phase",
    "Tensor",
    "Ref/golden",
    "Target error",
    "Threshold",
    "Margin",
    "Verdict",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanView:
    """One scan report."""

    document: ScanDocument
    sentence: str
    facts: tuple[tuple[str, str], ...]
    nonfinite: tuple[tuple[str, str], ...]
    not_judged: tuple[tuple[str, str], ...]  #: reason, count
    provenance: tuple[tuple[str, str], ...]

    @property
    def outcome(self) -> str:
        return self.document.verdict

    def worst_rows(self, limit: int) -> list[ScanRow]:
        """Return the first rows of the table, which is sorted worst first."""
        table = self.document.table
        return [scan_row(table, row) for row in range(min(limit, len(table)))]


def build_scan_view(document: ScanDocument) -> ScanView:
    """Compute everything that a report of one run shows."""
    side = document.capture
    where = [side.path] + ([f"step {side.step}"] if side.step is not None else [])
    facts = [
        ("Capture", ", ".join([*where, plural(side.calls, "call")])),
        ("Judged", f"{plural(document.judged, 'call')}: {listed(document.by_verdict)}"),
        ("Not judged", plural(sum(document.not_judged.values()), "call")),
    ]
    if document.seconds is not None:
        facts.append(
            ("Took", f"{short(document.seconds)} s, {plural(document.jobs, 'process', 'processes')}")
        )
    provenance = [
        ("created", document.created),
        ("command", " ".join(document.command)),
        ("device", side.device),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(document.versions.items()))),
        ("run versions", ", ".join(f"{name} {version}" for name, version in sorted(side.versions.items()))),
        ("constants", ", ".join(f"{name} {value:g}" for name, value in sorted(document.constants.items()))),
        ("problems", "; ".join(side.problems)),
    ]
    order = sorted(document.not_judged.items(), key=lambda item: -item[1])
    return ScanView(
        document=document,
        sentence=document.summary or _sentence(document),
        facts=tuple(facts),
        nonfinite=tuple(nonfinite_line(item) for item in document.nonfinite),
        not_judged=tuple((reason, f"{count:,}") for reason, count in order),
        provenance=tuple((label, value) for label, value in provenance if value),
    )


def finding_cells(number: int, item: ScanFinding) -> tuple[str, ...]:
    """Return the texts of FINDING_COLUMNS."""
    return str(number), item.cause, f"{item.calls:,}", item.op, item.key


def scan_cells(row: ScanRow) -> tuple[str, ...]:
    """Return the texts of SCAN_COLUMNS."""
    return (
        row.key,
        row.op,
        row.phase,
        row.tensor or "-",
        percent(row.reference_relative_error),
        short(row.target_error),
        short(row.threshold),
        times(row.margin) if row.margin is not None else "-",
        row.verdict,
    )


def _sentence(document: ScanDocument) -> str:
    calls = plural(document.judged, "captured call")
    if document.findings:
        first = document.findings[0]
        more = (
            f" and {plural(len(document.findings) - 1, 'other finding')}"
            if len(document.findings) > 1
            else ""
        )
        return f"{first.cause} at {first.key}{more}, in {calls} judged."
    if not document.judged:
        return "No captured call could be judged."
    return f"{calls} judged, each as accurate as its eager reference."
