"""The figure that shows at a glance how far every check is from its limit."""

from __future__ import annotations

import math
from typing import Any

from bridge.report.figures import Figure, escape, layout
from bridge.report.numbers import plural, short
from bridge.report.palette import light
from bridge.report.verdict_model import GATE, Margin, Point, View

#: Ratios below this are drawn at the left edge: how far below the limit matters no more.
FLOOR = 1e-3
#: Points of one check closer than this in decades are drawn once.
CLOSE = 0.01


def margins(view: View) -> Figure:
    """Return every check of every tensor against its limit: one row each, one dot per case."""
    rows = list(view.margins)
    edge = _right_edge(rows)
    groups: dict[str, dict[str, list[Any]]] = {}
    for y, margin in enumerate(rows):
        for point in _thin(margin.points):
            kind = _kind(point)
            trace = groups.setdefault(kind, {"x": [], "y": [], "text": []})
            trace["x"].append(_position(point, edge))
            trace["y"].append(y)
            trace["text"].append(_hover(margin, point))
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": kind,
            "hovertemplate": "%{text}<extra></extra>",
            "marker": _MARKERS[kind],
            **groups[kind],
        }
        for kind in _MARKERS
        if kind in groups
    ]
    spec = {
        "data": traces,
        "layout": layout(
            76 + 20 * len(rows),
            margin={"l": 10, "r": 76, "t": 32, "b": 44},
            xaxis={
                "type": "log",
                "range": [math.log10(FLOOR) - 0.15, math.log10(edge) + 0.1],
                "tickvals": [10.0**power for power in range(-3, math.ceil(math.log10(edge)) + 1)],
                "ticktext": _tick_texts(edge),
                "title": {"text": "error / limit"},
            },
            yaxis={
                "range": [len(rows) - 0.4, -0.6],
                "tickvals": list(range(len(rows))),
                "ticktext": [_label(margin) for margin in rows],
                "automargin": True,
                "ticks": "",
                "showgrid": False,
                "zeroline": False,
            },
            shapes=[
                {
                    "type": "line",
                    "x0": 1,
                    "x1": 1,
                    "yref": "paper",
                    "y0": 0,
                    "y1": 1,
                    "line": {"color": light("ink"), "width": 1.5},
                },
                *_separators(rows),
            ],
            annotations=[
                {
                    "x": 0,
                    "y": 1,
                    "xref": "x",
                    "yref": "paper",
                    "text": "limit",
                    "showarrow": False,
                    "yanchor": "bottom",
                    "font": {"size": 11},
                },
                *(_worst_label(y, margin) for y, margin in enumerate(rows)),
            ],
        ),
    }
    return Figure(title="Error against its limit", summary=_margin_summary(rows), spec=spec)


_MARKERS: dict[str, dict[str, Any]] = {
    "within": {"symbol": "circle", "size": 7, "color": light("pass"), "opacity": 0.75},
    "not binding": {"symbol": "circle-open", "size": 7, "color": light("muted")},
    "over": {"symbol": "x", "size": 8, "color": light("fail"), "opacity": 0.9},
    "not finite or mismatched": {"symbol": "triangle-right", "size": 10, "color": light("fail")},
}


def _kind(point: Point) -> str:
    if point.ratio is None and not point.passed and point.binding:
        return "not finite or mismatched"
    if not point.binding:
        return "not binding"
    return "within" if point.passed else "over"


def _right_edge(rows: list[Margin]) -> float:
    finite = [
        point.ratio
        for row in rows
        for point in row.points
        if point.ratio is not None and point.ratio < math.inf
    ]
    return 10.0 ** math.ceil(math.log10(max(10.0, *finite))) if finite else 10.0


def _position(point: Point, edge: float) -> float:
    if math.isinf(point.rank):
        return edge
    return float(f"{max(point.rank, FLOOR):.4g}")


def _thin(points: tuple[Point, ...]) -> list[Point]:
    """Drop points that would be drawn on top of a worse one of their kind."""
    kept: dict[tuple[str, int], Point] = {}
    for point in points:
        place = 0 if math.isinf(point.rank) else round(math.log10(max(point.rank, FLOOR)) / CLOSE)
        kept.setdefault((_kind(point), place), point)
    return list(kept.values())


def _tick_texts(edge: float) -> list[str]:
    texts = ["\u2264 0.001", "0.01", "0.1", "1"]
    return texts + [
        f"{10**power}" if power < 4 else f"1e{power}" for power in range(1, math.ceil(math.log10(edge)) + 1)
    ]


def _label(margin: Margin) -> str:
    return f"<b>{escape(margin.tensor)}</b>  gate" if margin.check == GATE else escape(margin.check)


def _worst_label(y: int, margin: Margin) -> dict[str, Any]:
    worst = margin.worst
    text = worst.size
    colour = light("ink") if margin.passed else light("fail")
    return {
        "x": 1.005,
        "y": y,
        "xref": "paper",
        "yref": "y",
        "xanchor": "left",
        "text": text if margin.passed else f"<b>{text}</b>",
        "showarrow": False,
        "font": {"size": 12, "color": colour},
    }


def _separators(rows: list[Margin]) -> list[dict[str, Any]]:
    return [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": y - 0.5,
            "y1": y - 0.5,
            "line": {"color": light("line"), "width": 1},
        }
        for y, margin in enumerate(rows)
        if y and margin.check == GATE
    ]


def _hover(margin: Margin, point: Point) -> str:
    value = short(point.value, missing="not finite")
    lines = [
        f"<b>{escape(margin.tensor)}</b> {escape(margin.check)}: {point.size}",
        escape(point.case),
        f"value {value}, limit {short(point.limit)}",
    ]
    lines += [escape(text) for text in (point.detail, point.note) if text]
    if not point.binding:
        lines.append("the gate was not valid here, so this decided nothing")
    return "<br>".join(lines)


def _margin_summary(rows: list[Margin]) -> str:
    over = [row for row in rows if not row.passed]
    worst = max(over or rows, key=lambda row: row.worst.rank, default=None)
    if worst is None:
        return "No check was made."
    limit = " its limit" if worst.worst.ratio is not None else ""
    what = f"{worst.tensor} {worst.check}, {worst.worst.size}{limit} on {worst.worst.case}"
    if over:
        return f"{len(over)} of {plural(len(rows), 'check')} exceed their limit; the furthest is {what}."
    return f"All {plural(len(rows), 'check')} within their limits; the closest is {what}."
