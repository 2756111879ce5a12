"""The HTML report: one file, offline, readable without JavaScript."""

from __future__ import annotations

from pathlib import Path

import jinja2

from bridge.report.files import write_file
from bridge.report.model import COLUMNS, build_view
from bridge.verify.verdict import Verdict


def render_html(verdict: Verdict) -> str:
    """Return the page; everything that came from the run or from a kernel's author is escaped."""
    loader = jinja2.PackageLoader("bridge.report")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.get_template("verdict.html.j2")
    return template.render(view=build_view(verdict), columns=COLUMNS)


def write_report(verdict: Verdict, path: Path | str) -> None:
    """Write the HTML report; raises UsageError when the path cannot be written."""
    write_file(path, render_html(verdict))
