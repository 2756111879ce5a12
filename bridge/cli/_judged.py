"""What every verb that ends in a verdict shares: progress, the report's files, the exit code."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from bridge import errors

if TYPE_CHECKING:
    from bridge.verify.request import Event
    from bridge.verify.verdict import Outcome, Verdict

F = TypeVar("F", bound=Callable[..., Any])


def report_options(default: Path) -> Callable[[F], F]:
    """Options about where the verdict goes; default: name of the HTML report."""
    path = click.Path(path_type=Path)

    def decorate(function: F) -> F:
        for option in (
            click.option("-v", "--verbose", is_flag=True, help="Show every case in the table."),
            click.option("--strict", is_flag=True, help="Exit 3 for PASS WITH LIMITATIONS too."),
            click.option("--junit", type=path, metavar="FILE", help="Also write JUnit XML."),
            click.option(
                "--json", "as_json", is_flag=True, help="verdict.json on stdout, the table on stderr."
            ),
            click.option(
                "--report",
                type=path,
                metavar="FILE",
                default=default,
                show_default=True,
                help="HTML report; verdict.json is written beside it.",
            ),
        ):
            function = option(function)
        return function

    return decorate


class Progress:
    """Follows the events of a judgement: a status line on a terminal, and the declaration on disk.

    The constants, the digests of the inputs and the kernel's hash are on disk, beside the report, before the
    target first runs; once the verdict, which holds them too, is written the file goes.
    """

    def __init__(self, report: Path) -> None:
        self._declaration = report.parent / "verdict.declared.json"
        self._terminal = sys.stderr.isatty()
        self._shown = 0
        self._start = time.monotonic()
        self._declared = False

    def __enter__(self) -> Self:
        # This process has little else to do while others judge.
        threading.Thread(target=_prepare, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show("")
        if self._declared and (kind is None or issubclass(kind, errors.BridgeError)):
            self._declaration.unlink(missing_ok=True)

    def __call__(self, event: Event) -> None:
        from bridge.verify import request

        if isinstance(event, request.Declared):
            from bridge.report.files import write_file
            from bridge.report.json import encode

            write_file(self._declaration, encode(event))
            self._declared = True
        elif isinstance(event, request.Started):
            self._show(f"[{event.number}/{event.total}] {event.case}")
        elif isinstance(event, request.Phase):
            self._show(event.name)

    def _show(self, text: str) -> None:
        if not self._terminal:
            return
        seconds = time.monotonic() - self._start
        line = f"{seconds:4.0f} s  {text}"[:100] if text else ""
        click.echo("\r" + line.ljust(self._shown) + ("\r" if not text else ""), err=True, nl=False)
        self._shown = len(line)


def _prepare() -> None:
    importlib.import_module("bridge.report.verdict_html")
    importlib.import_module("bridge.report.page").prepare()


def publish(verdict: Verdict, options: dict[str, Any]) -> int:
    """Write the report, verdict.json and JUnit, print the table, and return the exit code."""
    from bridge import report as reports

    report: Path = options["report"]
    document = report.parent / "verdict.json"
    reports.write_json(verdict, document)
    reports.write_report(verdict, report)
    if options.get("junit"):
        from bridge.report.junit import write_junit

        write_junit(verdict, options["junit"])
    try:
        _print(verdict, report, document, options)
    except BrokenPipeError:
        # `bridge verify | head` must not turn a FAIL into success; the shell sees our exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code(verdict.verdict, strict=options["strict"])


def _print(verdict: Verdict, report: Path, document: Path, options: dict[str, Any]) -> None:
    from bridge import report as reports
    from bridge.report.json import encode

    to_stderr = options["as_json"]
    context = click.get_current_context(silent=True)
    stream = sys.stderr if to_stderr else sys.stdout
    color = stream.isatty() if context is None or context.color is None else context.color
    click.echo(reports.render_text(verdict, color=color, verbose=options["verbose"]), err=to_stderr, nl=False)
    click.echo(f"\nreport   {report}\nverdict  {document}", err=to_stderr)
    if to_stderr:
        click.echo(encode(verdict), nl=False)


def exit_code(outcome: Outcome, *, strict: bool) -> int:
    """0 for a verdict that may be trusted, 1 for FAIL, 3 for what settles nothing."""
    if outcome == "FAIL":
        return errors.EXIT_FAIL
    if outcome == "INCONCLUSIVE" or (strict and outcome == "PASS WITH LIMITATIONS"):
        return errors.EXIT_INCONCLUSIVE
    return errors.EXIT_OK
