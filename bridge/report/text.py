"""Any document as text for a terminal."""

from __future__ import annotations

from bridge.report.documents import Document, renderer
from bridge.report.terminal import WIDTH


def render_text(document: Document, *, color: bool = False, width: int = WIDTH, verbose: bool = False) -> str:
    """Return the document as text of `width` columns: the answer first, worst first.

    Args:
        document: A verdict, a diff or a scan.
        color: Add terminal colours.
        width: Columns to fill; at least 80 are used.
        verbose: Show everything, not only the worst.
    """
    return renderer(document, "text")(document, color=color, width=width, verbose=verbose)
