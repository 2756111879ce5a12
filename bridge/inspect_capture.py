"""What a capture holds and what it lacks, as records; `bridge inspect` prints them. Loads no torch.

Old activation logs of torchtitan's own tracer are summarised the same way, as far as they go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bridge.capture.record import Call, Digest, Dropped, Manifest, TensorRecord
from bridge.errors import UsageError, near_misses

#: Rows of the text form; `--json` has everything.
TOP_OPS = 12


class OpCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often one op, module class or kernel occurs."""

    op: str
    kind: str
    calls: int
    stored: int  #: calls that kept tensors


class CaptureSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`bridge inspect capture/ --json`."""

    schema_version: int = 1
    path: str
    format: str  #: "capture" | "activation log"
    complete: bool
    step: int
    steps: tuple[int, ...]
    world_size: int
    ranks: tuple[int, ...]
    created: str
    device: str
    versions: dict[str, str]
    seed: int | None
    metrics: dict[str, float | None]
    flags: dict[str, Any]
    config_path: str | None
    command: tuple[str, ...]
    calls: int
    by_phase: dict[str, int]
    by_kind: dict[str, int]
    microbatches: int
    ops: tuple[OpCount, ...]  #: most frequent first
    kernels: tuple[OpCount, ...]  #: Triton launches, and ops and modules of known kernels
    tensors: int  #: tensor records with a digest
    tensors_stored: int  #: of these, with contents
    blobs: int  #: distinct contents stored
    stored_bytes: int
    budget_bytes: int | None
    forecast_bytes: int | None  #: what storing all that was selected was expected to take
    nonfinite: tuple[str, ...]  #: first keys whose outputs hold NaN or infinities
    dropped: tuple[Dropped, ...]
    missing: tuple[str, ...]  #: files that the manifest lists and the folder lacks; ranks without files
    problems: tuple[str, ...]
    checked: bool = False  #: every byte was compared with the hashes


def summarise(path: Path, *, check: bool = False) -> CaptureSummary:
    """Summarise a capture folder, or activation logs.

    Args:
        path: What to summarise.
        check: Read every byte and compare it with the hashes; else sizes and headers are compared.

    Raises:
        UsageError: An activation log has no hashes to check.
        NotACaptureError, CorruptCaptureError: There is nothing that could be read.
    """
    from bridge.capture.titan_log import is_titan_log

    if is_titan_log(path):
        if check:
            raise UsageError(f"--check needs a capture, {path} is an activation log; it has no hashes")
        return _summarise_log(path)
    from bridge.capture import load_capture

    capture = load_capture(path)
    summary = _summary(path, capture.manifest, list(capture.calls), missing=_missing(path, capture.manifest))
    problems = tuple(dict.fromkeys((*capture.problems, *(capture.faults() if check else ()))))
    return msgspec.structs.replace(
        summary, complete=capture.manifest.complete and not problems, problems=problems, checked=check
    )


def find_calls(path: Path, pattern: str) -> list[Call]:
    """Calls whose key, op, module or class matches a glob.

    Raises:
        UsageError: None does; near misses are listed.
    """
    from bridge.capture.titan_log import is_titan_log

    if is_titan_log(path):
        from fnmatch import fnmatchcase

        calls = _log_calls(path)
        found = [c for c in calls if any(fnmatchcase(name, pattern) for name in (c.key, c.op, c.module))]
    else:
        from bridge.capture import load_capture

        capture = load_capture(path)
        calls = list(capture.calls)
        found = list(capture.find(pattern))
    if not found:
        names = {name for call in calls for name in (call.key, call.op, call.module) if name}
        raise UsageError(f"{path} has no call {pattern!r}; {near_misses(pattern, names)}")
    return found


def _log_calls(path: Path) -> list[Call]:
    from bridge.capture.titan_log import read_titan_logs

    return read_titan_logs(path)


def _summarise_log(path: Path) -> CaptureSummary:
    calls = _log_calls(path)
    ranks = tuple(sorted({call.rank for call in calls}))
    problem = "an activation log has statistics only: no tensors, no sign- or position-sensitive hashes"
    manifest = Manifest(complete=True, world_size=len(ranks), problems=(problem,))
    # Of all other tensors a log has no more than a norm.
    digested = sum(bool(call.outputs and call.outputs[0].dtype) for call in calls)
    return msgspec.structs.replace(
        _summary(path, manifest, calls, missing=()), format="activation log", ranks=ranks, tensors=digested
    )


def _summary(
    path: Path, manifest: Manifest, calls: Sequence[Call], *, missing: Iterable[str]
) -> CaptureSummary:
    records = [record for call in calls for record in _tensors(call)]
    blobs = {record.blob for record in records if record.blob is not None}
    ops = _count(calls)
    return CaptureSummary(
        path=str(path),
        format="capture",
        complete=manifest.complete,
        step=manifest.step,
        steps=manifest.steps or tuple(sorted({call.step for call in calls})),
        world_size=manifest.world_size,
        ranks=tuple(rank.rank for rank in manifest.ranks) or tuple(sorted({call.rank for call in calls})),
        created=manifest.created,
        device=manifest.device,
        versions=manifest.versions,
        seed=manifest.seed,
        metrics=manifest.metrics,
        flags=manifest.flags,
        config_path=manifest.config_path,
        command=manifest.command,
        calls=len(calls),
        by_phase=dict(Counter(call.phase for call in calls)),
        by_kind=dict(Counter(call.kind for call in calls)),
        microbatches=len({call.microbatch for call in calls}),
        ops=ops,
        kernels=tuple(op for op in ops if _is_kernel(op)),
        tensors=sum(record.digest is not None for record in records),
        tensors_stored=sum(record.blob is not None for record in records),
        blobs=len(blobs),
        stored_bytes=manifest.stored_bytes,
        budget_bytes=manifest.budget_bytes,
        forecast_bytes=manifest.forecast_bytes,
        nonfinite=tuple(call.key for call in calls if any(_nonfinite(r.digest) for r in call.outputs))[:20],
        dropped=manifest.dropped,
        missing=tuple(missing),
        problems=manifest.problems,
    )


def _tensors(call: Call) -> tuple[TensorRecord, ...]:
    return (*call.inputs, *call.outputs, *call.params, *call.grad_outputs, *call.grad_inputs)


def _nonfinite(digest: Digest | None) -> bool:
    return digest is not None and bool(digest.nan or digest.pos_inf or digest.neg_inf)


def _count(calls: Sequence[Call]) -> tuple[OpCount, ...]:
    seen = Counter((call.op, call.kind) for call in calls)
    stored = Counter(
        (call.op, call.kind) for call in calls if any(r.blob is not None for r in _tensors(call))
    )
    ordered = sorted(seen, key=lambda name: (-seen[name], name))
    return tuple(
        OpCount(op=op, kind=kind, calls=seen[op, kind], stored=stored[op, kind]) for op, kind in ordered
    )


#: Namespaces of dispatcher ops that belong to torch itself.
_TORCH = {
    "aten",
    "prims",
    "prim",
    "c10d",
    "_c10d_functional",
    "fsdp",
    "profiler",
    "higher_order",
    "c10d_functional",
}


def _is_kernel(op: OpCount) -> bool:
    """A Triton launch, or an op that somebody registered."""
    return op.kind == "launch" or (op.kind == "op" and op.op.partition("::")[0] not in _TORCH)


def _missing(path: Path, manifest: Manifest) -> list[str]:
    listed = [name for rank in manifest.ranks for name in (*rank.files, *rank.shards)]
    gone = [name for name in listed if not (path / name).is_file()]
    have = {rank.rank for rank in manifest.ranks}
    if manifest.ranks:
        gone += [
            f"rank {rank} of {manifest.world_size}" for rank in range(manifest.world_size) if rank not in have
        ]
    return gone
