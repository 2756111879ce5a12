"""The figure of a scan: where in the model the worst calls are."""

from __future__ import annotations

import math

from bridge.report.calls import ScanRow, layer_of, scan_row
from bridge.report.error_figures import map_spec
from bridge.report.figures import Figure, escape
from bridge.report.flow_figures import MAX_COLUMNS, MAX_LAYERS
from bridge.report.numbers import short
from bridge.verify.diff_document import ScanDocument


def scan_map(document: ScanDocument, *, by: str) -> Figure:
    """Return the worst error / threshold per layer and column.

    Args:
        document: The scan.
        by: "op" for columns of ops, "module" for columns of the modules inside a layer.
    """
    table = document.table
    cells: dict[tuple[str, str], tuple[float, int]] = {}
    # Rows and columns in execution order, whatever the table is sorted by.
    for row in sorted(range(len(table)), key=lambda row: (table.rank[row], table.index[row])):
        found = scan_row(table, row)
        if found.verdict == "not judged":
            continue
        layer, inner = layer_of(found.module)
        place = layer, found.op if by == "op" else inner or "(itself)"
        value = math.inf if found.margin is None else found.margin
        known = cells.get(place)
        if known is None or value > known[0]:
            cells[place] = (value, row)
    spec, summary = map_spec(
        cells,
        describe=lambda row: _hover(scan_row(table, row)),
        limits=(MAX_LAYERS, MAX_COLUMNS),
        unit="threshold",
    )
    return Figure(title=f"Layer by {by}", summary=summary, spec=spec)


def _hover(row: ScanRow) -> str:
    lines = [f"<b>{escape(row.key)}</b>", escape(f"{row.op}, {row.phase}: {row.verdict}")]
    lines.append(f"target error {short(row.target_error)}, threshold {short(row.threshold)}")
    if row.reason:
        lines.append(escape(row.reason))
    return "<br>".join(lines)
