"""`bridge report`: render a verdict, a diff or a scan again, in another form or on another machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

FORMATS = ("html", "text", "markdown", "junit", "json")

_SUFFIXES = {
    ".html": "html",
    ".htm": "html",
    ".md": "markdown",
    ".xml": "junit",
    ".txt": "text",
    ".json": "json",
}


@click.command("report")
@click.argument("document", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="File to write; left out, or -: standard output."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="Form of the report; left out: by the name of --out, else text.",
)
@click.option("-v", "--verbose", is_flag=True, help="Text: every case, not only the worst of each tensor.")
def command(document: Path, out: Path | None, form: str | None, verbose: bool) -> None:
    """Render DOCUMENT (verdict.json, diff.json or scan.json) as HTML, text, Markdown, JUnit XML or JSON.

    Needs neither torch nor a GPU. The exit code says whether the report was written, not what it says.
    """
    from bridge.report import read_document
    from bridge.report.render import render

    to_stdout = out is None or str(out) == "-"
    chosen = form or (_SUFFIXES.get(out.suffix.lower(), "html") if out and not to_stdout else "text")
    text = render(read_document(document), chosen, color=_color() if to_stdout else False, verbose=verbose)
    if to_stdout:
        click.echo(text, nl=False)
        return
    from bridge.report.files import write_file

    assert out is not None  # `to_stdout` is true without it.
    write_file(out, text)
    click.echo(f"wrote {out}", err=True)


def _color() -> bool:
    context = click.get_current_context()
    return context.color is not False and sys.stdout.isatty()
