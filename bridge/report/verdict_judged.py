"""One verdict prepared for a page, which may hold several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge.report.figures import Figure
from bridge.report.verdict_margins import margins
from bridge.report.verdict_model import View, build_view
from bridge.report.verdict_panels import Panel, build_panels
from bridge.verify.verdict import Verdict

#: Cases listed per tensor; a page of more is neither read nor small.
ROW_LIMIT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict with its figures; `prefix` keeps the names of several verdicts apart."""

    prefix: str
    view: View
    margins: Figure | None
    panels: tuple[Panel, ...]
    left_out: str
    row_limit: int = ROW_LIMIT

    @property
    def expandable(self) -> bool:
        return any(len(group.rows) > 1 for group in self.view.groups)

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return plotly figures by name."""
        found = {f"{self.prefix}margins": self.margins.spec} if self.margins else {}
        for panel in self.panels:
            for result in panel.results:
                if result.map is not None:
                    found[result.map_name] = result.map.spec
                if result.histogram is not None:
                    found[result.histogram_name] = result.histogram.spec
        return found

    def results(self) -> dict[str, Any]:
        """Return what the page's script shows when another case is chosen, by panel."""
        return {panel.key: [result.plain() for result in panel.results] for panel in self.panels}


def judged(verdict: Verdict, *, prefix: str = "") -> Judged:
    """Prepare one verdict."""
    view = build_view(verdict)
    panels, left_out = build_panels(view.groups, limit=ROW_LIMIT, prefix=prefix)
    return Judged(
        prefix=prefix,
        view=view,
        margins=margins(view) if view.margins else None,
        panels=panels,
        left_out=left_out,
    )
