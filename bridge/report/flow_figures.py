"""Figures of two runs: how the difference flows through the step, and where it sits in the model.

A step may have 100,000 calls: they are binned here, so that a figure holds some thousand points.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from bridge.report.calls import CallRow, call_row, layer_of
from bridge.report.figures import BAR, LEGEND, Figure, escape, layout
from bridge.report.numbers import plural, short
from bridge.report.palette import light
from bridge.verify.diff_document import ORIGINS, STATUSES, CallTable, DiffDocument, StepTrace

#: Bins along the step; a screen shows little more.
BINS = 1200
#: Differences below this are drawn at the bottom.
LEAST = 1e-12
_DIFFERS, _ROUNDING, _EQUAL = (STATUSES.index(name) for name in ("differs", "rounding", "equal"))
_UNMATCHED = frozenset(STATUSES.index(name) for name in ("only a", "only b"))

#: How a call is drawn, worst first: the worst of a bin is the one shown.
_MARKERS: dict[str, dict[str, Any]] = {
    "born": {
        "symbol": "triangle-up",
        "size": 12,
        "color": light("fail"),
        "line": {"color": light("ink"), "width": 1},
    },
    "entered": {"symbol": "diamond", "size": 10, "color": light("unclear")},
    "nondeterministic": {"symbol": "square", "size": 7, "color": light("unclear")},
    "amplified": {"symbol": "cross", "size": 7, "color": light("limited")},
    "inherited": {"symbol": "circle", "size": 5, "color": light("pass"), "opacity": 0.7},
    "not attributed": {"symbol": "x", "size": 6, "color": light("fail")},
    "within rounding": {"symbol": "circle-open", "size": 4, "color": light("muted")},
    "bit-equal": {"symbol": "line-ns-open", "size": 5, "color": light("reference")},
    "not compared": {"symbol": "line-ns-open", "size": 9, "color": light("limited"), "opacity": 0.7},
}


def flow(document: DiffDocument) -> Figure:
    """Return the relative difference of every call's output along the step, births as steps."""
    table = document.table
    bottom, top = _range(table)
    places = {name: index for index, name in enumerate(_MARKERS)}
    shown: dict[tuple[int, str], int] = {}
    sizes = [_size(*pair) for pair in zip(table.out_difference, table.status, strict=True)]
    width = max(1, math.ceil(len(table) / BINS))
    kinds = {
        (status, origin): _kind(status, origin)
        for status, origin in set(zip(table.status, table.origin, strict=True))
    }
    for row, state in enumerate(zip(table.status, table.origin, strict=True)):
        kind = kinds[state]
        # Births are what one looks for: each is drawn. Of the others the largest of a bin.
        place = (row if kind in ("born", "entered") else row // width, kind)
        known = shown.get(place)
        if known is None or sizes[row] > sizes[known]:
            shown[place] = row
    traces = []
    for name in sorted({kind for _, kind in shown}, key=lambda name: -places[name]):
        rows = sorted(row for (_, kind), row in shown.items() if kind == name)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": rows,
                "y": [min(top, max(bottom, sizes[row])) for row in rows],
                "customdata": rows,
                "text": [hover(call_row(table, row)) for row in rows],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": _MARKERS[name],
            }
        )
    phases = list(_runs(table.phase, width, lambda number: table.pool[number]))
    layers = list(_runs(table.module, width, lambda number: layer_of(table.pool[number])[0]))
    spec = {
        "data": [_noise_line(table, width), *_born_line(table, bottom), *traces],
        "layout": layout(
            420,
            showlegend=True,
            legend=LEGEND | {"y": 1.06},
            margin={"l": 80, "r": 12, "t": 60, "b": 70},
            xaxis={
                "range": [-0.01 * len(table) - 0.5, 1.01 * len(table)],
                "title": {"text": "call, in execution order"},
                "zeroline": False,
                **_layer_ticks(layers),
            },
            yaxis={
                "type": "log",
                "title": {"text": "relative difference of the output"},
                "range": [math.log10(bottom) - 0.4, math.log10(top) + 0.3],
                **_ticks(bottom, top),
            },
            shapes=[_band(i, run, len(phases)) for i, run in enumerate(phases)],
            annotations=[_band_label(run, len(table)) for run in phases if run[1] - run[0] > len(table) / 25],
        ),
    }
    return Figure(title="Difference over the step", summary=_flow_summary(document), spec=spec)


def _kind(status: int, place: int) -> str:
    """Return how a call of this status and origin is drawn."""
    if status in _UNMATCHED:
        return "not compared"
    if status == _ROUNDING:
        return "within rounding"
    if status != _DIFFERS:
        return "bit-equal" if status == _EQUAL else "not compared"
    origin = ORIGINS[place]
    return origin if origin in _MARKERS else "not attributed"


def _size(value: float | None, status: int) -> float:
    """Return an output difference as it is drawn: infinite where it is beyond any number."""
    if value is None:
        return math.inf if status == _DIFFERS else 0.0
    return value


def _range(table: CallTable) -> tuple[float, float]:
    """Return the ends of the difference axis as powers of ten; the bottom one stands for bit-equal."""
    sizes = [value for value in (*table.out_difference, *table.noise) if value]
    least = max(LEAST, min(sizes, default=1e-6))
    most = min(1e12, max(1e-3, *sizes)) if sizes else 1.0
    return 10.0 ** (math.floor(math.log10(least)) - 1), 10.0 ** math.ceil(math.log10(most) + 0.01)


def hover(row: CallRow) -> str:
    """Return what a point says about its call."""
    lines = [f"<b>{escape(row.key)}</b>", escape(f"{row.op}, {row.phase}, row {row.row}")]
    what = " ".join(part for part in (row.status, row.origin) if part)
    noise = f", noise {short(row.noise)}" if row.noise is not None else ""
    lines.append(f"{what}: in {short(row.in_difference)}, out {short(row.out_difference)}{noise}")
    return "<br>".join(lines)


def _noise_line(table: CallTable, width: int) -> dict[str, Any]:
    xs, ys = [], []
    for start in range(0, len(table), width):
        values = sorted(value for value in table.noise[start : start + width] if value)
        xs.append(start)
        ys.append(values[len(values) // 2] if values else None)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "noise floor",
        "x": xs,
        "y": ys,
        "line": {"color": light("muted"), "width": 1, "shape": "hv", "dash": "dot"},
        "hoverinfo": "skip",
    }


def _born_line(table: CallTable, bottom: float) -> list[dict[str, Any]]:
    """The largest difference born so far: a step at every birth that exceeds the ones before."""
    born = ORIGINS.index("born")
    xs, ys, level = [0], [bottom], 0.0
    for row, origin in enumerate(table.origin):
        if origin == born:
            size = _size(table.out_difference[row], table.status[row])
            if level < size < math.inf:
                level = size
                xs.append(row)
                ys.append(level)
    if level == 0.0:
        return []
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "born so far",
            "x": [*xs, len(table)],
            "y": [*ys, level],
            "line": {"color": light("fail"), "width": 1.5, "shape": "hv"},
            "hoverinfo": "skip",
        }
    ]


def _runs(column: Sequence[int], width: int, name_of: Callable[[int], str]) -> Iterator[tuple[int, int, str]]:
    """Yield (start, stop, name) of stretches of the step, told by the commonest name of each bin.

    Args:
        column: Numbers into the pool, by row.
        width: Rows per bin.
        name_of: Number -> name; different numbers may share one.
    """
    start, current = 0, ""
    for first in range(0, len(column), width):
        part = column[first : first + width]
        if part.count(part[0]) == len(part):
            name = name_of(part[0])
        else:
            names: Counter[str] = Counter()
            for number, count in Counter(part).items():
                names[name_of(number)] += count
            name = names.most_common(1)[0][0]
        if name != current:
            if first:
                yield start, first, current
            start, current = first, name
    if len(column):
        yield start, len(column), current


def _band(index: int, run: tuple[int, int, str], count: int) -> dict[str, Any]:
    shade = index % 2 == 1 and count > 1
    return {
        "type": "rect",
        "layer": "below",
        "yref": "paper",
        "x0": run[0] - 0.5,
        "x1": run[1] - 0.5,
        "y0": 0,
        "y1": 1,
        "line": {"width": 0},
        "fillcolor": light("panel"),
        "opacity": 1 if shade else 0,
    }


def _band_label(run: tuple[int, int, str], total: int) -> dict[str, Any]:
    return {
        "x": (run[0] + run[1]) / 2,
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "text": escape(run[2]),
        "showarrow": False,
        "font": {"size": 11, "color": light("muted")},
    }


def _layer_ticks(runs: Sequence[tuple[int, int, str]]) -> dict[str, Any]:
    # A stretch whose label would run into the one before is left unnamed.
    room = runs[-1][1] / 40 if runs else 0
    chosen: list[tuple[int, int, str]] = []
    for run in runs:
        if not chosen or run[0] - chosen[-1][0] >= room:
            chosen.append(run)
    return {
        "tickvals": [start for start, _, _ in chosen],
        "ticktext": [escape(name) for _, _, name in chosen],
        "tickangle": -45 if any(b[0] - a[0] < 4 * room for a, b in pairwise(chosen)) else 0,
        "tickfont": {"size": 10},
        "automargin": True,
    }


def _ticks(bottom: float, top: float) -> dict[str, Any]:
    low, high = round(math.log10(bottom)), round(math.log10(top))
    step = max(1, math.ceil((high - low) / 8))
    powers = list(range(low + 1, high + 1, step))
    return {
        "tickvals": [bottom, *(10.0**power for power in powers)],
        "ticktext": ["bit-equal", *(f"1e{power}" for power in powers)],
    }


def _flow_summary(document: DiffDocument) -> str:
    table = document.table
    born = [row for row, origin in enumerate(table.origin) if ORIGINS[origin] == "born"]
    differs = sum(status == _DIFFERS for status in table.status)
    text = f"{differs:,} of {plural(len(table), 'call')} differ beyond the noise floor"
    if document.first_divergence is not None:
        first = call_row(table, document.first_divergence)
        text += f", the first is {first.key} (row {first.row}) at {short(first.out_difference)}"
    if born:
        worst = max(born, key=lambda row: _size(table.out_difference[row], table.status[row]))
        text += f"; {plural(len(born), 'birth')}, the largest {short(table.out_difference[worst])} at "
        text += call_row(table, worst).key
    return text + "."


def step_trace(trace: StepTrace) -> Figure:
    """Return a metric's relative difference from the baseline, step by step."""
    series = {"repeat of the baseline": trace.repeat, "candidate": trace.candidate}
    colours = {"repeat of the baseline": light("muted"), "candidate": light("fail")}
    traces = []
    for name, values in series.items():
        differences = [
            abs(value - base) / abs(base) if value is not None and base else None
            for value, base in zip(values, trace.baseline, strict=False)
        ]
        if differences:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": name,
                    "x": list(trace.steps[: len(differences)]),
                    "y": [float(f"{value:.4g}") if value else None for value in differences],
                    "line": {"color": colours[name], "width": 1.5},
                    "marker": {"size": 4},
                }
            )
    shapes = []
    if trace.first_step is not None:
        shapes.append(
            {
                "type": "line",
                "x0": trace.first_step,
                "x1": trace.first_step,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"color": light("ink"), "width": 1, "dash": "dot"},
            }
        )
    spec = {
        "data": traces,
        "layout": layout(
            260,
            showlegend=True,
            legend=LEGEND,
            margin={"l": 64, "r": 12, "t": BAR, "b": 40},
            xaxis={"title": {"text": "step"}},
            yaxis={"type": "log", "title": {"text": "relative difference"}, "exponentformat": "e"},
            shapes=shapes,
        ),
    }
    noise = f"; run-to-run noise {short(trace.noise)}" if trace.noise is not None else ""
    if trace.first_step is None:
        return Figure(title=trace.metric, summary=f"{trace.metric} never leaves the noise{noise}.", spec=spec)
    text = f"{trace.metric} leaves the noise at step {trace.first_step}{noise}."
    return Figure(title=trace.metric, summary=text, spec=spec)
