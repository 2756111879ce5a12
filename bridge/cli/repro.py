"""`bridge repro`: the smallest standalone script that still fails."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote

import click


@click.command("repro")
@click.argument(
    "document", type=click.Path(path_type=Path), default=Path("verdict.json"), metavar="[VERDICT.JSON]"
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("repro"),
    show_default=True,
    metavar="DIR",
    help="Folder to write.",
)
@click.option("--tensor", metavar="NAME", help="Failing tensor to show; the worst one by default.")
@click.option("--case", "case", metavar="NAME", help="Failing case to show; a captured one by default.")
@click.option(
    "--budget", type=click.IntRange(0), default=300, show_default=True, help="Runs that shrinking may take."
)
@click.option("--force", is_flag=True, help="Overwrite the folder's files.")
def command(document: Path, out: Path, tensor: str | None, case: str | None, budget: int, force: bool) -> int:
    """Shrink a failing input and write it as a script.

    Takes the failure of a verdict, drops rows, then columns, then values for as long as the kernel fails the
    same way, and writes repro.py (imports torch and the kernel only), inputs.safetensors and test_repro.py.
    """
    from bridge.report import read_json

    verdict = read_json(document)
    from bridge.verify.repro import make_repro

    def say(text: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"bridge: {text}", err=True)

    made = make_repro(verdict, out=out, tensor=tensor, case=case, budget=budget, force=force, say=say)
    click.echo(f"{made.tensor} of {made.case}")
    for label, shapes in (("from", made.before), ("to", made.after)):
        click.echo(f"{label:<6} {' '.join(str(shape) for shape in shapes)}")
    click.echo(f"{'tries':<6} {made.tries}")
    click.echo(
        f"run    python {quote(str(made.folder / 'repro.py'))}\n"
        f"test   pytest {quote(str(made.folder / 'test_repro.py'))}"
    )
    return 0
