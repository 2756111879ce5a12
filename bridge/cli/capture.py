"""`bridge capture`: run training to a step and store what happened in it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import click

from bridge import errors


class Progress:
    """One status line on a terminal; elsewhere a line every 15 seconds. Messages go around it."""

    INTERVAL = 15.0  # seconds between lines where nothing can be overwritten

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # Every rank of a job would say the same; errors go another way.
        self._mute = os.environ.get("RANK", "0") != "0"
        self._live = stream.isatty()
        self._shown = ""
        self._last = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def step(self, step: int, last: int | None) -> None:
        """A step starts."""
        if self._mute:
            return
        text = f"step {step}" if last is None else f"step {step} of {last}"
        now = time.monotonic()
        if self._live and now - self._last > 0.1:
            self._clear()
            self._shown = text
            print(text, end="", file=self._stream, flush=True)
            self._last = now
        elif not self._live and now - self._last > self.INTERVAL:
            self.say(text)
            self._last = now

    def say(self, text: str) -> None:
        """One line for the user."""
        if self._mute:
            return
        self._clear()
        print(f"bridge: {' '.join(text.split())}", file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._shown:
            print("\r" + " " * len(self._shown) + "\r", end="", file=self._stream, flush=True)
            self._shown = ""


class _ScriptCommand(click.Command):
    """Takes everything after `--` as the script and its arguments, untouched."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["script"] = ()
        if "--" in args:
            at = args.index("--")
            args, ctx.meta["script"] = args[:at], tuple(args[at + 1 :])
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- SCRIPT.py ARGS...]"]


def _complete_op(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from bridge.verify.registry import known_names

    return [name for name in known_names() if name.startswith(incomplete)]


def _split(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def _numbers(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    parts = _split(ctx, param, values)
    if not all(part.isdigit() for part in parts):
        raise errors.UsageError(f"--ranks takes numbers such as 0,3, got {','.join(parts)!r}")
    return tuple(int(part) for part in parts)


def _pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for (left, equals, right), value in zip(pairs, values, strict=True):
        if not (left and equals and right):
            raise errors.UsageError(
                f"--replace takes CLASS=KERNEL, e.g. torch.nn.RMSNorm=rms_norm, got {value!r}"
            )
    return {left.strip(): right.strip() for left, _, right in pairs}


def _settings(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE with VALUE as TOML has it; a bare word is a string."""
    import tomllib

    found: dict[str, Any] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key.strip():
            raise errors.UsageError(f"--set takes KEY=VALUE, e.g. --set training.steps=200, got {value!r}")
        try:
            found[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = text
    return found


@click.command("capture", cls=_ScriptCommand)
@click.option("--step", metavar="N|A:B[@N]", help="Step to capture, or a window of steps.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=Path("train.toml"),
    show_default=True,
    help="train.toml, or a job file of torchtitan 0.2.x.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("capture"),
    show_default=True,
    help="Folder to write; it must be new, or an older capture with --force.",
)
@click.option(
    "--ops",
    multiple=True,
    callback=_split,
    shell_complete=_complete_op,
    metavar="NAME|GLOB",
    help="Keep tensors of these calls (kernel, op, key, module, class). Default: known kernels.",
)
@click.option(
    "--modules", multiple=True, callback=_split, metavar="GLOB", help="Keep tensors of these modules."
)
@click.option(
    "--tensors",
    type=click.Choice(["all", "inputs", "outputs", "none"]),
    help='Which tensors of those calls; "all" alone: of every call.',
)
@click.option(
    "--phases",
    multiple=True,
    callback=_split,
    metavar="PHASE",
    help="Only forward, recompute, backward or optimizer calls keep tensors.",
)
@click.option(
    "--ranks", multiple=True, callback=_numbers, metavar="N,...", help="Only these ranks keep tensors."
)
@click.option("--max-bytes", metavar="SIZE", help='Hard cap of what one rank stores, e.g. "8 GiB".')
@click.option(
    "--on",
    type=click.Choice(["nonfinite", "loss-jump"]),
    help="Keep the first step (of --step A:B, or of the run) at which this happens.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="BASELINE",
    help="Keep tensors of the first calls that differ from this capture; runs twice.",
)
@click.option("--first", type=click.IntRange(1), default=8, show_default=True, help="How many such calls.")
@click.option(
    "--replace",
    multiple=True,
    callback=_pairs,
    metavar="CLASS=KERNEL",
    help="Run a kernel in a module class's place, e.g. torch.nn.RMSNorm=rms_norm.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    callback=_settings,
    metavar="KEY=VALUE",
    help="Set a dotted field of torchtitan's config, over [train.set].",
)
@click.option("--continue", "go_on", is_flag=True, help="Train on after the capture, checkpoints included.")
@click.option("--eager", is_flag=True, help="Run compiled regions eagerly in that step, to see inside them.")
@click.option("--force", is_flag=True, help="Replace an older capture.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-v", "--verbose", is_flag=True, help="Show the run's own log on stderr.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Run training to step N, stop, and store the step: every call's digest, selected calls' tensors.

    The run is a torchtitan config named by train.toml, or any script given after `--`. Nothing is
    edited; loss and gradients are those of a run without capture.
    """
    from bridge.capture import capture_run
    from bridge.capture.folder import disk_full
    from bridge.config import BridgeConfig, TrainConfig, parse_size

    script = ctx.meta["script"]
    config: Path | BridgeConfig = options["config"]
    if script:
        if ctx.get_parameter_source("config") is not click.core.ParameterSource.DEFAULT:
            raise errors.UsageError("give either --config FILE or -- SCRIPT.py, not both")
        if options["settings"]:
            raise errors.UsageError("--set needs a torchtitan config; a script takes its own arguments")
        config = BridgeConfig(train=TrainConfig(script=script[0], args=script[1:]))
    budget = options["max_bytes"]
    progress = Progress(sys.stderr)
    quiet = contextlib.redirect_stdout(sys.stderr) if options["as_json"] else contextlib.nullcontext()
    with quiet, progress:
        result = capture_run(
            config,
            step=options["step"],
            out=options["out"],
            ops=options["ops"],
            modules=options["modules"],
            tensors=options["tensors"],
            phases=options["phases"],
            ranks=options["ranks"],
            budget_bytes=None if budget is None else parse_size(budget, where="--max-bytes"),
            force=options["force"],
            on=options["on"],
            against=options["against"],
            first=options["first"],
            eager=options["eager"],
            replace=options["replace"],
            settings=options["settings"],
            stop=not options["go_on"],
            verbose=options["verbose"],
            say=progress.say,
            progress=progress.step,
        )
    if os.environ.get("RANK", "0") != "0":
        return errors.EXIT_OK
    click.echo(json.dumps(result.as_dict(), indent=2) if options["as_json"] else result.describe())
    full = disk_full(result.problems, result.problem_codes)
    if full is not None:
        text = f"{result.path} is incomplete, the disk is full ({full})"
        raise errors.CaptureError(f"{text}; free some space, or write elsewhere with --out")
    if result.dropped and not result.calls_with_tensors:
        why = f" ({result.dropped_because})" if result.dropped_because else ""
        raise errors.NothingJudgedError(
            f"{result.path} has no tensors, all {result.dropped} that were asked for were dropped{why}: "
            "there is nothing to verify; raise --max-bytes, free some space, or name fewer calls with --ops"
        )
    return errors.EXIT_OK
