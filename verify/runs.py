"""One of the two runs of a comparison: a capture folder or an activation log, and what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from bridge.capture.folder import MANIFEST
from bridge.capture.record import Call, Manifest
from bridge.errors import NotACaptureError, UsageError
from bridge.verify.columns import INPUT, KINDS, OUTPUT, Columns
from bridge.verify.diff_document import Mismatch, Side
from bridge.verify.titanlog import is_log, read_log

if TYPE_CHECKING:
    from bridge.capture.store import Capture

#: Below this share of common module names, two runs are of different models.
SAME_MODEL = 0.5

#: Settings that differ between two runs and are shown.
CONFIG_KEYS = 5


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
    if not (path / MANIFEST).exists() and is_log(path):
        return Run(label=label, path=path, calls=read_log(path))
    if path.is_file():
        _refuse_file(path)
    from bridge.capture.store import load_capture
    from bridge.capture.stored import stored_calls

    capture = load_capture(path)
    return Run(
        label=label, path=path, calls=stored_calls(capture), capture=capture, manifest=capture.manifest
    )


def _refuse_file(path: Path) -> NoReturn:
    """Raise for a file that is no activation log, saying which path would have done."""
    if (path.parent / MANIFEST).is_file():
        raise UsageError(
            f"a capture is a folder, got the file {path} inside one; give the folder {path.parent}"
        )
    raise NotACaptureError(
        f"{path} is neither a capture folder nor an activation log: a log of torchtitan's activation tracer "
        "(rank_0_activations.log) begins with "
        '"Total captured activations: N"; what a run prints holds no activations, capture the run with '
        "`bridge capture`"
    )


def side_of(run: Run, columns: Columns) -> Side:
    """What a document says about a run."""
    reads, writes = columns.reads, columns.writes
    inputs, outputs = reads.role == INPUT, writes.role == OUTPUT
    kept = np.zeros(len(columns), bool)
    kept[reads.call[inputs & reads.stored]] = kept[writes.call[outputs & writes.stored]] = True
    stored = int(kept.sum())
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
        complete=manifest.complete and not manifest.problems,
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
    if run_a.manifest is not None and run_b.manifest is not None:
        config = _config_mismatch(run_a.manifest.config, run_b.manifest.config)
        found += [config] if config is not None else []
    return found


def lacking(a: Side, b: Side) -> str:
    """What a capture that is only a part of its run lacks, in words; "": both are whole."""
    said = []
    for side, other in ((a, b), (b, a)):
        if not side.complete:
            why = side.problems[0] if side.problems else "the process that wrote it did not finish"
            said.append(
                f"run {side.label} is incomplete, with {side.calls} calls where {other.label} has "
                f"{other.calls}: {why}"
            )
    return "; ".join(said)


def _config_mismatch(a: dict[str, Any], b: dict[str, Any]) -> Mismatch | None:
    """The settings that differ, a few of them; None where a run has no config or none differs."""
    if not a or not b:
        return None
    left, right = dict(_settings(a)), dict(_settings(b))
    keys = [
        key for key in {**left, **right} if key not in left or key not in right or left[key] != right[key]
    ]
    if not keys:
        return None
    said = [
        ", ".join(f"{key}={_brief(side[key]) if key in side else 'not set'}" for key in keys[:CONFIG_KEYS])
        for side in (left, right)
    ]
    more = f", of which {CONFIG_KEYS} are shown" if len(keys) > CONFIG_KEYS else ""
    count = f"{len(keys)} settings differ" if len(keys) > 1 else "1 setting differs"
    return Mismatch(what="config", a=said[0], b=said[1], meaning=count + more)


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a config and their values; a list of tables counts its items."""
    if isinstance(config, list) and any(isinstance(item, dict) for item in config):
        config = {str(place): item for place, item in enumerate(config)}
    if isinstance(config, dict) and (config or not prefix):
        for key, value in config.items():
            yield from _settings(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, config


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
