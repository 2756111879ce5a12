"""`bridge verify`: judge a kernel against its FP64 golden and its eager reference."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Literal

import click

from bridge import errors
from bridge.cli._judged import Progress, publish, report_options


def _complete_op(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from bridge.verify.registry import known_names

    return [name for name in known_names() if name.startswith(incomplete)]


def _shapes(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    shapes = []
    for value in values:
        parts = re.fullmatch(r"\(?\s*(\d+(?:\s*[x,]\s*\d+)*)\s*,?\s*\)?", value)
        sizes = tuple(int(part) for part in re.findall(r"\d+", parts[1])) if parts is not None else ()
        if not sizes or 0 in sizes:
            raise errors.UsageError(f"--shape must be sizes such as 8x5120, got {value!r}")
        shapes.append(sizes)
    return tuple(shapes)


_PATH = click.Path(path_type=Path)


@click.command("verify")
@click.option(
    "--op", metavar="NAME", shell_complete=_complete_op, help="Kernel to judge, by name or by site."
)
@click.option("--from", "capture", type=_PATH, metavar="DIR", help="Capture whose real inputs decide first.")
@click.option("--kernel", metavar="FILE[:SPEC]", help="Kernel file with SPEC = KernelSpec(...).")
@click.option("--reference", metavar="PKG.FN", help="Without a spec: the eager twin of --target.")
@click.option("--target-fn", metavar="PKG.FN", help="Function or custom op to judge against --reference.")
@click.option("--target", metavar="kernel|recorded|PKG.FN", default="kernel", show_default=True,
              help="Run the kernel, or judge what the run recorded; or --target-fn.")  # fmt: skip
@click.option("--partial", is_flag=True, help="Judge what is intact of a capture that is torn or damaged.")
@click.option("--quick", is_flag=True, help="Of drawn inputs the declared shapes only.")
@click.option("--no-sweep", is_flag=True, help="Judge the captured calls alone.")
@click.option(
    "--max-calls", type=click.IntRange(1), default=4, show_default=True, help="Captured calls to judge."
)
@click.option("--dtype", "dtypes", multiple=True, help="Sweep this declared dtype only; repeatable.")
@click.option("--shape", "shapes", multiple=True, callback=_shapes, help="Sweep this shape only; repeatable.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of everything drawn.")
@click.option("--fudge-factor", type=float, help="Gate constant; declared before the target runs.")
@click.option("--project-atol", type=float, help="Gate constant; declared before the target runs.")
@click.option(
    "--max-reference-relative-error", type=float, help="Gate constant; declared before the target runs."
)
@click.option(
    "--config", type=_PATH, metavar="FILE", help="train.toml whose [verify] declares gate constants."
)
@click.option("--timeout", type=click.FloatRange(min=1), default=300.0, show_default=True,
              help="Seconds one case may take before the kernel counts as hanging.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), metavar="N",
              help="Processes that share the cases  [default: by cores and cases]")  # fmt: skip
@click.option(
    "--in-process", is_flag=True, help="No child process, for a debugger; a crash ends the command."
)
@report_options(default=Path("report.html"))
def command(**options: Any) -> int:
    """Judge a kernel: FP64 golden, eager reference, kernel target.

    Judges captured calls (--from) first, then drawn inputs: declared shapes, tile edges, adversarial values,
    layouts. Writes an HTML report and, beside it, verdict.json.

    \b
    bridge verify --op offset_rmsnorm --from capture/
    bridge verify --kernel my_kernel.py
    """
    from bridge.verify.request import Request

    capture = options["capture"]
    target, target_fn = _targets(options["target"], options["target_fn"])
    request = Request(
        op=options["op"],
        kernel=options["kernel"],
        reference=options["reference"],
        target_fn=target_fn,
        capture=None if capture is None else str(capture),
        partial=options["partial"],
        target=target,
        sweep=not options["no_sweep"],
        quick=options["quick"],
        max_calls=options["max_calls"],
        dtypes=options["dtypes"],
        shapes=options["shapes"],
        seed=options["seed"],
        constants=_constants(options),
        command=("bridge", *sys.argv[1:]),
    )
    request.check()
    if options["in_process"] and (options["jobs"] or 1) > 1:
        raise errors.UsageError("--in-process judges in this one process; leave out --jobs")
    with Progress(options["report"]) as progress:
        if options["in_process"]:
            from bridge.verify.session import execute

            verdict = execute(request, emit=progress)
        else:
            from bridge.verify.isolate import verify_isolated

            verdict = verify_isolated(
                request, timeout=options["timeout"], jobs=options["jobs"], progress=progress
            )
        return publish(verdict, options)


def _targets(target: str, target_fn: str | None) -> tuple[Literal["kernel", "recorded"], str | None]:
    """Which results to judge, and the function that makes them when there is no spec."""
    if target == "kernel":
        return "kernel", target_fn
    if target == "recorded":
        return "recorded", target_fn
    if target_fn is None and ("." in target or ":" in target):
        return "kernel", target
    raise errors.UsageError(
        f"--target takes kernel, recorded or the dotted name of one function, got {target!r}"
        + (f" beside --target-fn {target_fn}" if target_fn is not None else "")
    )


def _constants(options: dict[str, Any]) -> Any:
    """What the flags say, else what train.toml says, else what the spec declares."""
    from bridge.verify.request import ConstantChoice

    chosen: dict[str, float | None] = {}
    if options["config"] is not None:
        from bridge.config import load_config

        declared = load_config(options["config"]).verify
        chosen = {name: getattr(declared, name) for name in ConstantChoice.__struct_fields__}
    flags = {name: options[name] for name in ConstantChoice.__struct_fields__ if options[name] is not None}
    return ConstantChoice(**{**chosen, **flags})
