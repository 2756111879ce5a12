"""What `diff`, `ab` and `scan` share: where the document goes, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bridge import errors

if TYPE_CHECKING:
    from bridge.verify.diff_document import DiffDocument, ScanDocument

F = TypeVar("F", bound=Callable[..., Any])

#: Outcome of a comparison -> exit code.
EXIT_CODES = {
    "IDENTICAL": errors.EXIT_OK,
    "SAME WITHIN ROUNDING": errors.EXIT_OK,
    "DIVERGED": errors.EXIT_FAIL,
    "INCONCLUSIVE": errors.EXIT_INCONCLUSIVE,
    "NOTHING MATCHED": errors.EXIT_INCONCLUSIVE,
}


def output_options(function: F) -> F:
    """Options about where the document goes."""
    path = click.Path(path_type=Path, dir_okay=False)
    for option in (
        click.option("--json", "as_json", is_flag=True, help="The document on stdout, the text on stderr."),
        click.option(
            "--format",
            "style",
            type=click.Choice(["text", "markdown"]),
            default="text",
            show_default=True,
            help="What is printed; markdown is GitHub's, for a pull request.",
        ),
        click.option(
            "--report",
            type=path,
            metavar="FILE",
            default=Path("report.html"),
            show_default=True,
            help="HTML report; the JSON document is written beside it.",
        ),
    ):
        function = option(function)
    return function


def publish_diff(document: DiffDocument, options: dict[str, Any]) -> int:
    """Write the report and diff.json, print the answer, and return the exit code."""
    _publish(document, "diff.json", options)
    return EXIT_CODES[document.outcome]


def publish_scan(document: ScanDocument, options: dict[str, Any]) -> int:
    """Write the report and scan.json, print the answer, and return the exit code."""
    from bridge.cli._judged import exit_code

    _publish(document, "scan.json", options)
    return exit_code(document.verdict, strict=False)


def _publish(document: DiffDocument | ScanDocument, name: str, options: dict[str, Any]) -> None:
    import msgspec

    from bridge import report as reports

    target: Path = options["report"]
    beside = target.parent / name
    _write(beside, msgspec.json.encode(document))
    reports.write_report(document, target)
    if options["style"] == "markdown":
        text = reports.render_markdown(document)
    else:
        text = reports.render_text(document, color=_color(options))
    _say(text, document, options, target, beside)


def _color(options: dict[str, Any]) -> bool:
    context = click.get_current_context(silent=True)
    stream = sys.stderr if options["as_json"] else sys.stdout
    return stream.isatty() if context is None or context.color is None else context.color


def _say(text: str, document: Any, options: dict[str, Any], target: Path, beside: Path) -> None:
    to_stderr = options["as_json"]
    click.echo(text, err=to_stderr, nl=not text.endswith("\n"))
    if options["style"] == "text":
        click.echo(f"\nreport   {target}\ndocument {beside}", err=to_stderr)
    if options["as_json"]:
        import msgspec

        click.echo(msgspec.json.encode(document).decode(), nl=True)


def _write(path: Path, data: bytes) -> None:
    from bridge.report.files import write_file

    try:
        write_file(path, data)
    except errors.UsageError as error:
        raise errors.UsageError(f"{error}, or choose another --report") from None
