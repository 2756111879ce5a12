"""Reading the columnar tables of a diff or a scan, a row at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bridge.verify.diff_document import MATCH_KINDS, ORIGINS, STATUSES, CallTable, ScanTable
from bridge.verify.verdict import OUTCOMES

#: Name of a row's status as a reader sees it.
STATUS_WORDS = dict(
    zip(STATUSES, ("equal", "rounding", "differs", "not comparable", "only A", "only B"), strict=True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow:
    """One row of a diff's table with its strings looked up; "" where there is none."""

    row: int
    key_a: str
    key_b: str
    op_a: str
    op_b: str
    phase: str
    module: str
    kind: str
    source: str
    dtype: str
    match: str
    status: str
    origin: str
    in_difference: float | None
    out_difference: float | None
    noise: float | None

    @property
    def key(self) -> str:
        """B's key, and A's too where it is another."""
        if self.key_a and self.key_b and self.key_a != self.key_b:
            return f"{self.key_b} (A: {self.key_a})"
        return self.key_b or self.key_a

    @property
    def op(self) -> str:
        if self.op_a and self.op_b and self.op_a != self.op_b:
            return f"{short_op(self.op_b)} (A: {short_op(self.op_a)})"
        return short_op(self.op_b or self.op_a)


def call_row(table: CallTable, row: int) -> CallRow:
    """Return one row of a diff's table."""
    text = _Texts(table.pool)
    return CallRow(
        row=row,
        key_a=text(table.key_a, row),
        key_b=text(table.key_b, row),
        op_a=text(table.op_a, row),
        op_b=text(table.op_b, row),
        phase=text(table.phase, row),
        module=text(table.module, row),
        kind=text(table.kind, row),
        source=text(table.source, row),
        dtype=text(table.dtype, row),
        match=MATCH_KINDS[table.match[row]],
        status=STATUS_WORDS[STATUSES[table.status[row]]],
        origin=ORIGINS[table.origin[row]],
        in_difference=table.in_difference[row],
        out_difference=table.out_difference[row],
        noise=table.noise[row],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRow:
    """One row of a scan's table with its strings looked up; "" where there is none."""

    row: int
    key: str
    op: str
    module: str
    phase: str
    source: str
    dtype: str
    tensor: str
    reason: str
    verdict: str  #: an outcome, or "not judged"
    margin: float | None
    target_error: float | None
    threshold: float | None
    reference_relative_error: float | None


def scan_row(table: ScanTable, row: int) -> ScanRow:
    """Return one row of a scan's table."""
    text = _Texts(table.pool)
    return ScanRow(
        row=row,
        key=text(table.key, row),
        op=short_op(text(table.op, row)),
        module=text(table.module, row),
        phase=text(table.phase, row),
        source=text(table.source, row),
        dtype=text(table.dtype, row),
        tensor=text(table.tensor, row),
        reason=text(table.reason, row),
        verdict=outcome_word(table.verdict[row]),
        margin=table.margin[row],
        target_error=table.target_error[row],
        threshold=table.threshold[row],
        reference_relative_error=table.reference_relative_error[row],
    )


def outcome_word(number: int) -> str:
    """Return the outcome a scan's row holds; -1 is "not judged"."""
    return OUTCOMES[number] if number >= 0 else "not judged"


def rows_with(column: Sequence[int], wanted: frozenset[int], limit: int) -> Iterator[int]:
    """Yield the first `limit` rows whose column holds one of `wanted`."""
    found = 0
    for row, value in enumerate(column):
        if value in wanted:
            yield row
            found += 1
            if found == limit:
                return


@functools.lru_cache(1 << 16)
def short_op(op: str) -> str:
    """Return "mm" for "aten::mm.default" and "aten.mm.default"; other names stay as they are."""
    name = op.removeprefix("aten::").removeprefix("aten.")
    return name.removesuffix(".default") if name != op else op


@functools.lru_cache(1 << 16)
def layer_of(module: str) -> tuple[str, str]:
    """Split a module's name after its first number: "layers.3.attention.wq" -> "layers.3", "attention.wq"."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1]), ".".join(parts[i + 1 :])
    return (parts[0] or "(root)"), ".".join(parts[1:])


class _Texts:
    def __init__(self, pool: Sequence[str]) -> None:
        self.pool = pool

    def __call__(self, column: Sequence[int], row: int) -> str:
        number = column[row]
        return self.pool[number] if number >= 0 else ""
