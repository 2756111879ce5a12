"""One call for every form: a document in, a report's text out."""

from __future__ import annotations

from bridge.report.documents import Document, renderer
from bridge.report.json import encode
from bridge.report.text import render_text

FORMATS = ("html", "text", "markdown", "junit", "json")


def render(document: Document, form: str, *, color: bool = False, verbose: bool = False) -> str:
    """Return the document in one of FORMATS.

    Args:
        document: What `read_document` returned.
        form: One of FORMATS.
        color: Text only: terminal colours.
        verbose: Text only: everything, not only the worst.
    """
    if form == "json":
        return encode(document).decode()
    if form == "text":
        return render_text(document, color=color, verbose=verbose)
    if form not in FORMATS:
        raise ValueError(f"form must be one of {', '.join(FORMATS)}, got {form!r}")
    return renderer(document, form)(document)
