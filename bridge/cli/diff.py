"""`bridge diff`: where two runs part, and whether the difference was born there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from bridge.cli._compared import output_options, publish_diff

_PATH = click.Path(path_type=Path)


@click.command("diff")
@click.argument("a", type=_PATH)
@click.argument("b", type=_PATH)
@click.option("--overrides", type=_PATH, metavar="FILE", help="CSV of `key_a,key_b`: pairs that you know.")
@click.option("--allow-mismatch", is_flag=True, help="Compare runs of another model, step, dtype or seed.")
@click.option(
    "--no-replay", is_flag=True, help="Attribute from digests alone, even where tensors are stored."
)
@output_options
def command(a: Path, b: Path, **options: Any) -> int:
    """Compare two captures of one step: baseline A, candidate B.

    Either may be an activation log of torchtitan (a file, or the folder of all ranks). Exits 0 when the runs
    agree within rounding, 1 when they part, 3 when nothing could be compared or the step cannot tell: a
    capture is incomplete, or the batches have other sizes.

    \b
    bridge diff baseline/ kernel/
    bridge diff baseline/ kernel/ --format markdown >> "$GITHUB_STEP_SUMMARY"
    """
    from bridge.verify.diff import diff_captures

    document = diff_captures(
        a,
        b,
        overrides=options["overrides"],
        allow_mismatch=options["allow_mismatch"],
        replay=not options["no_replay"],
        command=("bridge", *sys.argv[1:]),
    )
    return publish_diff(document, options)
