"""`bridge scan`: every captured op against its own FP64 re-computation. No second run is needed.

The recorded output is the target; the same op run again here, in the same dtype, is the eager reference.
Work is split over processes, results are written as they come, and an interrupted scan goes on where it
stopped. Torch is loaded in the workers only.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bridge.environment import package_versions
from bridge.errors import CorruptCaptureError, NothingJudgedError, UsageError, near_misses
from bridge.verify import floors
from bridge.verify.columns import Columns, Pool
from bridge.verify.details import producers
from bridge.verify.diff_document import CallDetail, ScanDocument
from bridge.verify.intake import columns
from bridge.verify.nonfinite import first_nonfinite
from bridge.verify.runs import Run, load_run, side_of
from bridge.verify.scan_table import OpResult, assemble, rows_to_show
from bridge.verify.verdict import Constants

if TYPE_CHECKING:
    from bridge.capture.record import Call


#: Calls that one worker takes at a time; small, so that progress shows and little is lost on interruption.
CHUNK = 16
#: A call whose tensors are larger than this in FP64 is left out unless --max-bytes says otherwise.
MAX_CALL_BYTES = 2 << 30

Progress = Callable[[int, int], None]


def scan_capture(
    capture: Path | str,
    *,
    ops: Sequence[str] = (),
    jobs: int = 1,
    resume: Path | None = None,
    max_call_bytes: int = MAX_CALL_BYTES,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> ScanDocument:
    """Judge every operator call of a capture whose tensors are stored.

    Args:
        capture: Capture folder.
        ops: Globs over key, op, module and class; () is everything.
        jobs: Processes.
        resume: File that results are appended to; what it already holds of this capture is not done again.
        max_call_bytes: Calls that need more memory than this in FP64 are left out, and counted.
        command: What the user typed, for the record.
        progress: Called with (done, total).

    Raises:
        NothingJudgedError: nothing that can be judged is stored.
        UsageError: a glob that matches nothing, or a path that is no capture.
        CorruptCaptureError: a file of tensors is missing or not as it was written.
    """
    begun = time.monotonic()
    run = load_run(Path(capture), "A")
    if run.capture is None or run.manifest is None:
        raise UsageError(f"scan needs a capture with tensors, got the activation log {capture}")
    if run.damage:
        raise CorruptCaptureError("; ".join(run.damage))
    run = dataclasses.replace(run, calls=list(run.calls))  # all are looked at, more than once
    chosen = _chosen(run, ops)
    todo, skipped = _judgeable(run, chosen, max_call_bytes)
    identity = _identity(run)
    done = _read_results(resume, identity) if resume is not None else {}
    if resume is not None:
        _end_line(resume)
    results = {position: done[position] for position in todo if position in done}
    left = [position for position in todo if position not in results]
    chunks = [left[start : start + CHUNK] for start in range(0, len(left), CHUNK)]
    with _workers(jobs if len(chunks) > 1 else 1) as spread:
        for judged in spread("judge_chunk", Path(capture), chunks):
            for position, result in judged:
                results[position] = result
                if resume is not None:
                    _append(resume, identity, position, result)
                if progress is not None:
                    progress(len(results), len(todo))
        if not results:
            reasons = "; ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
            raise NothingJudgedError(
                f"no call of {capture} can be judged ({reasons or 'it has none'}); capture with --tensors all"
            )
        gathered = columns(run.calls, Pool())
        document = assemble(run, results, skipped, first_nonfinite(gathered, run))
        worst = [[pair] for pair in rows_to_show(document, results)]
        details = [detail for found in spread("detail_chunk", Path(capture), worst) for detail in found]
    return msgspec.structs.replace(
        document,
        details=tuple(_with_producers(detail, worst[i][0][1], gathered) for i, detail in enumerate(details)),
        capture=side_of(run, gathered),
        constants={
            "fudge_factor": Constants().fudge_factor,
            "max_reference_relative_error": Constants().max_reference_relative_error,
            "order_factor": floors.ORDER_FACTOR,
            "compute_ulps": floors.COMPUTE_ULPS,
        },
        seconds=round(time.monotonic() - begun, 2),
        jobs=jobs,
        command=tuple(command),
        versions=package_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _chosen(run: Run, ops: Sequence[str]) -> list[int]:
    if not ops:
        return list(range(len(run.calls)))
    found = []
    matched: set[str] = set()
    for position, call in enumerate(run.calls):
        names = (call.key, call.op, call.op.rsplit(".", 1)[0], call.module, call.module_class)
        hits = [glob for glob in ops if any(fnmatch.fnmatchcase(name, glob) for name in names)]
        # A module's name means the ops inside it too.
        hits += [glob for glob in ops if fnmatch.fnmatchcase(call.module, f"{glob}.*")]
        matched.update(hits)
        if hits:
            found.append(position)
    for glob in ops:
        if glob not in matched:
            raise UsageError(
                f"--ops {glob!r} matches no call; {near_misses(glob, {c.key for c in run.calls})}"
            )
    return found


def _judgeable(run: Run, chosen: list[int], max_call_bytes: int) -> tuple[list[int], dict[str, int]]:
    """Positions of operator calls with tensors, and how many calls are left out for which reason."""
    todo: list[int] = []
    skipped: dict[str, int] = {}
    for position in chosen:
        reason = _reason(run.calls[position], max_call_bytes)
        if reason is None:
            todo.append(position)
        else:
            skipped[reason] = skipped.get(reason, 0) + 1
    return todo, skipped


def _reason(call: Call, max_call_bytes: int) -> str | None:
    if call.kind != "op":
        return f"{call.kind} calls (`bridge verify` judges kernels and modules)"
    if not call.outputs:
        return "calls without output"
    records = call.inputs + call.outputs
    if any(record.blob is None for record in records):
        return "calls of which only digests are stored"
    if any(record.subclass is not None for record in call.inputs):
        return "wrapper calls (the local call inside is judged)"
    if not any(record.dtype in floors.EPS for record in call.outputs):
        return "calls without floating output"
    if sum(8 * math.prod(record.shape) for record in records) > max_call_bytes:
        return f"calls larger than {max_call_bytes} bytes in FP64"
    return None


def _with_producers(detail: CallDetail, position: int, gathered: Columns) -> CallDetail:
    keys = producers(gathered, position)
    return msgspec.structs.replace(detail, producers_a=keys, producers_b=keys)


#: Runs a function of `scan_worker` on chunks of a capture, results in their order.
Spread = Callable[[str, Path, Sequence[Any]], Iterator[Any]]


@contextmanager
def _workers(jobs: int) -> Iterator[Spread]:
    """Fresh processes, or with one job this one: torch's thread pools do not survive a fork."""
    if jobs <= 1:

        def here(name: str, capture: Path, chunks: Sequence[Any]) -> Iterator[Any]:
            from bridge.verify import scan_worker

            return map(partial(getattr(scan_worker, name), capture), chunks)

        yield here
        return
    from bridge.verify.scan_worker import prepare

    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=prepare) as pool:

        def there(name: str, capture: Path, chunks: Sequence[Any]) -> Iterator[Any]:
            from bridge.verify import scan_worker

            return pool.map(getattr(scan_worker, name), [capture] * len(chunks), chunks)

        yield there


def _identity(run: Run) -> str:
    """Names a capture's contents, so that results of another one are not taken for its own."""
    manifest = (run.path / "manifest.json").read_bytes()
    return hashlib.sha256(manifest).hexdigest()[:16]


class _Line(msgspec.Struct, frozen=True):
    capture: str
    result: OpResult
    position: int  #: of the call in the capture: keys repeat from rank to rank and step to step


def _read_results(path: Path, identity: str) -> dict[int, OpResult]:
    if not path.exists():
        return {}
    found: dict[int, OpResult] = {}
    decoder = msgspec.json.Decoder(_Line)
    for line in path.read_bytes().splitlines():
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError:
            continue  # the line that was being written when the scan was interrupted: judged again
        if entry.capture == identity:
            found[entry.position] = entry.result
    return found


def _end_line(path: Path) -> None:
    """End the line that was being written when the scan was interrupted: the next one stands alone."""
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def _append(path: Path, identity: str, position: int, result: OpResult) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(_Line(identity, result, position)) + b"\n")


def default_jobs() -> int:
    """Processes when the user does not say: one per core, but no more than memory bears."""
    return max(1, min(8, os.cpu_count() or 1))
