"""The figures of one tensor in one case: where its errors sit, and how they are distributed."""

from __future__ import annotations

import math

from bridge.report.figures import Figure, layout
from bridge.report.numbers import percent, plural, short, times
from bridge.report.palette import light
from bridge.verify.verdict import ErrorMap, Histogram

#: The map's colours span this many decades on either side of the threshold.
DECADES = 2.0


def error_map(source: ErrorMap) -> Figure:
    """Return where the tensor, seen as [rows, cols], is off: error / threshold per block, log colours."""
    z = [[_log(value) for value in line] for line in source.values]
    single = len(z) == 1
    spec = {
        "data": [
            {
                "type": "heatmap",
                "z": z,
                "x0": source.col_step / 2,
                "dx": source.col_step,
                "y0": source.row_step / 2,
                "dy": source.row_step,
                "zmin": -DECADES,
                "zmax": DECADES,
                "colorscale": [
                    [0, light("low")],
                    [0.4999, light("near")],
                    [0.5, light("over")],
                    [1, light("far")],
                ],
                "colorbar": {
                    "tickvals": [-2, -1, 0, 1, 2],
                    "ticktext": ["\u2264 0.01", "0.1", "limit", "10", "\u2265 100"],
                    "thickness": 10,
                    "outlinewidth": 0,
                    "len": 1,
                },
                "text": [[short(value, missing="not finite") for value in line] for line in source.values],
                "hovertemplate": "row %{y}, col %{x}: %{text} of the threshold<extra></extra>",
            }
        ],
        "layout": layout(
            130 if single else 280,
            margin={"l": 52, "r": 8, "t": 8, "b": 40},
            xaxis={
                "title": {"text": "column"},
                "range": [0, source.cols],
                "showgrid": False,
                "zeroline": False,
            },
            yaxis={
                "title": {"text": "row"},
                "range": [source.rows, 0],
                "showgrid": False,
                "zeroline": False,
                **({"tickvals": [], "title": {"text": ""}} if single else {}),
            },
        ),
    }
    return Figure(title="Worst elements", summary=_map_summary(source), spec=spec)


def _log(value: float | None) -> float:
    if value is None:
        return DECADES
    return round(min(DECADES, max(-DECADES, math.log10(value) if value > 0 else -DECADES)), 2)


def _map_summary(source: ErrorMap) -> str:
    cells = [
        (math.inf if value is None else value, i, j)
        for i, line in enumerate(source.values)
        for j, value in enumerate(line)
    ]
    if not cells:
        return "The tensor is empty."
    worst, i, j = max(cells, key=lambda cell: cell[0])
    over = sum(value > 1 for value, _, _ in cells)
    where = (
        f"rows {_span(i, source.row_step, source.rows)}, columns {_span(j, source.col_step, source.cols)}"
        if source.rows > 1
        else f"columns {_span(j, source.col_step, source.cols)}"
    )
    size = "not finite" if math.isinf(worst) else f"{times(worst)} the threshold"
    spread = f"{over:,} of {plural(len(cells), 'block')} over it" if over else "no block is over it"
    return f"Worst block: {where}, {size}; {spread}."


def _span(index: int, step: int, extent: int) -> str:
    first, last = index * step, min(extent, (index + 1) * step) - 1
    return str(first) if first == last else f"{first}..{last}"


def histogram(source: Histogram, *, failed: bool) -> Figure:
    """Return the signed errors of reference and target in ULP, as shares, on a logarithmic axis."""
    totals = (sum(source.reference), sum(source.target))
    shares = [
        [count / total if total else 0.0 for count in counts]
        for counts, total in zip((source.reference, source.target), totals, strict=True)
    ]
    edges = list(source.edges)
    least = min((share for line in shares for share in line if share > 0), default=0.1)
    floor = 10.0 ** (math.floor(math.log10(least)) - 0.3)
    reference, target = ([*(_digits(max(share, floor)) for share in line), floor] for line in shares)
    labels = [
        f"{short(low)} .. {short(high)} ULP<br>reference {percent(ref)}<br>target {percent(tgt)}"
        for low, high, ref, tgt in zip(edges[:-1], edges[1:], *shares, strict=True)
    ]
    common = {"type": "scatter", "x": edges, "hovertemplate": "%{text}<extra></extra>", "text": [*labels, ""]}
    spec = {
        "data": [
            common
            | {
                "name": "reference",
                "y": reference,
                "mode": "lines",
                "fill": "tozeroy",
                "line": {"shape": "hv", "color": light("reference"), "width": 1},
            },
            common
            | {
                "name": "target",
                "y": target,
                "mode": "lines",
                "line": {"shape": "hv", "color": light("fail" if failed else "pass"), "width": 2},
            },
        ],
        "layout": layout(
            280,
            showlegend=True,
            legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
            margin={"l": 60, "r": 12, "t": 26, "b": 40},
            hovermode="x unified",
            xaxis={"title": {"text": "signed error, ULP"}, "range": [edges[0], edges[-1]]},
            yaxis={
                "type": "log",
                "title": {"text": "share of elements"},
                "automargin": True,
                "range": [math.log10(floor), 0.1],
                "tickvals": [10.0**power for power in range(math.ceil(math.log10(floor)), 1)],
                "ticktext": [f"{100 * 10.0**power:g} %" for power in range(math.ceil(math.log10(floor)), 1)],
            },
        ),
    }
    return Figure(title="Error in ULP", summary=_histogram_summary(source), spec=spec)


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def _histogram_summary(source: Histogram) -> str:
    parts = []
    for name, counts in (("reference", source.reference), ("target", source.target)):
        total = sum(counts)
        if not total:
            parts.append(f"{name} has no finite error")
            continue
        centres = [(low + high) / 2 for low, high in zip(source.edges[:-1], source.edges[1:], strict=True)]
        mean = sum(c * n for c, n in zip(centres, counts, strict=True)) / total
        beyond = counts[0] + counts[-1]
        parts.append(f"{name}: mean about {short(mean)} ULP, {percent(beyond / total)} in the outermost bins")
    return "; ".join(parts) + "."
