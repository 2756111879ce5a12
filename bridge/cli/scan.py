"""`bridge scan`: judge every captured op of one run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from bridge.cli._compared import output_options, publish_scan

_PATH = click.Path(path_type=Path)


@click.command("scan")
@click.option("--from", "capture", type=_PATH, metavar="DIR", required=True, help="Capture with tensors.")
@click.option("--ops", multiple=True, metavar="GLOB", help="Only these calls, by key, op, module or class.")
@click.option("-j", "--jobs", type=click.IntRange(1), help="Processes; default: one per core, 8 at most.")
@click.option(
    "--resume",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Append results here, and go on from what is there.",
)
@click.option(
    "--max-bytes",
    type=click.IntRange(1),
    default=2 << 30,
    show_default=True,
    metavar="N",
    help="Leave out calls whose tensors need more memory than this in FP64.",
)
@output_options
def command(capture: Path, **options: Any) -> int:
    """Judge every captured op against its own FP64 re-computation; no second run is needed.

    Finds silent TF32, reduced-precision accumulation, overflow and wrong kernels among
    thousands of good calls. Capture with --tensors all first.

    \b
    bridge capture --step 100 --config train.toml --ops '*' --tensors all
    bridge scan --from capture/
    """
    from bridge.verify.scan import default_jobs, scan_capture

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{done} of {total} calls", err=True, nl=done == total)

    document = scan_capture(
        capture,
        ops=options["ops"],
        jobs=options["jobs"] or default_jobs(),
        resume=options["resume"],
        max_call_bytes=options["max_bytes"],
        command=("bridge", *sys.argv[1:]),
        progress=progress,
    )
    return publish_scan(document, options)
