"""`capture_run`: run training to a step and leave a capture folder. What `bridge capture` calls."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bridge.capture.request import CaptureResult, Progress, Request, Say
from bridge.capture.select import Selection
from bridge.capture.window import TRIGGERS, parse_window
from bridge.config import BridgeConfig, TrainConfig, load_config
from bridge.errors import ConfigError, UsageError


def capture_run(
    config: BridgeConfig | TrainConfig | Path | str,
    *,
    step: int | str | None = None,
    out: Path | str = "capture",
    ops: Sequence[str] = (),
    modules: Sequence[str] = (),
    tensors: str | None = None,
    phases: Sequence[str] = (),
    ranks: Sequence[int] = (),
    budget_bytes: int | None = None,
    force: bool = False,
    on: str | None = None,
    against: Path | str | None = None,
    first: int = 8,
    eager: bool = False,
    replace: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    stop: bool = True,
    verbose: bool = False,
    say: Say | None = None,
    progress: Progress | None = None,
) -> CaptureResult:
    """Train to a step with the tracer around it, and store what was asked for.

    Every argument left out is taken from the config's [capture] section.

    Args:
        config: `train.toml`, or what it holds.
        step: 100, or a window: "90:110", "90:110@100".
        out: The capture folder; new, or an older capture with `force`.
        ops: Kernel names and globs over key, op, module and module class; none: every known kernel.
        modules: More globs, over module FQN and class.
        tensors: "all", "inputs", "outputs" or "none" of the selected calls; "all" and no `ops` means of
            every call.
        phases: Only these phases of the selected calls.
        ranks: Only these ranks keep tensors.
        budget_bytes: Hard cap of what one rank stores.
        force: Replace an older capture.
        on: "nonfinite" or "loss-jump": keep the first step of the window at which that happens.
        against: A baseline capture: keep tensors of the first calls that differ from it, and of no others.
            The run is made twice.
        first: How many such calls.
        eager: Run torch.compile's regions eagerly in the recorded steps, so that their operators are seen.
        replace: Module class -> kernel to run in its place, by name or as FILE[:SPEC].
        settings: More dotted settings for torchtitan's config, over [train.set].
        stop: End the run after the last wanted step; False trains on, checkpoints included.
        verbose: Show the run's own log.
        say: Receives messages for the user, one line each.
        progress: Told every step that starts.

    Returns:
        Where the capture is and what is in it.

    Raises:
        ConfigError, UsageError: The request cannot be served; nothing was run.
        CaptureError: `out` cannot become a capture; nothing was run.
        StepNotReachedError: The run ended before the step.
        RunError: Training failed; the message says whether something was captured.
    """
    whole = _as_config(config, settings)
    say = say or (lambda text: None)
    # Before anything else of ours is imported: some of it imports Triton.
    note = _choose_interpreter()
    if against is not None and step is None and whole.capture.step is None:
        from bridge.capture.store import load_capture

        step = load_capture(against).manifest.step
    request = _merge(
        whole, step=step, out=out, ops=(*ops, *modules), tensors=tensors, phases=phases, ranks=ranks,
        budget_bytes=budget_bytes, force=force, on=on, replace=replace, stop=stop, note=note,
        eager=eager,
    )  # fmt: skip
    if against is not None:
        from bridge.capture.against import capture_against

        return capture_against(
            request, whole, baseline=Path(against), first=first, verbose=verbose, say=say, progress=progress
        )
    from bridge.capture.job import Job

    job = Job(request, whole, say=say, progress=progress)
    job.run(verbose=verbose)
    return job.result()


def _choose_interpreter() -> str | None:
    """Without a GPU let Triton kernels run in its interpreter; what to tell the user about that."""
    from bridge.verify.registry import interpreting, prepare_triton

    chosen = "TRITON_INTERPRET" in os.environ or interpreting()
    try:
        prepare_triton()
    except UsageError as error:
        # A run without Triton kernels is none the worse for it.
        return str(error)
    if not chosen and os.environ.get("TRITON_INTERPRET") == "1":
        return "no GPU here: Triton kernels run in its interpreter (TRITON_INTERPRET=1)"
    return None


def _as_config(
    config: BridgeConfig | TrainConfig | Path | str, settings: Mapping[str, Any] | None
) -> BridgeConfig:
    if isinstance(config, TrainConfig):
        config = BridgeConfig(train=config)
    elif not isinstance(config, BridgeConfig):
        config = load_config(config)
    if settings:
        if config.train.module is None:
            what = "script" if config.train.script is not None else "job file"
            raise ConfigError(
                f"--set needs torchtitan 0.3's config ([train] module and config) to apply to, a {what} "
                "takes its own arguments with [train] args"
            )
        train = replace(config.train, set={**config.train.set, **settings})
        config = replace(config, train=train)
    return config


def _merge(config: BridgeConfig, **given: Any) -> Request:
    """The command line wins over [capture], which wins over the defaults."""
    section = config.capture
    step, where = given["step"], "--step"
    if step is None and given["on"] is None:
        # A trigger asked for on the command line looks at the whole run, not at the config's step.
        step, where = section.step, f"{config.path or 'the config'}: capture.step"
    trigger = given["on"] or section.on
    if trigger is not None and trigger not in TRIGGERS:
        raise UsageError(f"--on takes {' or '.join(TRIGGERS)}, got {trigger!r}")
    if step is None and trigger is None:
        raise UsageError("which step? give --step N, or step = N under [capture]")
    window = parse_window("1:" if step is None else step, triggered=trigger is not None, where=where)
    ops = tuple(given["ops"]) or (*section.ops, *section.modules)
    limit = section.tensor_bytes
    asked = given["tensors"] or section.tensors
    which = asked or "all"
    if asked == "all" and not (given["ops"] if given["tensors"] else ops):
        # Said outright, and of no calls in particular in the same place: of every call.
        ops = ("*",)
    selection = Selection(
        patterns=(),
        which=which,
        phases=tuple(given["phases"]) or section.phases,
        ranks=tuple(given["ranks"]) or section.ranks,
        max_tensor_bytes=limit,
    )
    selection.check()
    return Request(
        window=window,
        selection=selection,
        ops=ops,
        ops_of_config=not given["ops"],
        out=Path(given["out"]),
        force=given["force"],
        budget_bytes=given["budget_bytes"] if given["budget_bytes"] is not None else section.budget_bytes,
        trigger=trigger,
        replace={**section.replace, **(given["replace"] or {})},
        eager=given["eager"],
        stop=given["stop"],
        note=given["note"],
    )
