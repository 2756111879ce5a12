"""Rows of a diff document: order, status and the columnar table. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.capture.record import Call
from bridge.verify.attribution import Attributions
from bridge.verify.births import unexplained
from bridge.verify.columns import KINDS, OUTPUT, PHASES, Bools, Columns, Floats, Ints, Numbers, Tensors
from bridge.verify.diff_document import ORIGINS, STATUSES, Attribution, CallTable, Status
from bridge.verify.divergence import Divergence, execution_order
from bridge.verify.finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The document's rows in execution order. `at_a`/`at_b`: positions of the calls, -1: none."""

    at_a: Ints
    at_b: Ints
    pair: Ints  #: -1: unmatched
    status: Ints  #: number in STATUSES
    origin: Ints  #: number in ORIGINS
    module: Bools  #: a module call
    row_of_pair: Ints
    row_of_a: Ints
    row_of_b: Ints

    def __len__(self) -> int:
        return len(self.pair)

    def first(self, statuses: tuple[Status, ...]) -> int | None:
        """First row of one of these statuses."""
        chosen = np.isin(self.status, [STATUSES.index(status) for status in statuses])
        # A module call begins before the ops inside it, which say more.
        for rows in (np.flatnonzero(chosen & ~self.module), np.flatnonzero(chosen)):
            if len(rows):
                return int(rows[0])
        return None

    def row_of(self, finding: Finding) -> int:
        if finding.pair >= 0:
            return int(self.row_of_pair[finding.pair])
        if finding.only_b >= 0:
            return int(self.row_of_b[finding.only_b])
        return int(self.row_of_a[finding.only_a])

    def call_of(self, a: Columns, b: Columns, finding: Finding) -> Call:
        return self.call(a, b, self.row_of(finding))

    def call(self, a: Columns, b: Columns, row: int) -> Call:
        """B's call of a row, or A's where B has none."""
        at_b = int(self.at_b[row])
        return b.calls[at_b] if at_b >= 0 else a.calls[int(self.at_a[row])]

    def key(self, a: Columns, b: Columns, row: int) -> str:
        return self.call(a, b, row).key

    def attribution_of(self, finding: Finding) -> Attribution:
        return Attribution(
            origin=finding.origin, basis=finding.basis, detail=finding.detail or finding.reason
        )


def rows_of(a: Columns, b: Columns, divergence: Divergence, attributions: Attributions) -> Rows:
    """Put pairs and unmatched calls in execution order and give each a status."""
    alignment = divergence.alignment
    pairs = len(alignment)
    none_a, none_b = np.full(len(alignment.only_a), -1), np.full(len(alignment.only_b), -1)
    order = execution_order(a, b, alignment)
    at_a = np.concatenate([alignment.a, alignment.only_a, none_b])[order]
    at_b = np.concatenate([alignment.b, none_a, alignment.only_b])[order]
    pair = np.concatenate([np.arange(pairs), none_a, none_b])[order]
    status = np.full(pairs, STATUSES.index("rounding"))
    comparable = np.zeros(pairs, bool)
    comparable[divergence.reads.pair[divergence.reads.comparable]] = True
    comparable[divergence.writes.pair[divergence.writes.comparable]] = True
    equal = divergence.out_equal & divergence.in_equal
    # Equal outputs of unequal inputs are equal where it counts: nothing is passed on.
    status[attributions.tainted] = STATUSES.index("differs")
    status[unexplained(a, b, divergence)] = STATUSES.index("differs")
    status[divergence.out_equal & ~attributions.tainted] = STATUSES.index("equal")
    status[equal & ~attributions.tainted] = STATUSES.index("equal")
    status[~comparable & ~attributions.tainted] = STATUSES.index("incomparable")
    whole = np.concatenate(
        [
            status,
            np.full(len(none_a), STATUSES.index("only a")),
            np.full(len(none_b), STATUSES.index("only b")),
        ]
    )[order]
    origin = np.concatenate([attributions.origin, np.zeros(len(none_a) + len(none_b), np.int64)])[order]
    numbers = np.arange(len(order))
    row_of_pair, row_of_a, row_of_b = np.full(pairs, -1), np.full(len(a), -1), np.full(len(b), -1)
    row_of_pair[pair[pair >= 0]] = numbers[pair >= 0]
    row_of_a[at_a[at_a >= 0]] = numbers[at_a >= 0]
    row_of_b[at_b[at_b >= 0]] = numbers[at_b >= 0]
    rows = Rows(
        at_a=at_a,
        at_b=at_b,
        pair=pair,
        status=whole,
        origin=origin,
        module=np.where(at_b >= 0, b.kind[at_b], a.kind[at_a]) == KINDS.index("module")
        if len(b) and len(a)
        else np.zeros(len(pair), bool),
        row_of_pair=row_of_pair,
        row_of_a=row_of_a,
        row_of_b=row_of_b,
    )
    for finding in attributions.findings:
        rows.origin[rows.row_of(finding)] = ORIGINS.index(finding.origin)
    return rows


class _Strings:
    """The document's own pool: only strings that rows use."""

    def __init__(self, a: Columns) -> None:
        self.items = a.pool.items()
        self.numbers = Numbers()

    def of_pool(self, numbers: Ints) -> list[int]:
        used, place = np.unique(numbers, return_inverse=True)
        items, number = self.items, self.numbers.__getitem__
        table = [number(str(items[item])) if item >= 0 else -1 for item in used.tolist()]
        found: list[int] = np.array(table, np.int64)[place.reshape(-1)].tolist()
        return found

    def number(self, text: str) -> int:
        return self.numbers[text]


def call_table(a: Columns, b: Columns, divergence: Divergence, rows: Rows) -> CallTable:
    """The columnar table of a document."""
    strings = _Strings(a)
    have_a, have_b = rows.at_a >= 0, rows.at_b >= 0

    def one(name: str) -> tuple[Ints, Ints]:
        left, right = np.full(len(rows), -1), np.full(len(rows), -1)
        left[have_a] = getattr(a, name)[rows.at_a[have_a]]
        right[have_b] = getattr(b, name)[rows.at_b[have_b]]
        return left, right

    def either(name: str) -> Ints:
        left, right = one(name)
        return np.where(have_b, right, left)

    match, noise = np.zeros(len(rows), np.int64), np.full(len(rows), np.nan)
    inside, outside = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    paired = rows.pair >= 0
    match[paired] = divergence.alignment.match[rows.pair[paired]]
    noise[paired] = divergence.noise[rows.pair[paired]]
    # A module reads upstream gradients too, and makes gradients: a wrong backward shows in its row.
    inside[paired] = np.fmax(divergence.in_difference, divergence.backward_in)[rows.pair[paired]]
    outside[paired] = np.fmax(divergence.out_difference, divergence.backward)[rows.pair[paired]]
    key_a, key_b = one("key")
    op_a, op_b = one("op")
    index_a, index_b = one("index")
    numbers = {name: strings.number(name) for name in (*KINDS, *PHASES)}
    kinds = (
        np.array([numbers[name] for name in KINDS])[either("kind")] if len(rows) else np.zeros(0, np.int64)
    )
    phases = np.array([numbers[name] for name in PHASES])[either("phase")] if len(rows) else kinds
    first_a, first_b = _first_outputs(a, rows.at_a), _first_outputs(b, rows.at_b)
    return CallTable(
        key_a=strings.of_pool(key_a),
        key_b=strings.of_pool(key_b),
        index_a=index_a.tolist(),
        index_b=index_b.tolist(),
        rank=either("rank").tolist(),
        step=either("step").tolist(),
        microbatch=either("microbatch").tolist(),
        kind=kinds.tolist(),
        op_a=strings.of_pool(op_a),
        op_b=strings.of_pool(op_b),
        phase=phases.tolist(),
        module=strings.of_pool(either("module")),
        source=strings.of_pool(either("source")),
        dtype=strings.of_pool(
            np.where(first_b >= 0, _pick(b.writes.dtype, first_b), _pick(a.writes.dtype, first_a))
        ),
        match=match.tolist(),
        status=rows.status.tolist(),
        origin=rows.origin.tolist(),
        in_difference=short_numbers(inside),
        out_difference=short_numbers(outside),
        noise=short_numbers(noise),
        rms_a=short_numbers(_rms(a.writes, first_a)),
        rms_b=short_numbers(_rms(b.writes, first_b)),
        pool=tuple(strings.numbers),
    )


def _first_outputs(columns: Columns, at: Ints) -> Ints:
    """Row of the first output in `writes`; -1: none."""
    writes = columns.writes
    first = np.full(len(at), -1)
    have = np.flatnonzero(at >= 0)
    start, stop = writes.start[at[have]], writes.start[at[have] + 1]
    some = stop > start
    first[have[some]] = start[some]
    outputs = first >= 0
    outputs[outputs] = writes.role[first[outputs]] == OUTPUT
    return np.where(outputs, first, -1)


def _pick(values: Ints, at: Ints) -> Ints:
    return np.where(at >= 0, values[np.maximum(at, 0)], -1) if len(values) else np.full(len(at), -1)


def _rms(tensors: Tensors, at: Ints) -> Floats:
    if not len(tensors.count):
        return np.full(len(at), np.nan)
    place = np.maximum(at, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.sqrt(tensors.sq_sum[place] / np.maximum(tensors.count[place], 1))
    return np.where(at >= 0, values, np.nan)


def short_numbers(values: Floats) -> list[Any]:
    """Four significant digits; None for what is not finite. Short numbers keep the document small."""
    finite = np.isfinite(values)
    safe = np.where(finite & (values != 0), np.abs(values), 1.0)
    power = 3 - np.floor(np.log10(safe)).astype(np.int64)
    up, down = 10.0 ** np.clip(power, 0, 300), 10.0 ** np.clip(-power, 0, 300)
    rounded = np.where(power >= 0, np.rint(np.where(finite, values, 0.0) * up) / up, 0.0)
    rounded = np.where(power < 0, np.rint(np.where(finite, values, 0.0) / down) * down, rounded)
    return [value if good else None for value, good in zip(rounded.tolist(), finite.tolist(), strict=True)]
