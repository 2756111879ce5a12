"""`bridge ab`: baseline against candidate, in one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from bridge.cli._compared import output_options, publish_diff

_PATH = click.Path(path_type=Path)


@click.command("ab")
@click.option("--config", type=_PATH, default=Path("train.toml"), show_default=True, metavar="FILE",
              help="The run, as for `bridge capture`.")  # fmt: skip
@click.option(
    "--override",
    "overrides",
    multiple=True,
    required=True,
    metavar="PKG.FN|KEY=VALUE",
    help="What the candidate has and the baseline has not; repeatable.",
)
@click.option("--step", type=click.IntRange(1), help="Step to compare; default: the config's, else 1.")
@click.option("--find-step", is_flag=True, help="Find the first step that differs by more than noise.")
@click.option("--last-step", type=click.IntRange(1), help="With --find-step: the last step to look at.")
@click.option("--kernel", "kernels", multiple=True, metavar="FILE[:SPEC]", help="Verify this kernel too.")
@click.option("--sweep", is_flag=True, help="Verify kernels on drawn inputs too, not only captured ones.")
@click.option("--out", type=_PATH, default=Path("ab"), show_default=True, metavar="DIR",
              help="Where the two captures go.")  # fmt: skip
@output_options
def command(**options: Any) -> int:
    """Run baseline and candidate, diff them, and verify the kernels that were swapped in.

    Both runs have the same config, seed and data and differ in --override alone. An override that the config
    already has is taken out of the baseline; one of the config's that claims the same modules is taken out of
    both runs, and said. With checkpoints in the config, both start from the nearest one before the step.
    What --override names is checked before anything runs.
    Exits 0 when they agree, 1 when they part or a kernel fails, 2 when a run fails, 3 when nothing is clear.

    \b
    bridge ab --config train.toml --override bridge.kernels.offset_rmsnorm.override.offset_rmsnorm
    bridge ab --config train.toml --override optimizer.param_groups.0.optimizer_kwargs.lr=1e-3 --step 10
    """
    from bridge.verify.ab import ab_run

    document = ab_run(
        options["config"],
        overrides=options["overrides"],
        step=options["step"],
        find_step=options["find_step"],
        last_step=options["last_step"],
        out=options["out"],
        kernels=options["kernels"],
        sweep=options["sweep"],
        command=("bridge", *sys.argv[1:]),
        say=lambda text: click.echo(f"bridge: {text}", err=True),
    )
    return publish_diff(document, options)
