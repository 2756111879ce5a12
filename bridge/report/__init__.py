"""Reports of a verdict, a diff or a scan: HTML, text, Markdown, JUnit, all from one JSON document.

Needs neither torch nor a GPU. Each renderer is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.report.figures import plot
    from bridge.report.html import render_html, write_report
    from bridge.report.json import read_document, read_json, write_json
    from bridge.report.junit import render_junit, write_junit
    from bridge.report.markdown import render_markdown, write_markdown
    from bridge.report.text import render_text

_HOMES = {
    "plot": "figures",
    "read_document": "json",
    "read_json": "json",
    "render_html": "html",
    "render_junit": "junit",
    "render_markdown": "markdown",
    "render_text": "text",
    "write_json": "json",
    "write_junit": "junit",
    "write_markdown": "markdown",
    "write_report": "html",
}

__all__ = [
    "plot",
    "read_document",
    "read_json",
    "render_html",
    "render_junit",
    "render_markdown",
    "render_text",
    "write_json",
    "write_junit",
    "write_markdown",
    "write_report",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'bridge.report' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bridge.report.{home}"), name)
