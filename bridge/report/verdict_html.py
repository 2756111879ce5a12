"""The page of a verdict."""

from __future__ import annotations

from typing import Any

from bridge.report.page import render_page
from bridge.report.verdict_margins import margins
from bridge.report.verdict_model import COLUMNS, build_view
from bridge.report.verdict_panels import WORST_COLUMNS, Panel, build_panels
from bridge.verify.verdict import Verdict

#: Cases listed per tensor; a page of more is neither read nor small.
ROW_LIMIT = 200


def render(verdict: Verdict) -> str:
    """Return the page."""
    view = build_view(verdict)
    panels, left_out = build_panels(view.groups, limit=ROW_LIMIT)
    figure = margins(view) if view.margins else None
    figures = {"margins": figure.spec} if figure else {}
    figures |= _panel_figures(panels)
    return render_page(
        "verdict.html.j2",
        data={
            "figures": figures,
            "results": {panel.tensor: [result.plain() for result in panel.results] for panel in panels},
        },
        view=view,
        columns=COLUMNS,
        worst_columns=WORST_COLUMNS,
        margins=figure,
        panels=panels,
        left_out=left_out,
        row_limit=ROW_LIMIT,
        expandable=any(len(group.rows) > 1 for group in view.groups),
    )


def _panel_figures(panels: tuple[Panel, ...]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for panel in panels:
        for result in panel.results:
            if result.map is not None:
                found[result.map_name] = result.map.spec
            if result.histogram is not None:
                found[result.histogram_name] = result.histogram.spec
    return found
