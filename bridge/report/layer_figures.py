"""Maps of the model: the worst call per layer and op, and per layer and module inside it."""

from __future__ import annotations

import math
from collections.abc import Callable

from bridge.report.calls import ScanRow, call_row, layer_of, scan_row, short_op
from bridge.report.error_figures import map_spec
from bridge.report.figures import Figure, escape
from bridge.report.flow_figures import hover
from bridge.report.numbers import short
from bridge.verify.diff_document import STATUSES, CallTable, DiffDocument, ScanDocument

#: Layers and columns of the map.
MAX_LAYERS = 160
MAX_COLUMNS = 70

_DIFFERS = STATUSES.index("differs")
_UNMATCHED = frozenset(STATUSES.index(name) for name in ("only a", "only b"))


def layer_maps(document: DiffDocument) -> dict[str, Figure]:
    """Return the worst difference / noise per layer and op, and per layer and module inside it.

    Keys: "layer-op", "layer-module".
    """
    table = document.table
    worst = _worst_calls(table)
    # A module call is no op.
    module = table.pool.index("module") if "module" in table.pool else -1
    ops = {place: found for place, found in worst.items() if place[3] != module}
    return {
        "layer-op": _layer_map(table, ops, "op", lambda place: short_op(table.pool[place[2]])),
        "layer-module": _layer_map(
            table, worst, "module", lambda place: layer_of(table.pool[place[0]])[1] or "(itself)"
        ),
    }


#: (module, phase, op, kind) as pool numbers.
_Place = tuple[int, int, int, int]


def _worst_calls(table: CallTable) -> dict[_Place, tuple[float, int]]:
    """Return the worst difference / noise of each place, and its row."""
    worst: dict[_Place, tuple[float, int]] = {}
    places = zip(table.module, table.phase, table.op_b, table.kind, strict=True)
    columns = zip(places, table.status, table.out_difference, table.noise, strict=True)
    for row, (place, status, size, noise) in enumerate(columns):
        if status in _UNMATCHED:
            continue
        if place[2] < 0:
            place = (*place[:2], table.op_a[row], place[3])
        if size is None:
            value = math.inf if status == _DIFFERS else 0.0
        elif noise:
            value = size / noise
        else:
            value = math.inf if size > 0 and status == _DIFFERS else 0.0
        known = worst.get(place)
        if known is None or value > known[0]:
            worst[place] = (value, row)
    return worst


def _layer_map(
    table: CallTable,
    worst: dict[_Place, tuple[float, int]],
    by: str,
    column_of: Callable[[_Place], str],
) -> Figure:
    cells: dict[tuple[str, str], tuple[float, int]] = {}
    for place, found in worst.items():
        # Backward apart from forward: after a birth everything differs, and the pattern is in the forward.
        phase = table.pool[place[1]]
        column = column_of(place) + ("" if phase == "forward" else f" ({phase})")
        cell = layer_of(table.pool[place[0]])[0], column
        if cell not in cells or found > cells[cell]:
            cells[cell] = found
    spec, summary = map_spec(
        cells,
        describe=lambda row: hover(call_row(table, row)),
        limits=(MAX_LAYERS, MAX_COLUMNS),
        unit="noise floor",
        decades=4,
    )
    return Figure(title=f"Layer by {by}", summary=summary, spec=spec)


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
        describe=lambda row: _scan_hover(scan_row(table, row)),
        limits=(MAX_LAYERS, MAX_COLUMNS),
        unit="threshold",
    )
    return Figure(title=f"Layer by {by}", summary=summary, spec=spec)


def _scan_hover(row: ScanRow) -> str:
    lines = [f"<b>{escape(row.key)}</b>", escape(f"{row.op}, {row.phase}: {row.verdict}")]
    lines.append(f"target error {short(row.target_error)}, threshold {short(row.threshold)}")
    if row.reason:
        lines.append(escape(row.reason))
    return "<br>".join(lines)
