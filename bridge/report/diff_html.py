"""The page of a diff or an ab run."""

from __future__ import annotations

from bridge.report.call_details import call_details
from bridge.report.diff_model import CALL_COLUMNS, SUSPECT_COLUMNS, build_diff_view, call_cells
from bridge.report.flow_figures import flow, step_trace
from bridge.report.grid import diff_grid
from bridge.report.layer_figures import layer_maps
from bridge.report.page import render_page
from bridge.report.verdict_judged import judged
from bridge.report.verdict_model import COLUMNS
from bridge.report.verdict_panels import WORST_COLUMNS
from bridge.verify.diff_document import DiffDocument

#: Calls that stand in the page itself, for readers without scripts and on paper.
STATIC_ROWS = 50


def render(document: DiffDocument) -> str:
    """Return the page."""
    view = build_diff_view(document)
    document = view.document
    filled = len(document.table) > 0
    drawn = {}
    if filled:
        drawn = {"flow": flow(document), **layer_maps(document)}
    traces = {f"steps-{i}": step_trace(trace) for i, trace in enumerate(document.steps)}
    verdicts = [judged(verdict, prefix=f"v{i}-") for i, verdict in enumerate(document.verdicts)]
    details, figures = call_details(document.details)
    figures |= {name: figure.spec for name, figure in (drawn | traces).items()}
    results: dict[str, object] = {}
    for found in verdicts:
        figures |= found.figures()
        results |= found.results()
    return render_page(
        "diff.html.j2",
        data={"figures": figures, "results": results, "grid": diff_grid(document.table), "details": details},
        view=view,
        doc=document,
        drawn=drawn,
        traces=traces,
        verdicts=verdicts,
        verdict_columns=COLUMNS,
        worst_columns=WORST_COLUMNS,
        suspect_columns=SUSPECT_COLUMNS,
        call_columns=CALL_COLUMNS,
        rows=[call_cells(row) for row in view.first_rows(STATIC_ROWS)],
    )
