"""The page of a verdict."""

from __future__ import annotations

from bridge.report.page import render_page
from bridge.report.verdict_judged import judged
from bridge.report.verdict_model import COLUMNS
from bridge.report.verdict_panels import WORST_COLUMNS
from bridge.verify.verdict import Verdict


def render(verdict: Verdict) -> str:
    """Return the page."""
    found = judged(verdict)
    return render_page(
        "verdict.html.j2",
        data={"figures": found.figures(), "results": found.results()},
        j=found,
        verdict_columns=COLUMNS,
        worst_columns=WORST_COLUMNS,
    )
