"""Results of a scan, ranked and put into its document. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from bridge.verify.diff_document import NonFinite, ScanDocument, ScanFinding, ScanTable, Side
from bridge.verify.diff_table import short_numbers
from bridge.verify.runs import Run
from bridge.verify.verdict import OUTCOMES, Outcome

#: Findings that a document lists.
MAX_FINDINGS = 50
#: Rows, and findings, that get a drill-down.
MAX_DETAILS = 12


class OpResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found of one call; verdict None: it could not be judged, and why."""

    key: str
    rank: int
    index: int
    tensor: str = ""
    verdict: Outcome | None = None
    reason: str = ""
    cause: str = ""
    margin: float | None = None  #: None with FAIL: infinite
    target_error: float | None = None
    reference_error: float | None = None
    threshold: float | None = None
    reference_relative_error: float | None = None


def _rank(result: OpResult) -> tuple[int, float]:
    verdict = -1 if result.verdict is None else OUTCOMES.index(result.verdict)
    margin = math.inf if result.verdict == "FAIL" and result.margin is None else result.margin or 0.0
    return -verdict, -margin


def assemble(
    run: Run, results: Mapping[int, OpResult], skipped: Mapping[str, int], nonfinite: tuple[NonFinite, ...]
) -> ScanDocument:
    """Rank results, worst first, and sum them up."""
    order = sorted(results, key=lambda position: (*_rank(results[position]), position))
    not_judged = dict(skipped)
    for result in results.values():
        if result.verdict is None:
            not_judged[result.reason] = not_judged.get(result.reason, 0) + 1
    counts: dict[str, int] = {}
    for result in results.values():
        if result.verdict is not None:
            counts[result.verdict] = counts.get(result.verdict, 0) + 1
    findings = _findings(run, results, order)
    verdict, summary = _answer(run, counts, findings, results, not_judged)
    return ScanDocument(
        verdict=verdict,
        summary=summary,
        capture=Side(label="A", path=str(run.path)),
        judged=sum(counts.values()),
        by_verdict=counts,
        not_judged=not_judged,
        findings=findings,
        nonfinite=nonfinite,
        table=_table(run, results, order),
    )


def rows_to_show(document: ScanDocument, results: Mapping[int, OpResult]) -> list[tuple[int, int]]:
    """(row, position) of the calls that get a drill-down: the first of each finding, and the worst."""
    order = sorted(results, key=lambda position: (*_rank(results[position]), position))
    rows = dict.fromkeys(finding.row for finding in document.findings[:MAX_DETAILS])
    rows |= dict.fromkeys(range(min(MAX_DETAILS, len(order))))
    return [(row, order[row]) for row in rows if results[order[row]].verdict is not None]


def _findings(run: Run, results: Mapping[int, OpResult], order: list[int]) -> tuple[ScanFinding, ...]:
    """Failed calls, those of one op and cause together."""
    groups: dict[tuple[str, str], list[int]] = {}
    for position in order:
        if results[position].verdict == "FAIL":
            groups.setdefault((run.calls[position].op, results[position].cause), []).append(position)
    place = {position: row for row, position in enumerate(order)}
    found = []
    for (op, cause), positions in list(groups.items())[:MAX_FINDINGS]:
        call, result = run.calls[positions[0]], results[positions[0]]
        found.append(
            ScanFinding(
                key=call.key,
                op=op,
                module=call.module,
                row=place[positions[0]],
                cause=cause or "unexplained",
                evidence=result.reason,
                calls=len(positions),
                next_command=f"bridge inspect {run.path} --call '{call.key}'",
            )
        )
    return tuple(found)


def _answer(
    run: Run,
    counts: Mapping[str, int],
    findings: tuple[ScanFinding, ...],
    results: Mapping[int, OpResult],
    not_judged: Mapping[str, int],
) -> tuple[Outcome, str]:
    judged, left = sum(counts.values()), sum(not_judged.values())
    rest = f"; {left} calls were not judged" if left else ""
    if findings:
        first = findings[0]
        failed = counts.get("FAIL", 0)
        if failed == 1:
            said = f"is wrong: {first.key} ({first.op}), {first.cause}, {first.evidence}"
            return "FAIL", f"1 of {judged} judged calls {said}{rest}"
        where = f"{first.calls} calls of {first.op}, worst" if first.calls > 1 else f"{first.op} at"
        said = f"first of all {first.cause} in {where} {first.key}: {first.evidence}"
        return "FAIL", f"{failed} of {judged} judged calls are wrong, {said}{rest}"
    if not judged:
        return "INCONCLUSIVE", f"none of {len(results)} calls could be judged{rest}"
    undecided = counts.get("INCONCLUSIVE", 0)
    if undecided == judged:
        return "INCONCLUSIVE", f"all {judged} judged calls are too ill-conditioned to decide{rest}"
    if undecided:
        limits = f"{undecided} are too ill-conditioned to decide"
        return (
            "PASS WITH LIMITATIONS",
            f"{judged - undecided} of {judged} judged calls agree with FP64; {limits}{rest}",
        )
    return "PASS", f"all {judged} judged calls agree with their FP64 re-computation{rest}"


def _table(run: Run, results: Mapping[int, OpResult], order: list[int]) -> ScanTable:
    numbers: dict[str, int] = {}

    def number(text: str | None) -> int:
        return -1 if text is None else numbers.setdefault(text, len(numbers))

    calls = [run.calls[position] for position in order]
    ranked = [results[position] for position in order]

    def figures(name: str) -> list[float | None]:
        values = [getattr(result, name) for result in ranked]
        return short_numbers(np.array([np.nan if value is None else value for value in values], np.float64))

    return ScanTable(
        key=[number(call.key) for call in calls],
        op=[number(call.op) for call in calls],
        module=[number(call.module) for call in calls],
        phase=[number(call.phase) for call in calls],
        source=[number(call.source) for call in calls],
        dtype=[number(call.outputs[0].dtype if call.outputs else None) for call in calls],
        tensor=[number(result.tensor) for result in ranked],
        reason=[number(result.reason) for result in ranked],
        rank=[call.rank for call in calls],
        index=[call.index for call in calls],
        verdict=[-1 if result.verdict is None else OUTCOMES.index(result.verdict) for result in ranked],
        margin=figures("margin"),
        target_error=figures("target_error"),
        reference_error=figures("reference_error"),
        threshold=figures("threshold"),
        reference_relative_error=figures("reference_relative_error"),
        pool=tuple(numbers),
    )
