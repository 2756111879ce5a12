"""Drill-down of the rows that matter: both sides of every tensor, element by element where it is stored."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from bridge.capture.record import Digest, TensorRecord
from bridge.errors import CaptureError
from bridge.verify.attribution import Attributions
from bridge.verify.columns import ROLES, Columns, reads_of, take, writes_of
from bridge.verify.diff_document import MATCH_KINDS, STATUSES, CallDetail, TensorDiff
from bridge.verify.diff_table import Rows
from bridge.verify.divergence import Divergence, TensorPairs
from bridge.verify.runs import Run

if TYPE_CHECKING:
    from bridge.verify.counterfactual import Replays

#: Rows that get a drill-down, beside the suspects.
WORST_ROWS = 16
#: Tensors of one row that are compared element by element: what it wrote first.
MAX_TENSORS = 6
#: Tensors of more elements are compared from their digests only: a drill-down must stay cheap.
MAX_ELEMENTS = 1 << 24

_HOW = {
    "override": "by the overrides file",
    "key": "same key",
    "moved": "same place and op, another counter or module name",
    "structure": "same op and shapes, inputs from paired calls",
    "renamed": "same place, another op",
    "statistics": "same op and shapes, equal contents",
    "module": "at the boundary of a run of calls that differs",
}


def interesting_rows(rows: Rows, divergence: Divergence, suspects: list[int]) -> list[int]:
    """Rows to drill into: suspects, first differences, the largest differences."""
    chosen = dict.fromkeys(row for row in suspects if row >= 0)
    for statuses in (("rounding", "differs"), ("differs",)):
        first = rows.first(statuses)
        if first is not None:
            chosen.setdefault(first)
    differing = np.flatnonzero(rows.status == STATUSES.index("differs"))
    differing = differing[(rows.pair[differing] >= 0) & ~rows.module[differing]]
    size = np.nan_to_num(divergence.out_difference[rows.pair[differing]])
    for row in differing[np.argsort(-size, kind="stable")][:WORST_ROWS].tolist():
        chosen.setdefault(row)
    return sorted(chosen)


def call_detail(
    row: int,
    run_a: Run,
    run_b: Run,
    a: Columns,
    b: Columns,
    divergence: Divergence,
    attributions: Attributions,
    rows: Rows,
    replays: Replays | None,
) -> CallDetail:
    """Everything known about one row."""
    at_a, at_b, pair = int(rows.at_a[row]), int(rows.at_b[row]), int(rows.pair[row])
    tensors: list[TensorDiff] = []
    if pair >= 0:
        for pairs, side in ((divergence.writes, "writes"), (divergence.reads, "reads")):
            for place in np.flatnonzero(pairs.pair == pair).tolist():
                close = sum(tensor.elementwise for tensor in tensors) < MAX_TENSORS
                tensors.append(_tensor(pairs, place, side, run_a, run_b, a, b, divergence, close=close))
        tensors.sort(key=lambda tensor: ROLES.index(tensor.role))
    match = MATCH_KINDS[int(divergence.alignment.match[pair])] if pair >= 0 else ""
    how = _HOW.get(match, "no counterpart")
    if pair in divergence.alignment.runs:
        run_of_a, run_of_b = divergence.alignment.runs[pair]
        how += f": {len(run_of_a)} calls of A for {len(run_of_b)} of B"
    return CallDetail(
        row=row,
        tensors=tuple(tensors),
        attribution=replays.of(pair) if replays is not None and pair >= 0 else None,
        arguments=attributions.arguments.get(pair, {}) if pair >= 0 else {},
        producers_a=producers(a, at_a),
        producers_b=producers(b, at_b),
        how_matched=how,
    )


def producers(columns: Columns, call: int) -> tuple[str, ...]:
    if call < 0:
        return ()
    made = [int(columns.reads.producer[row]) for row in take(columns.reads, call)]
    return tuple(dict.fromkeys(columns.calls[producer].key for producer in made if producer >= 0))


def record_of(columns: Columns, side: str, row: int) -> TensorRecord:
    """The record behind a row of `reads` or `writes`."""
    tensors = columns.reads if side == "reads" else columns.writes
    call = columns.calls[int(tensors.call[row])]
    at = row - int(tensors.start[int(tensors.call[row])])
    return (reads_of(call) if side == "reads" else writes_of(call))[at]


def _tensor(
    pairs: TensorPairs,
    place: int,
    side: str,
    run_a: Run,
    run_b: Run,
    a: Columns,
    b: Columns,
    divergence: Divergence,
    *,
    close: bool,
) -> TensorDiff:
    left = record_of(a, side, int(pairs.a[place]))
    right = record_of(b, side, int(pairs.b[place]))
    difference, noise = float(pairs.difference[place]), float(divergence.noise[pairs.pair[place]])
    known = TensorDiff(
        role=ROLES[int(pairs.role[place])],  # type: ignore[arg-type]
        name_a=left.name,
        name_b=right.name,
        dtype_a=left.dtype,
        dtype_b=right.dtype,
        shape_a=left.shape,
        shape_b=right.shape,
        digest_a=_exact(left.digest),
        digest_b=_exact(right.digest),
        equal=bool(pairs.equal[place]) if pairs.comparable[place] else None,
        difference=difference if np.isfinite(difference) else None,
        noise=noise if side == "writes" else None,
        note="" if pairs.comparable[place] else "not comparable: other shapes, or no digest",
    )
    if (
        not close
        or known.equal
        or left.blob is None
        or right.blob is None
        or run_a.capture is None
        or run_b.capture is None
    ):
        return known
    if left.shape != right.shape or math.prod(left.shape) > MAX_ELEMENTS:
        return known
    from bridge.verify.elementwise import compare_tensors

    try:
        return compare_tensors(run_a.capture.tensor(left), run_b.capture.tensor(right), known)
    except CaptureError as error:
        return msgspec.structs.replace(known, note=f"stored, but not readable: {error}")


def _exact(digest: Digest | None) -> Digest | None:
    """A digest whose every figure is known; those of logs are not and stay out of the document."""
    return digest if digest is not None and digest.hash else None
