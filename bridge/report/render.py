"""One call for every form: a document on disk in, a report's text out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from bridge.report.json import encode, read_json
from bridge.verify.verdict import Verdict

FORMATS = ("html", "text", "markdown", "junit", "json")


def read_document(path: Path | str) -> Verdict:
    """Read the document that a verb wrote; raises UsageError when it is none of ours."""
    return read_json(path)


def render(document: Verdict, form: str, *, color: bool = False, verbose: bool = False) -> str:
    """Return the document in one of FORMATS.

    Args:
        document: What `read_document` returned.
        form: One of FORMATS.
        color: Text only: terminal colours.
        verbose: Text only: every case.
    """
    if form == "json":
        return encode(document).decode()
    if form == "text":
        from bridge.report.text import render_text

        return render_text(document, color=color, verbose=verbose)
    if form not in FORMATS:
        raise ValueError(f"form must be one of {', '.join(FORMATS)}, got {form!r}")
    painter: Callable[[Verdict], str] = getattr(
        importlib.import_module(f"bridge.report.{form}"), f"render_{form}"
    )
    return painter(document)
