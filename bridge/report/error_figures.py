"""The figures of one tensor in one case: where its errors sit, and how they are distributed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from bridge.report.figures import BAR, LEGEND, Figure, escape, layout
from bridge.report.numbers import percent, plural, short, times
from bridge.report.palette import light
from bridge.verify.verdict import ErrorMap, Histogram

#: The map's colours span this many decades on either side of the threshold.
DECADES = 2
#: Share of elements in the outermost bins above which a histogram has no mean to speak of.
MOSTLY_BEYOND = 0.01


def error_map(source: ErrorMap, *, limit: str = "threshold") -> Figure:
    """Return where the tensor, seen as [rows, cols], is off: error / limit per block, log colours.

    Args:
        source: The binned errors.
        limit: What they were divided by, in words.
    """
    z = [[_log(value) for value in line] for line in source.values]
    single = len(z) == 1
    scale = _scale("limit", DECADES)
    if single:
        scale["colorbar"] |= _FEW
    spec = {
        "data": [
            {
                "type": "heatmap",
                "z": z,
                "x0": source.col_step / 2,
                "dx": source.col_step,
                "y0": source.row_step / 2,
                "dy": source.row_step,
                **scale,
                "text": [
                    ["not finite, over" if value is None else times(value) for value in line]
                    for line in source.values
                ],
                "hovertemplate": "row %{y}, col %{x}: %{text} the " + limit + "<extra></extra>",
            }
        ],
        "layout": layout(
            155 if single else 300,
            margin={"l": 52, "r": 8, "t": BAR, "b": 40},
            xaxis={
                "title": {"text": "column"},
                "range": [0, source.cols],
                "showgrid": False,
                "zeroline": False,
                **_numbered(source.cols, source.col_step),
            },
            yaxis={
                "title": {"text": "row"},
                "range": [source.rows, 0],
                "showgrid": False,
                "zeroline": False,
                **(
                    {"tickvals": [], "title": {"text": ""}}
                    if single
                    else _numbered(source.rows, source.row_step)
                ),
            },
        ),
    }
    return Figure(title="Worst elements", summary=_map_summary(source, limit), spec=spec)


def _scale(limit: str, decades: int) -> dict[str, Any]:
    """Colours that change hue at the limit: what is over it is seen at once."""
    return {
        "zmin": -decades,
        "zmax": decades,
        "colorscale": [
            [0, light("low")],
            [0.4999, light("near")],
            [0.5, light("over")],
            [1, light("far")],
        ],
        "colorbar": {
            "tickvals": [-decades, -decades / 2, 0, decades / 2, decades],
            "ticktext": [
                f"\u2264 {10.0**-decades:g}",
                f"{10.0 ** (-decades / 2):g}",
                limit,
                f"{10.0 ** (decades / 2):g}",
                f"\u2265 {10.0**decades:g}",
            ],
            "thickness": 10,
            "outlinewidth": 0,
            "len": 1,
        },
    }


#: A short map has room for three labels beside its colours.
_FEW = {"tickvals": [-DECADES, 0, DECADES], "ticktext": ["\u2264 0.01", "limit", "\u2265 100"]}


def map_spec(
    cells: Mapping[tuple[str, str], tuple[float, int]],
    *,
    describe: Callable[[int], str],
    limits: tuple[int, int],
    unit: str,
    decades: int = DECADES,
) -> tuple[dict[str, Any], str]:
    """Return a heat map of named rows and columns, and its summary.

    Args:
        cells: (row, column) -> (value / limit, number of the call that it comes from), in the order in
            which rows and columns are to stand.
        describe: Text about a call, for the tooltip.
        limits: Rows and columns at most; the worst are kept.
        unit: What the limit is called.
        decades: What the colours span on either side of the limit.
    """
    rows, columns = (_kept(cells, axis, limits[axis]) for axis in (0, 1))
    scale = _scale(unit, decades)
    scale["colorbar"] |= {"lenmode": "pixels", "len": 140, "y": 1, "yanchor": "top"}
    grid = [[cells.get((row, column)) for column in columns] for row in rows]
    spec = {
        "data": [
            {
                "type": "heatmap",
                "x": list(range(len(columns))),
                "y": list(range(len(rows))),
                "z": [[None if cell is None else _log(cell[0], decades) for cell in line] for line in grid],
                "customdata": [[None if cell is None else cell[1] for cell in line] for line in grid],
                "text": [["" if cell is None else describe(cell[1]) for cell in line] for line in grid],
                "hovertemplate": "%{text}<extra></extra>",
                "hoverongaps": False,
                "xgap": 1,
                "ygap": 1,
                **scale,
            }
        ],
        "layout": layout(
            214 + min(720, 15 * len(rows)),
            margin={"l": 20, "r": 8, "t": BAR, "b": 20},
            xaxis={**_names(columns), "tickangle": -45, "range": [-0.5, len(columns) - 0.5]},
            yaxis={**_names(rows), "range": [len(rows) - 0.5, -0.5]},
        ),
    }
    return spec, _cells_summary(cells, unit)


def _names(names: list[str]) -> dict[str, Any]:
    """An axis of names, each shown unless there are too many; long ones are cut in the middle."""
    step = max(1, math.ceil(len(names) / 60))
    short_names = (name if len(name) <= 26 else f"{name[:14]}\u2026{name[-11:]}" for name in names)
    return {
        "tickvals": list(range(0, len(names), step)),
        "ticktext": [escape(name) for name in short_names][::step],
        "tickfont": {"size": 10},
        "automargin": True,
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
    }


def _kept(cells: Mapping[tuple[str, str], tuple[float, int]], axis: int, limit: int) -> list[str]:
    """Names along one axis in order; the worst `limit` of them."""
    worst: dict[str, float] = {}
    for place, (value, _) in cells.items():
        worst[place[axis]] = max(value, worst.get(place[axis], 0.0))
    kept = set(sorted(worst, key=lambda name: -worst[name])[:limit])
    return [name for name in worst if name in kept]


def _cells_summary(cells: Mapping[tuple[str, str], tuple[float, int]], unit: str) -> str:
    if not cells:
        return "There is nothing to show."
    place, (value, _) = max(cells.items(), key=lambda item: item[1][0])
    over = sum(value > 1 for value, _ in cells.values())
    size = "beyond measure" if math.isinf(value) else f"{times(value)} the {unit}"
    return (
        f"{over:,} of {plural(len(cells), 'cell')} over the {unit}; the worst is {' / '.join(place)}, {size}."
    )


def _log(value: float | None, decades: int = DECADES) -> float:
    if value is None:
        return float(decades)
    return round(min(decades, max(-decades, math.log10(value) if value > 0 else -decades)), 2)


def _map_summary(source: ErrorMap, limit: str) -> str:
    cells = [
        (math.inf if value is None else value, i, j)
        for i, line in enumerate(source.values)
        for j, value in enumerate(line)
    ]
    if not cells:
        return "The tensor is empty."
    worst, i, j = max(cells, key=lambda cell: cell[0])
    over = sum(value > 1 for value, _, _ in cells)
    where = _span("column", j, source.col_step, source.cols)
    if source.rows > 1:
        where = f"{_span('row', i, source.row_step, source.rows)}, {where}"
    size = "not finite" if math.isinf(worst) else f"{times(worst)} the {limit}"
    spread = f"{over:,} of {plural(len(cells), 'block')} over it" if over else "no block is over it"
    return f"Worst block: {where}, {size}; {spread}."


def _span(noun: str, index: int, step: int, extent: int) -> str:
    first, last = index * step, min(extent, (index + 1) * step) - 1
    return f"{noun} {first}" if first == last else f"{noun}s {first}..{last}"


def _numbered(extent: int, step: int) -> dict[str, Any]:
    """Ticks for few rows or columns: each in the middle of its own, by its number."""
    if step > 1 or extent > 12:
        return {}
    return {"tickvals": [i + 0.5 for i in range(extent)], "ticktext": [str(i) for i in range(extent)]}


def histogram(source: Histogram, *, failed: bool) -> Figure:
    """Return the signed errors of reference and target in ULP, as shares, on a logarithmic axis."""
    target = light("fail" if failed else "pass")
    return _histogram(
        source.edges,
        [("reference", source.reference, light("reference")), ("target", source.target, target)],
        axis="signed error, ULP",
    )


def difference_histogram(source: Histogram, one: str = "B", other: str = "A") -> Figure:
    """Return the signed differences of two sides in ULP, as shares, on a logarithmic axis."""
    name = f"{one} - {other}"
    return _histogram(source.edges, [(name, source.target, light("fail"))], axis=f"{name}, ULP")


def _histogram(
    edges: tuple[float, ...], series: list[tuple[str, tuple[int, ...], str]], *, axis: str
) -> Figure:
    shares = [_shares(counts) for _, counts, _ in series]
    least = min((share for line in shares for share in line if share > 0), default=0.1)
    floor = 10.0 ** (math.floor(math.log10(least)) - 0.3)
    labels = [
        f"{short(low)} .. {short(high)} ULP"
        + "".join(f"<br>{name} {percent(line[i])}" for (name, _, _), line in zip(series, shares, strict=True))
        for i, (low, high) in enumerate(itertools.pairwise(edges))
    ]
    traces = []
    for place, ((name, _, colour), line) in enumerate(zip(series, shares, strict=True)):
        background = place == 0 and len(series) > 1
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": edges,
                "y": [*(float(f"{max(share, floor):.3g}") for share in line), floor],
                "text": [*labels, ""],
                "hovertemplate": "%{text}<extra></extra>",
                "line": {"shape": "hv", "color": colour, "width": 1 if background else 2},
                **({"fill": "tozeroy"} if background else {}),
            }
        )
    powers = range(math.ceil(math.log10(floor)), 1)
    spec = {
        "data": traces,
        "layout": layout(
            280,
            showlegend=len(series) > 1,
            legend=LEGEND,
            margin={"l": 60, "r": 12, "t": BAR, "b": 40},
            xaxis={"title": {"text": axis}, "range": _occupied(edges, [counts for _, counts, _ in series])},
            yaxis={
                "type": "log",
                "title": {"text": "share of elements"},
                "automargin": True,
                "range": [math.log10(floor), 0.1],
                "tickvals": [10.0**power for power in powers],
                "ticktext": [f"{100 * 10.0**power:g} %" for power in powers],
            },
        ),
    }
    summary = "; ".join(_spread(edges, name, counts) for name, counts, _ in series)
    return Figure(title="Error in ULP", summary=f"{summary}.", spec=spec)


def _occupied(edges: tuple[float, ...], series: list[tuple[int, ...]]) -> list[float]:
    """The stretch of the axis that holds elements, and a bin on either side."""
    filled = [i for i in range(len(edges) - 1) if any(counts[i] for counts in series)]
    if not filled:
        return [edges[0], edges[-1]]
    return [edges[max(0, filled[0] - 1)], edges[min(len(edges) - 1, filled[-1] + 2)]]


def _shares(counts: tuple[int, ...]) -> list[float]:
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def _spread(edges: tuple[float, ...], name: str, counts: tuple[int, ...]) -> str:
    total = sum(counts)
    if not total:
        return f"{name} has no finite error"
    centres = ((low + high) / 2 for low, high in itertools.pairwise(edges))
    mean = sum(centre * count for centre, count in zip(centres, counts, strict=True)) / total
    beyond = (counts[0] + counts[-1]) / total
    if beyond > MOSTLY_BEYOND and len(counts) > 3:
        # What lies beyond the axis has no place in a mean over bins.
        return f"{name}: {percent(beyond)} beyond {short(edges[1])} .. {short(edges[-2])} ULP"
    return f"{name}: mean about {short(mean)} ULP, {percent(beyond)} in the outermost bins"
