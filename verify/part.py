"""A few rows of a large case, small enough to try wrong variants on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from bridge.verify.blocks import Plan
from bridge.verify.case import Case

#: Elements of all inputs together, and rows.
_ELEMENTS, _ROWS = 1 << 16, 256


def some_rows(plan: Plan, wrong: Collection[int]) -> Case:
    """Rows from everywhere, and up to as many of the `wrong` ones; in memory of their own."""
    case, extent = plan.case, plan.rows.extent
    size = sum(t.numel() for t in case.inputs)
    count = max(2, min(extent, _ROWS, _ELEMENTS * extent // size))
    first = sorted(wrong)[: count // 2]
    spread = count - len(first)
    rows = sorted({*first, *((extent - 1) * place // max(1, spread - 1) for place in range(spread))})
    picked = plan.rows.pick(case, rows)
    return replace(picked, name=f"{case.name}, {len(rows)} of its {extent} rows", configs=False)
