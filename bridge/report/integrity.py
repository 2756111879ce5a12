"""Checks on a document of tables that somebody may have edited or cut: columns, and what they point to."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.verify.diff_document import (
    MATCH_KINDS,
    ORIGINS,
    STATUSES,
    CallTable,
    DiffDocument,
    ScanDocument,
    ScanTable,
)
from bridge.verify.verdict import OUTCOMES

#: Columns of numbers into a fixed list of words: column -> (smallest, number of words).
_WORDS = {"match": (0, len(MATCH_KINDS)), "status": (0, len(STATUSES)), "origin": (0, len(ORIGINS))}
_OUTCOMES = {"verdict": (-1, len(OUTCOMES))}

#: Columns of numbers into the pool; -1 is none, except in `_REQUIRED`.
_POOLED = {
    CallTable: ("key_a", "key_b", "kind", "op_a", "op_b", "phase", "module", "source", "dtype"),
    ScanTable: ("key", "op", "module", "phase", "source", "dtype", "tensor", "reason"),
}
_REQUIRED = frozenset({"kind", "phase", "module", "key", "op"})


def problem_of(document: object) -> str:
    """Return what makes a document's table unreadable, in words; "" when it is sound."""
    if isinstance(document, DiffDocument):
        rows = [detail.row for detail in document.details]
        rows += [suspect.row for suspect in document.suspects if suspect.row >= 0]
        rows += [row for row in (document.first_divergence, document.first_bit_difference) if row is not None]
        return _table(document.table, _WORDS) or _rows(rows, len(document.table))
    if isinstance(document, ScanDocument):
        rows = [finding.row for finding in document.findings if finding.row >= 0]
        rows += [detail.row for detail in document.details]
        return _table(document.table, _OUTCOMES) or _rows(rows, len(document.table))
    return ""


def _table(table: CallTable | ScanTable, words: dict[str, tuple[int, int]]) -> str:
    count = len(table)
    for name in table.__struct_fields__:
        column: Sequence[float] = getattr(table, name)
        if name != "pool" and len(column) != count:
            return f"column {name} has {len(column)} rows, the table has {count}"
    if not count:
        return ""
    limits = {name: (0 if name in _REQUIRED else -1, len(table.pool)) for name in _POOLED[type(table)]}
    for name, (least, size) in (limits | words).items():
        column = getattr(table, name)
        low, high = min(column), max(column)
        if low < least or high >= size:
            return f"column {name} points to entry {low if low < least else high} of {size}"
    return ""


def _rows(rows: list[int], count: int) -> str:
    wrong = next((row for row in rows if not 0 <= row < count), None)
    return "" if wrong is None else f"row {wrong} is named, the table has {count}"
