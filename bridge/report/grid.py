"""The table of calls as the page's script reads it: columns, what to search, filter and sort by."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bridge.report.calls import STATUS_WORDS, outcome_word, short_op
from bridge.verify.diff_document import MATCH_KINDS, ORIGINS, STATUSES, CallTable, ScanTable
from bridge.verify.verdict import OUTCOMES

#: text: numbers into the pool. enum: numbers into `words`. number: values, null where unknown.
#: index: whole numbers, -1 where there is none.
Kind = Literal["text", "enum", "index", "number"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the grid.

    name: short, for filters such as `out>1e-3`. width: a CSS grid track; "" hides the column, so that it
    only shows in the drill-down. words: enum only. choices: a filter with named sets of numbers.
    """

    name: str
    title: str
    kind: Kind
    values: Sequence[int] | Sequence[float | None]
    width: str = ""
    words: tuple[str, ...] = ()
    choices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    chosen: int = 0
    zero: str = "0"  #: how exactly zero reads

    def plain(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "width": self.width,
        }
        if self.words:
            facts["words"] = self.words
        if self.choices:
            facts |= {"choices": self.choices, "chosen": self.chosen}
        if self.zero != "0":
            facts["zero"] = self.zero
        return facts | _packed(self.kind, self.values)


def _packed(kind: Kind, values: Sequence[Any]) -> dict[str, Any]:
    """Return a column's data in its smallest form: one value, steps from row to row, or all values."""
    if values and list(values).count(values[0]) == len(values):
        return {"same": values[0], "count": len(values)}
    if kind != "number":
        steps = [*values[:1], *map(operator.sub, itertools.islice(values, 1, None), values)]
        # Keys and positions count upwards: steps of one pack to almost nothing.
        if len(set(steps)) * 2 < len(set(values)):
            return {"steps": steps}
    return {"values": list(values)}


def diff_grid(table: CallTable) -> dict[str, Any]:
    """Return the grid of a diff."""
    pool = list(table.pool)
    status = tuple(STATUS_WORDS[name] for name in STATUSES)
    everything = tuple(range(len(STATUSES)))
    unequal = tuple(number for number in everything if STATUSES[number] != "equal")
    beyond = tuple(STATUSES.index(name) for name in ("differs", "only a", "only b"))
    present = set(table.status)
    chosen = 2 if present & set(beyond) else 1 if present & set(unequal) else 0
    choices = [
        ("status: any", everything),
        ("all but equal", unequal),
        ("beyond noise or unmatched", beyond),
    ]
    choices += [(status[number], (number,)) for number in everything if number in present]
    columns = [
        Column(
            name="key",
            title="Call",
            kind="text",
            values=_either(table.key_b, table.key_a),
            width="minmax(14rem,4fr)",
        ),
        Column(
            name="op",
            title="Op",
            kind="text",
            values=_short_ops(pool, _either(table.op_b, table.op_a)),
            width="minmax(6.5rem,1.2fr)",
        ),
        _named("phase", "Phase", table.phase, table.pool, width="5.5rem"),
        Column(
            name="status",
            title="Status",
            kind="enum",
            values=table.status,
            words=status,
            width="7rem",
            choices=tuple(choices),
            chosen=chosen,
        ),
        _enum("origin", "Origin", table.origin, ORIGINS, width="7rem"),
        _number("in", "Input diff", table.in_difference),
        _number("out", "Output diff", table.out_difference),
        _number("noise", "Noise", table.noise, zero="0"),
        Column(
            name="other",
            title="Key in A, where another",
            kind="text",
            values=_other(table.key_a, table.key_b),
        ),
        Column(
            name="opa", title="Op in A, where another", kind="text", values=_other(table.op_a, table.op_b)
        ),
        Column(name="module", title="Module", kind="text", values=table.module),
        Column(name="source", title="Source", kind="text", values=table.source),
        Column(name="dtype", title="Dtype", kind="text", values=table.dtype),
        _enum("match", "Matched by", table.match, MATCH_KINDS),
        Column(name="kind", title="Kind", kind="text", values=table.kind),
        Column(name="rank", title="Rank", kind="number", values=table.rank),
        Column(name="step", title="Step", kind="number", values=table.step),
        Column(name="microbatch", title="Microbatch", kind="number", values=table.microbatch),
        Column(name="a", title="Index in A", kind="index", values=table.index_a),
        Column(name="b", title="Index in B", kind="index", values=table.index_b),
        Column(name="rmsa", title="RMS in A", kind="number", values=table.rms_a),
        Column(name="rmsb", title="RMS in B", kind="number", values=table.rms_b),
    ]
    return _grid(pool, columns, len(table), search=("key", "op", "module", "source", "other", "opa", "dtype"))


def scan_grid(table: ScanTable) -> dict[str, Any]:
    """Return the grid of a scan."""
    pool = list(table.pool)
    words = (*OUTCOMES, outcome_word(-1))
    verdicts = [number if number >= 0 else len(OUTCOMES) for number in table.verdict]
    present = set(verdicts)
    everything = tuple(range(len(words)))
    choices = [("verdict: any", everything)]
    choices += [(words[number], (number,)) for number in everything if number in present]
    columns = [
        Column(name="key", title="Call", kind="text", values=table.key, width="minmax(14rem,4fr)"),
        Column(
            name="op",
            title="Op",
            kind="text",
            values=_short_ops(pool, table.op),
            width="minmax(6.5rem,1.2fr)",
        ),
        _named("phase", "Phase", table.phase, table.pool, width="5.5rem"),
        Column(name="dtype", title="Dtype", kind="text", values=table.dtype, width="5rem"),
        _number("ref", "Ref/golden", table.reference_relative_error, zero="0"),
        _number("err", "Target error", table.target_error, zero="0"),
        _number("limit", "Threshold", table.threshold, zero="0"),
        _number("margin", "Margin", table.margin, zero="0"),
        Column(
            name="verdict",
            title="Verdict",
            kind="enum",
            values=verdicts,
            words=words,
            width="7rem",
            choices=tuple(choices),
        ),
        Column(name="tensor", title="Tensor", kind="text", values=table.tensor),
        Column(name="reason", title="Reason", kind="text", values=table.reason),
        Column(name="module", title="Module", kind="text", values=table.module),
        Column(name="source", title="Source", kind="text", values=table.source),
        Column(name="rank", title="Rank", kind="number", values=table.rank),
        Column(name="index", title="Index", kind="number", values=table.index),
        Column(name="referr", title="Reference error", kind="number", values=table.reference_error),
    ]
    return _grid(pool, columns, len(table), search=("key", "op", "module", "source", "reason", "dtype"))


def _grid(
    pool: Sequence[str], columns: list[Column], count: int, *, search: tuple[str, ...]
) -> dict[str, Any]:
    return {"pool": pool, "count": count, "search": search, "columns": [column.plain() for column in columns]}


def _either(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [one if one >= 0 else other for one, other in zip(first, second, strict=True)]


def _short_ops(pool: list[str], values: Sequence[int]) -> list[int]:
    """Return a column of short op names, which are added to the pool."""
    short = {}
    for number in dict.fromkeys(values):
        if number >= 0:
            short[number] = len(pool)
            pool.append(short_op(pool[number]))
    return [short.get(number, -1) for number in values]


def _other(column: Sequence[int], shown: Sequence[int]) -> list[int]:
    """Return the column only where both sides have a value and they differ."""
    return [value if value != seen and seen >= 0 else -1 for value, seen in zip(column, shown, strict=True)]


def _number(name: str, title: str, values: Sequence[float | None], *, zero: str = "bit-equal") -> Column:
    return Column(name=name, title=title, kind="number", values=values, width="5.2rem", zero=zero)


def _enum(name: str, title: str, values: Sequence[int], words: Sequence[str], *, width: str = "") -> Column:
    present = sorted(set(values))
    choices = [(f"{title.lower()}: any", tuple(range(len(words))))]
    choices += [(words[number] or f"no {title.lower()}", (number,)) for number in present]
    return Column(
        name=name,
        title=title,
        kind="enum",
        values=values,
        words=tuple(words),
        width=width,
        choices=tuple(choices) if len(present) > 1 else (),
    )


def _named(name: str, title: str, values: Sequence[int], pool: Sequence[str], *, width: str = "") -> Column:
    """A column of few strings, numbered anew in order of appearance so that it can be chosen from."""
    numbers = {number: place for place, number in enumerate(dict.fromkeys(values))}
    return _enum(
        name, title, [numbers[value] for value in values], [pool[number] for number in numbers], width=width
    )
