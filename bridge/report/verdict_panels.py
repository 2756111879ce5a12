"""The part of the verify page that shows one tensor's errors, for the worst case and for any other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bridge.report.error_figures import error_map, histogram
from bridge.report.figures import Figure
from bridge.report.numbers import precise, short
from bridge.report.verdict_model import Group, Row
from bridge.verify.verdict import Exponent, Outcome, TensorVerdict

WORST_COLUMNS = ("Worst element", "Golden", "Reference", "Target", "|Error|", "ULP")

#: Map blocks that one page may hold: about 6 bytes each once packed.
MAX_BLOCKS = 250_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One tensor in one case, ready to paint."""

    case: str
    outcome: Outcome
    reason: str
    checks: tuple[tuple[str, ...], ...]  #: check, value, limit, value/limit, where and why
    failed: tuple[bool, ...]  #: by check
    worst: tuple[tuple[str, ...], ...]  #: by WORST_COLUMNS
    map: Figure | None
    histogram: Figure | None
    map_name: str
    histogram_name: str

    def plain(self) -> dict[str, Any]:
        """Return what the page's script needs to show this result."""
        return {
            "reason": self.reason,
            "checks": self.checks,
            "failed": self.failed,
            "worst": self.worst,
            "map": self.map_name if self.map else None,
            "map_summary": self.map.summary if self.map else "",
            "histogram": self.histogram_name if self.histogram else None,
            "histogram_summary": self.histogram.summary if self.histogram else "",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """All results of one tensor, worst first."""

    key: str  #: unique on the page
    tensor: str
    results: tuple[Result, ...]

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def mapped(self) -> Result | None:
        """The first result with a map: the page needs a place for one as soon as any has one."""
        return next((result for result in self.results if result.map is not None), None)

    @property
    def spread(self) -> Result | None:
        """The first result with a histogram."""
        return next((result for result in self.results if result.histogram is not None), None)

    @property
    def has_worst(self) -> bool:
        return any(result.worst for result in self.results)


def build_panels(groups: Iterable[Group], *, limit: int, prefix: str = "") -> tuple[tuple[Panel, ...], str]:
    """Return one panel per tensor and a sentence about what was left out to keep the page small.

    The worst case of every tensor comes first into the budget, then all others by rank.

    Args:
        groups: The results by tensor.
        limit: Cases shown per tensor at most.
        prefix: Keeps the names of several verdicts on one page apart.
    """
    groups = tuple(groups)
    order = sorted(
        (
            (rank > 0, _negated(row), place, rank)
            for place, group in enumerate(groups)
            for rank, row in enumerate(group.rows[:limit])
        ),
    )
    drawn: set[tuple[int, int]] = set()
    blocks = left_out = 0
    for _, _, place, rank in order:
        source = groups[place].rows[rank].entry.error_map
        size = sum(map(len, source.values)) if source is not None else 0
        if blocks + size > MAX_BLOCKS:
            left_out += 1
            continue
        blocks += size
        drawn.add((place, rank))
    panels = tuple(
        Panel(
            key=prefix + group.tensor,
            tensor=group.tensor,
            results=tuple(
                _result(row, name=f"{prefix}{place}-{rank}", with_map=(place, rank) in drawn)
                for rank, row in enumerate(group.rows[:limit])
            ),
        )
        for place, group in enumerate(groups)
    )
    note = (
        f"{left_out} maps are left out to keep the page small; the JSON document has them."
        if left_out
        else ""
    )
    return panels, note


def _negated(row: Row) -> tuple[float, ...]:
    return tuple(-part for part in row.rank)


def _conditioning(entry: TensorVerdict) -> tuple[tuple[str, ...], ...]:
    """Growth and distribution of errors, measured where the gate is not valid, as rows of the checks."""
    rows: list[tuple[str, ...]] = []
    growth = entry.growth
    if growth is not None:
        text = (
            f"95 % interval {_interval(growth.target)}; reference n^{growth.reference.value:.2f}, "
            f"{_interval(growth.reference)}; lengths {', '.join(map(str, growth.lengths))}, "
            f"{growth.seeds} seeds; {growth.statistic}"
        )
        rows.append(("growth with length", f"n^{growth.target.value:.2f}", "-", "-", text))
    for name, spread in (("target", entry.target_spread), ("reference", entry.reference_spread)):
        if spread is not None:
            text = (
                f"median; 90 % below {short(spread.p90)}, 99 % below {short(spread.p99)}, "
                f"largest {short(spread.largest)}, mean with sign {short(spread.mean)}"
            )
            rows.append((f"|error| of the {name}", short(spread.median), "-", "-", text))
    return tuple(rows)


def _interval(exponent: Exponent) -> str:
    return f"{exponent.low:.2f} to {exponent.high:.2f}"


def _result(row: Row, *, name: str, with_map: bool) -> Result:
    entry = row.entry
    checks = tuple(
        (
            check,
            short(point.value, missing="not finite" if point.binding else "-"),
            short(point.limit),
            point.size,
            "; ".join(part for part in (point.detail, point.note) if part),
        )
        for check, point in row.checks
    )
    conditioning = _conditioning(entry)
    worst = tuple(
        (
            "[" + ", ".join(map(str, element.index)) + "]",
            *(
                precise(value, missing="not finite")
                for value in (element.golden, element.reference, element.target)
            ),
            *(short(value, missing="not finite") for value in (element.error, element.ulp)),
        )
        for element in entry.worst
    )
    counts = entry.histogram
    if counts is not None and not any((*counts.reference, *counts.target)):
        counts = None  # No finite error: nothing to draw.
    return Result(
        case=entry.case,
        outcome=entry.verdict,
        reason=entry.reason,
        checks=checks + conditioning,
        failed=tuple(point.binding and not point.passed for _, point in row.checks)
        + (False,) * len(conditioning),
        worst=worst,
        map=error_map(entry.error_map) if with_map and entry.error_map is not None else None,
        histogram=histogram(counts, failed=entry.verdict == "FAIL") if counts is not None else None,
        map_name=f"map-{name}",
        histogram_name=f"histogram-{name}",
    )
