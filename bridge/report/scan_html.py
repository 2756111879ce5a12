"""The page of a scan."""

from __future__ import annotations

from bridge.report.call_details import Words, call_details
from bridge.report.grid import scan_grid
from bridge.report.layer_figures import scan_map
from bridge.report.page import render_page
from bridge.report.scan_model import SCAN_COLUMNS, build_scan_view, scan_cells
from bridge.verify.diff_document import ScanDocument

#: Calls that stand in the page itself, for readers without scripts and on paper.
STATIC_ROWS = 50


#: The two sides of a call's drill-down.
WORDS = Words(a="FP64", b="recorded", limit="threshold", arguments="Arguments")


def render(document: ScanDocument) -> str:
    """Return the page."""
    view = build_scan_view(document)
    drawn = {}
    if len(document.table):
        drawn = {"layer-op": scan_map(document, by="op"), "layer-module": scan_map(document, by="module")}
    details, figures = call_details(document.details, WORDS)
    return render_page(
        "scan.html.j2",
        data={
            "figures": figures | {name: figure.spec for name, figure in drawn.items()},
            "results": {},
            "grid": scan_grid(document.table),
            "details": details,
        },
        view=view,
        doc=document,
        drawn=drawn,
        call_columns=SCAN_COLUMNS,
        rows=[scan_cells(row) for row in view.worst_rows(STATIC_ROWS)],
    )
