"""One of the two runs of a comparison: a capture folder or an activation log, and what it says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.capture.record import Call, Manifest
from bridge.errors import UsageError
from bridge.verify.columns import INPUT, KINDS, OUTPUT, Columns
from bridge.verify.diff_document import Mismatch, Side
from bridge.verify.titanlog import is_log, read_log

if TYPE_CHECKING:
    from bridge.capture.store import Capture

#: Below this share of common module names, two runs are of different models.
SAME_MODEL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Calls and where they come from; `capture` gives tensors and is None for logs."""

    label: str
    path: Path
    calls: Sequence[Call]
    capture: Capture | None = None
    manifest: Manifest | None = None

    @property
    def is_log(self) -> bool:
        return self.manifest is None

    @property
    def damage(self) -> tuple[str, ...]:
        """Files of tensors that are missing or not as they were written."""
        return self.capture.damage if self.capture is not None else ()


def load_run(path: Path, label: str) -> Run:
    """Open a capture folder or an activation log.

    Raises CaptureError (or a leaf of it) when it is neither.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist; run {label} must be a capture folder or an activation log")
    if not (path / "manifest.json").exists() and is_log(path):
        return Run(label=label, path=path, calls=read_log(path))
    from bridge.capture.store import load_capture
    from bridge.capture.stored import stored_calls

    capture = load_capture(path)
    return Run(
        label=label, path=path, calls=stored_calls(capture), capture=capture, manifest=capture.manifest
    )


def side_of(run: Run, columns: Columns) -> Side:
    """What a document says about a run."""
    reads, writes = columns.reads, columns.writes
    inputs, outputs = reads.role == INPUT, writes.role == OUTPUT
    whole = np.zeros(len(columns), bool)
    whole[reads.call[inputs]] = whole[writes.call[outputs]] = True
    whole[reads.call[inputs & ~reads.stored]] = whole[writes.call[outputs & ~writes.stored]] = False
    stored = int(whole.sum())
    # Of what modules make, if any: an optimizer's float32 states outnumber a bfloat16 model's outputs.
    modules = outputs & (columns.kind == KINDS.index("module"))[writes.call]
    counted = modules if modules.any() else outputs
    numbers, first, counts = np.unique(writes.dtype[counted], return_index=True, return_counts=True)
    order = np.lexsort((first, -counts))
    common = tuple(dtype for dtype in map(columns.text, numbers[order].tolist()) if dtype)
    ranks, steps = np.unique(columns.rank).tolist(), np.unique(columns.step).tolist()
    manifest = run.manifest
    if manifest is None:
        return Side(
            label=run.label,
            path=str(run.path),
            source="torchtitan log",
            ranks=tuple(ranks),
            calls=len(columns),
            dtypes=common,
        )
    return Side(
        label=run.label,
        path=str(run.path),
        step=manifest.step if manifest.step in steps or not steps else min(steps),
        ranks=tuple(ranks),
        calls=len(columns),
        with_tensors=stored,
        complete=manifest.complete,
        seed=manifest.seed,
        dtypes=common,
        device=manifest.device,
        versions=manifest.versions,
        metrics=manifest.metrics,
        command=manifest.command,
        problems=(*manifest.problems, *run.damage),
    )


def mismatches(
    run_a: Run, run_b: Run, a: Side, b: Side, columns_a: Columns, columns_b: Columns
) -> list[Mismatch]:
    """What makes the two runs less comparable; `refused` ones need the user's consent."""
    found: list[Mismatch] = []

    def add(what: str, left: object, right: object, meaning: str, *, refused: bool = False) -> None:
        found.append(Mismatch(what=what, a=str(left), b=str(right), meaning=meaning, refused=refused))

    if run_a.path.resolve() == run_b.path.resolve():
        add("folder", a.path, b.path, "both sides are one folder: they are identical by construction")
    modules_a, modules_b = _modules(columns_a), _modules(columns_b)
    if modules_a and modules_b:
        common = len(modules_a & modules_b) / min(len(modules_a), len(modules_b))
        if common < SAME_MODEL:
            add(
                "model",
                f"{len(modules_a)} modules",
                f"{len(modules_b)} modules",
                f"{len(modules_a & modules_b)} module names in common: pairs will be few",
                refused=True,
            )
    if a.step is not None and b.step is not None and a.step != b.step:
        add("step", a.step, b.step, "other data and other weights: every call will differ", refused=True)
    if a.seed is not None and b.seed is not None and a.seed != b.seed:
        add("seed", a.seed, b.seed, "other initial weights, data order and dropout", refused=True)
    if a.dtypes and b.dtypes and a.dtypes[0] != b.dtypes[0]:
        add(
            "dtype",
            a.dtypes[0],
            b.dtypes[0],
            "most outputs have another dtype: the floor is that of the coarser one",
            refused=True,
        )
    if a.ranks != b.ranks:
        meaning = "each run's ranks are put together: shards joined, parts of the batch end to end"
        if run_a.is_log or run_b.is_log:
            meaning = "only ranks that both runs have are compared"
        add("ranks", len(a.ranks), len(b.ranks), meaning)
    for package in ("torch", "triton", "torchtitan"):
        left, right = a.versions.get(package), b.versions.get(package)
        if left and right and left != right:
            add(f"version of {package}", left, right, "kernels and their rounding may have changed")
    if a.device and b.device and a.device != b.device:
        add("device", a.device, b.device, "kernels differ between devices; rounding is expected everywhere")
    for side in (a, b):
        if not side.complete:
            missing = f"run {side.label} is incomplete"
            add("completeness", a.complete, b.complete, f"{missing}: what is missing counts as unmatched")
    return found


def _modules(columns: Columns) -> set[str]:
    return {columns.text(number) for number in np.unique(columns.module).tolist()} - {""}


def refuse(found: list[Mismatch]) -> None:
    """Raise UsageError when the runs should not be compared without consent."""
    refused = [mismatch for mismatch in found if mismatch.refused]
    if refused:
        said = "; ".join(f"{m.what}: {m.a} in A, {m.b} in B ({m.meaning})" for m in refused)
        raise UsageError(
            f"the runs must agree in model, step, dtype and seed; {said}. Or pass --allow-mismatch"
        )
