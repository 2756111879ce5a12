"""Where a run leaves a baseline capture, and the tensors of just those calls.

Digests of a step are compared with the baseline's; then the run is repeated and only the first calls
that differ keep their tensors. Two runs, because a difference is known only when the step is over,
and keeping every tensor until then would cost more than running twice. The second run checks that
it repeated the first.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from bridge.capture.job import Job
from bridge.capture.record import Call
from bridge.capture.request import CaptureResult, Progress, Request, Say
from bridge.capture.store import Capture, load_capture
from bridge.config import BridgeConfig
from bridge.errors import UsageError


def capture_against(
    request: Request,
    config: BridgeConfig,
    *,
    baseline: Path,
    first: int,
    verbose: bool,
    say: Say,
    progress: Progress | None,
) -> CaptureResult:
    """Capture the step of `baseline` again, with tensors of the first calls that differ from it.

    Args:
        request: As for any capture; its `ops` narrow down which calls count as different.
        config: The run.
        baseline: A capture folder with the same step.
        first: How many differing calls keep their tensors.
        verbose, say, progress: As `capture_run`.

    Raises:
        UsageError: The baseline lacks the step, or there are several ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "--against compares a run of one rank; capture both runs and use `bridge diff` for more"
        )
    other = load_capture(baseline)
    step = request.window.first
    theirs = {call.key: call for call in other.calls if call.step == step and call.rank == 0}
    if not request.window.single or not theirs:
        steps = ", ".join(map(str, other.manifest.steps))
        raise UsageError(f"--against {baseline} needs one step that it has ({steps}), got {request.window}")
    digests = request.out.with_name(f".{request.out.name}.digests.partial")
    look = replace(
        request, out=digests, force=True, ops=("*",), selection=replace(request.selection, which="none")
    )
    try:
        Job(look, config, say=say, progress=progress).run(verbose=verbose)
        seen = load_capture(digests)
        found = first_differences(list(seen.calls), theirs, first)
        if not found:
            say(f"every call of step {step} that both runs have is bit-equal to {baseline}")
            patterns: tuple[str, ...] = ()
        else:
            names = ", ".join(call.key for call in found[:3])
            say(f"step {step} leaves {baseline} at {names}; running again to keep their tensors")
            patterns = tuple(glob.escape(call.key) for call in found)
        job = Job(
            replace(
                request, ops=patterns, selection=replace(request.selection, which="all" if found else "none")
            ),
            config,
            say=say,
            progress=progress,
        )
        job.run(verbose=verbose)
        again = load_capture(request.out)
        _warn_unless_repeated(again, found, say)
        reason = f"it differs from {baseline} first at {found[0].key}" if found else None
        return replace(job.result(), trigger=reason)
    finally:
        shutil.rmtree(digests, ignore_errors=True)


def first_differences(calls: Sequence[Call], theirs: dict[str, Call], count: int) -> list[Call]:
    """The first calls whose results are not those of the baseline's call of the same key.

    Operators and launches count, and modules without modules inside: a fused kernel has other
    operators than the eager module, and is compared through the module it stands in.
    """
    outer = {call.parent for call in calls if call.kind == "module"}
    modules = {call.index: call for call in calls if call.kind == "module"}
    found: dict[int, Call] = {}
    for call in calls:
        if len(found) >= count:
            break
        if call.kind == "module" and call.index in outer:
            continue
        if (twin := theirs.get(call.key)) is not None and _differs(call, twin):
            found[call.index] = call
            owner = modules.get(call.parent) if call.parent is not None else None
            if owner is not None and owner.index not in outer:
                found[owner.index] = owner
    return sorted(found.values(), key=lambda call: call.index)[:count]


def _differs(call: Call, twin: Call) -> bool:
    if call.op != twin.op and call.kind != "module":
        return False
    left, right = _hashes(call), _hashes(twin)
    # Gradients of a module are known only where it was selected; what one side lacks is no difference.
    return any(left[name] != right[name] for name in left.keys() & right.keys())


def _hashes(call: Call) -> dict[tuple[object, ...], str]:
    parts = (("output", call.outputs), ("gradient", call.grad_inputs))
    return {
        (part, record.name, record.dtype, record.shape): record.digest.hash
        for part, records in parts
        for record in records
        if record.digest is not None
    }


def _warn_unless_repeated(again: Capture, found: Sequence[Call], say: Say) -> None:
    now = {call.key: call for call in again.calls}
    changed = [call.key for call in found if call.key not in now or _differs(now[call.key], call)]
    if changed:
        say(
            f"the run does not repeat bit for bit: {changed[0]} has other values the second time; "
            f"seed it, and make it deterministic, before its differences mean anything"
        )
