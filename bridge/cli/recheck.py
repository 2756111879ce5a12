"""`bridge recheck`: a verdict again, under other constants or from its whole bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bridge.cli._judged import Progress, publish, report_options


@click.command("recheck")
@click.argument(
    "document", type=click.Path(path_type=Path), default=Path("verdict.json"), metavar="[VERDICT.JSON]"
)
@click.option(
    "--run", "anew", is_flag=True, help="Run golden, reference and kernel again, not only the arithmetic."
)
@click.option("--fudge-factor", type=float, help="Gate constant in place of the declared one.")
@click.option("--project-atol", type=float, help="Gate constant in place of the declared one.")
@click.option(
    "--max-reference-relative-error", type=float, help="Gate constant in place of the declared one."
)
@click.option("--timeout", type=click.FloatRange(min=1), default=300.0, show_default=True,
              help="With --run: seconds one case may take.")  # fmt: skip
@report_options(default=Path("recheck/report.html"))
def command(document: Path, anew: bool, **options: Any) -> int:
    """Judge a stored verdict again.

    Without options it checks that the stored verdict follows from the stored numbers. With other constants
    it shows what they would have decided. --run asks for the same judgement again, offline, from the capture
    and kernel that the verdict names, and lists what is no longer the same: source, versions, inputs, errors.
    """
    from bridge.report import read_json
    from bridge.verify import recheck
    from bridge.verify.request import ConstantChoice

    verdict = read_json(document)
    choice = ConstantChoice(**{name: options[name] for name in ConstantChoice.__struct_fields__})
    if not anew:
        again = recheck.rejudge(verdict, choice)
        return publish(again, options)
    with Progress(options["report"]) as progress:
        again, changes = recheck.rerun(verdict, choice, timeout=options["timeout"], progress=progress)
        code = publish(again, options)
    for text in changes or ("nothing else changed: same kernel, versions, inputs and errors",):
        click.echo(f"recheck  {text}", err=options["as_json"])
    if again.verdict != verdict.verdict:
        click.echo(f"recheck  the verdict was {verdict.verdict}", err=options["as_json"])
    return code
