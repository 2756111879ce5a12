"""Any document as one HTML file: offline, readable without JavaScript."""

from __future__ import annotations

from pathlib import Path

from bridge.report.documents import Document, renderer
from bridge.report.files import write_file


def render_html(document: Document) -> str:
    """Return the page; everything that came from the run or from a kernel's author is escaped."""
    return renderer(document, "html")(document)


def write_report(document: Document, path: Path | str) -> None:
    """Write the HTML report; raises UsageError when the path cannot be written."""
    write_file(path, render_html(document))
