"""Where NaN and Inf come from: the first call of a run that makes one out of inputs that had none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bridge.capture.record import Call, Digest, TensorRecord
from bridge.errors import CaptureError
from bridge.verify.columns import KINDS, Bools, Columns, Tensors, is_empty, reads_of, short_op, take
from bridge.verify.diff_document import NonFinite
from bridge.verify.runs import Run

MAX_ELEMENTS = 8

#: Largest finite value, for "exceeds the largest float16".
LARGEST = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}


def first_nonfinite(columns: Columns, run: Run) -> tuple[NonFinite, ...]:
    """The first NaN and the first Inf that were not there before, with their cause as far as it shows.

    An infinity that a call was told to write (a mask's fill value) is none; fresh, unwritten memory
    holds whatever it holds and is left out.
    """
    bad = np.unique(columns.writes.call[columns.writes.nonfinite > 0])
    order = bad[np.lexsort((columns.rank[bad], columns.index[bad], columns.step[bad]))]
    found: list[NonFinite] = []
    for what in ("nan", "inf"):
        entered = _entered(columns, run, what, order)
        if entered is not None:
            found.append(entered)
            continue
        for at in order[_makes(columns, what)[order]].tolist():
            call = columns.calls[at]
            if is_empty(short_op(call.op)):
                continue
            record = next((item for item in call.outputs if _has(item.digest, what)), None)
            if record is None:
                continue
            read = zip(call.inputs, take(columns.reads, at), strict=False)
            if any(_has(item.digest, what) and not columns.reads.void[row] for item, row in read):
                continue
            if what == "inf" and _told_infinite(call):
                continue
            found.append(_describe(columns, run, call, record, entered=False, what=what, after=at))
            break
    places = [(item.index, number) for number, item in enumerate(found)]
    return tuple(found[number] for _, number in sorted(places))


def _makes(columns: Columns, what: str) -> Bools:
    """Calls, not modules, of which some output has a NaN, or an infinity."""
    writes = columns.writes
    counts = writes.nan if what == "nan" else writes.nonfinite - writes.nan
    made = np.zeros(len(columns), bool)
    made[writes.call[counts > 0]] = True
    return np.asarray(made & (columns.kind != KINDS.index("module")))


def _has(digest: Digest | None, what: str) -> bool:
    if digest is None:
        return False
    return digest.nan > 0 if what == "nan" else digest.pos_inf + digest.neg_inf > 0


def _told_infinite(call: Call) -> bool:
    def infinite(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(infinite(item) for item in value)
        if isinstance(value, dict):
            return value.get("float") in ("inf", "-inf")
        return isinstance(value, float) and math.isinf(value)

    return any(infinite(value) for value in call.attrs.values())


def _entered(columns: Columns, run: Run, what: str, order: Any) -> NonFinite | None:
    """A parameter, buffer or batch that is not finite when the step begins, before anything made it."""
    reads: Tensors = columns.reads
    rows = np.flatnonzero((reads.nonfinite > 0) & (reads.producer < 0) & ~reads.void)
    first = int(columns.index[order[0]]) if len(order) else None
    made: dict[int, int] = {}
    for row in np.flatnonzero(columns.writes.nonfinite > 0).tolist():
        maker = int(columns.index[columns.writes.call[row]])
        content = int(columns.writes.hash[row])
        made[content] = min(maker, made.get(content, maker))
    for row in rows[np.lexsort((columns.rank[reads.call[rows]], columns.index[reads.call[rows]]))].tolist():
        at = int(reads.call[row])
        call = columns.calls[at]
        record = reads_of(call)[row - int(reads.start[at])]
        fresh = first is not None and int(columns.index[at]) > first
        earlier = made.get(int(reads.hash[row]), call.index) < call.index
        if not _has(record.digest, what) or earlier or fresh:
            continue
        return _describe(columns, run, call, record, entered=True, what=what, after=at)
    return None


def _describe(
    columns: Columns, run: Run, call: Call, record: TensorRecord, *, entered: bool, what: str, after: int
) -> NonFinite:
    digest = record.digest
    assert digest is not None
    later = columns.writes.call[columns.writes.nonfinite > 0]
    same = columns.rank[later] == columns.rank[after]
    reach = np.unique(later[same & (columns.index[later] > columns.index[after])])
    return NonFinite(
        side=run.label,
        key=call.key,
        op=call.op,
        module=call.module,
        phase=call.phase,
        rank=call.rank,
        index=call.index,
        tensor=record.name,
        nan=digest.nan,
        pos_inf=digest.pos_inf,
        neg_inf=digest.neg_inf,
        entered=entered,
        elements=_elements(run, record),
        because="it was so when the step began" if entered else _because(call, record, what),
        reach=len(reach),
        source=call.source,
    )


def _elements(run: Run, record: TensorRecord) -> tuple[tuple[int, ...], ...]:
    if run.capture is None or record.blob is None:
        return ()
    try:
        tensor = run.capture.tensor(record)
    except CaptureError:
        return ()  # positions are an extra; the digest has already told what happened
    bad = (~tensor.isfinite()).nonzero()[:MAX_ELEMENTS].tolist()
    return tuple(tuple(int(place) for place in index) for index in bad)


def _because(call: Call, record: TensorRecord, what: str) -> str:
    """Cause in words, from what the digests of the inputs show."""
    name, limit = short_op(call.op).rstrip("_"), LARGEST.get(record.dtype)
    digests = [item.digest for item in call.inputs if item.digest is not None and item.digest.count]
    high = [digest.max for digest in digests if digest.max is not None]
    low = [digest.min for digest in digests if digest.min is not None]
    infinite = any(digest.pos_inf + digest.neg_inf for digest in digests)
    if not high or not low:
        return "its inputs have no finite element"
    most = max(max(high), -min(low))
    if name in ("exp", "exp2", "expm1") and limit and max(high) > math.log(limit):
        return f"{name} of {max(high):.4g} exceeds the largest {record.dtype} ({limit:.6g})"
    if name.startswith("log") and low[0] <= 0:
        kind = "a negative number" if low[0] < 0 else "zero"
        return f"{name} of {kind} (smallest input {low[0]:.4g})"
    if name in ("sqrt", "rsqrt") and low[0] <= 0:
        return f"{name} of {low[0]:.4g}"
    if name in ("div", "reciprocal", "true_divide") and low[-1] <= 0 <= high[-1]:
        return "division by a tensor that reaches zero"
    if name == "pow" and low[0] <= 0:
        return f"pow of {low[0]:.4g}"
    if what == "nan" and infinite:
        return "an infinite input: Inf - Inf, 0 * Inf, or a row that is masked entirely"
    if limit and (name in ("copy", "to") or record.dtype in ("float16", "float8_e4m3fn", "float8_e5m2")):
        return f"inputs up to {most:.4g}; the result exceeds the largest {record.dtype} ({limit:.6g})"
    if what == "inf" and limit:
        return f"inputs up to {most:.4g}; the result exceeds the largest {record.dtype} ({limit:.4g})"
    return f"finite inputs up to {most:.4g}"
