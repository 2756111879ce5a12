"""Where a run leaves a baseline capture, and the tensors of just those calls.

Digests of a step are compared with the baseline's; then the run is repeated and only the first calls
that differ keep their tensors. Two runs, because a difference is known only when the step is over,
and keeping every tensor until then would cost more than running twice. The second run checks that
it repeated the first. With several ranks rank 0 compares all of them, and every rank keeps the tensors of
the same calls.
"""

from __future__ import annotations

import gc
import glob
import itertools
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from bridge.capture.job import Job
from bridge.capture.record import Call
from bridge.capture.request import CaptureResult, Progress, Request, Say
from bridge.capture.store import Capture, load_capture
from bridge.config import BridgeConfig
from bridge.errors import RunError, UsageError

#: Seconds that other ranks wait for rank 0 to compare.
_PATIENCE = 600.0


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
        UsageError: The baseline lacks the step, or has another number of ranks.
        RunError: Rank 0 ended without saying what differs.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    other = load_capture(baseline)
    step = request.window.first
    if not request.window.single or step not in other.manifest.steps:
        steps = ", ".join(map(str, other.manifest.steps))
        raise UsageError(f"--against {baseline} needs one step that it has ({steps}), got {request.window}")
    if other.manifest.world_size != ranks:
        raise UsageError(
            f"--against {baseline} needs as many ranks as it has ({other.manifest.world_size}), got {ranks}; "
            "`bridge diff` compares runs of different numbers of ranks"
        )
    digests = request.out.with_name(f".{request.out.name}.digests.partial")
    look = replace(
        request, out=digests, force=True, ops=("*",), selection=replace(request.selection, which="none")
    )
    letter = request.out.with_name(f".{request.out.name}.differs.partial")
    if rank == 0:
        letter.unlink(missing_ok=True)  # before any rank looks: they meet in the first run
    try:
        Job(look, config, say=say, progress=progress).run(verbose=verbose)
        _leave_process_group()
        if rank == 0:
            found = _differing(load_capture(digests), other, step, first)
            _post(letter, [call.key for call in found])
            keys = _keys(found)
            if not keys:
                say(f"every call of step {step} that both runs have is bit-equal to {baseline}")
            else:
                names = ", ".join(keys[:3])
                say(f"step {step} leaves {baseline} at {names}; running again to keep their tensors")
        else:
            found, keys = [], _keys(_awaited(letter))
        job = Job(
            replace(
                request,
                ops=tuple(glob.escape(key) for key in keys),
                selection=replace(request.selection, which="all" if keys else "none"),
            ),
            config,
            say=say,
            progress=progress,
        )
        job.run(verbose=verbose)
        if rank == 0:
            _warn_unless_repeated(load_capture(request.out), found, say)
        reason = f"it differs from {baseline} first at {keys[0]}" if keys else None
        return replace(job.result(), trigger=reason)
    finally:
        if rank == 0:
            shutil.rmtree(digests, ignore_errors=True)
            letter.unlink(missing_ok=True)


def _differing(seen: Capture, other: Capture, step: int, count: int) -> list[Call]:
    """The first calls of any rank that differ from the baseline's same rank, in order of execution."""
    found: list[Call] = []
    for rank in sorted({call.rank for call in seen.calls}):
        theirs = {call.key: call for call in other.calls if call.step == step and call.rank == rank}
        calls = [call for call in seen.calls if call.rank == rank]
        found += first_differences(calls, theirs, count)
    found.sort(key=lambda call: (call.index, call.rank))
    wanted = set(_keys(found)[:count])
    return [call for call in found if call.key in wanted]


def _keys(found: Sequence[Call | str]) -> list[str]:
    return list(dict.fromkeys(call if isinstance(call, str) else call.key for call in found))


def _post(letter: Path, keys: Sequence[str]) -> None:
    """Tell the other ranks which calls differ."""
    fresh = letter.with_name(f"{letter.name}.new")
    fresh.write_bytes(msgspec.json.encode(keys))
    fresh.replace(letter)


def _awaited(letter: Path) -> list[str]:
    deadline = time.monotonic() + _PATIENCE
    while not letter.exists():
        if time.monotonic() > deadline:
            raise RunError(f"rank 0 did not say within {_PATIENCE:.0f} s which calls differ; see its output")
        time.sleep(0.05)
    return msgspec.json.decode(letter.read_bytes(), type=list[str])


def _leave_process_group() -> None:
    """Make it possible to start the run again in this process."""
    import torch

    gc.collect()  # what the run left behind may still hold its groups
    if not torch.distributed.is_available():
        return
    if not torch.distributed.is_initialized():
        return
    ranks = torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()
    if ranks > 1:
        # The launcher keeps one store for all attempts, and groups find each other in it by their numbers,
        # which begin anew: ranks would find the addresses of the run that is over.
        torch.distributed.distributed_c10d._world.group_count = 1000 * next(_attempts)


_attempts = itertools.count(1)


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
    now = {(call.rank, call.key): call for call in again.calls}
    places = [(call.rank, call.key) for call in found]
    changed = [
        call.key
        for call, place in zip(found, places, strict=True)
        if place not in now or _differs(now[place], call)
    ]
    if changed:
        say(
            f"the run does not repeat bit for bit: {changed[0]} has other values the second time; "
            f"seed it, and make it deterministic, before its differences mean anything"
        )
