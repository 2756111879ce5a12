"""Figures as plain plotly dicts: computed here, painted by the page or a notebook.

Every figure comes with a summary in words, for readers without a picture. Data arrives binned in
the document, so a figure stays small whatever the tensor's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.report.palette import light

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from bridge.report.documents import Document
    from bridge.verify.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    title: str
    summary: str  #: the same in words
    spec: dict[str, Any]  #: plotly: {"data": [...], "layout": {...}}, light theme


def plot(document: Document, *, theme: str = "light") -> dict[str, go.Figure]:
    """Return a document's figures as plotly objects, for a notebook.

    Keys of a verdict: "margins", and "map TENSOR" and "histogram TENSOR" for the worst case of each
    tensor. Of a diff: "flow", "layer-op", "layer-module", "steps METRIC". Of a scan: "layer-op" and
    "layer-module".
    """
    import plotly.graph_objects as go

    from bridge.report.palette import themed

    figures = {name: go.Figure(themed(figure.spec, theme)) for name, figure in _figures(document).items()}
    for name, figure in figures.items():
        figure.update_layout(title_text=escape(name), title_font_size=13, margin_t=64)
    return figures


def _figures(document: Document) -> dict[str, Figure]:
    from bridge.verify.diff_document import DiffDocument
    from bridge.verify.verdict import Verdict

    if isinstance(document, Verdict):
        return _of_verdict(document)
    if isinstance(document, DiffDocument):
        from bridge.report.flow_figures import flow, step_trace
        from bridge.report.layer_figures import layer_maps

        found = {f"steps {trace.metric}": step_trace(trace) for trace in document.steps}
        return {"flow": flow(document), **layer_maps(document), **found} if len(document.table) else found
    from bridge.report.layer_figures import scan_map

    return {f"layer-{by}": scan_map(document, by=by) for by in ("op", "module")}


def _of_verdict(verdict: Verdict) -> dict[str, Figure]:
    from bridge.report.error_figures import error_map, histogram
    from bridge.report.verdict_margins import margins
    from bridge.report.verdict_model import build_view

    view = build_view(verdict)
    found = {"margins": margins(view)}
    for group in view.groups:
        entry = group.worst.entry
        if entry.error_map is not None:
            found[f"map {group.tensor}"] = error_map(entry.error_map)
        if entry.histogram is not None:
            found[f"histogram {group.tensor}"] = histogram(entry.histogram, failed=group.outcome == "FAIL")
    return found


#: Pixels above a plot: plotly's buttons appear there, at the right, and must not lie on the colours' labels.
BAR = 32
#: A legend above the plot, at the left of those buttons.
LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}


def layout(height: int, **more: Any) -> dict[str, Any]:
    """Return the layout that all figures share; the colours live in its template."""
    axis = {
        "gridcolor": light("grid"),
        "linecolor": light("line"),
        "zerolinecolor": light("line"),
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": light("line"),
        "title": {"standoff": 8},
    }
    template = {
        "layout": {
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": light("ink")},
            "paper_bgcolor": light("paper"),
            "plot_bgcolor": light("paper"),
            "hoverlabel": {
                "bgcolor": light("panel"),
                "bordercolor": light("line"),
                "font": {"color": light("ink")},
            },
            "hovermode": "closest",
            "modebar": {
                "bgcolor": "rgba(0,0,0,0)",
                "color": light("muted"),
                "activecolor": light("ink"),
            },
            "xaxis": axis,
            "yaxis": axis,
        }
    }
    base = {"template": template, "height": height, "showlegend": False, "autosize": True}
    return base | {"margin": {"l": 60, "r": 16, "t": BAR, "b": 44}} | more


def escape(text: str) -> str:
    """Escape untrusted text for plotly, which reads a few HTML tags in its labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
