"""Causes that no formula has: what the target does to memory, and what it remembers between calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bridge.verify.evidence import Evidence, misfit
from bridge.verify.execute import Result, run_target
from bridge.verify.nearby import far_case, near_result
from bridge.verify.spec import KernelSpec

#: Cases on which a deed is looked for, and times that a target is run again.
_CASES = 3
_RUNS = 6
_LARGEST = 1 << 16
#: Share of the error by which two runs on the same inputs must differ to be its cause.
_UNSTEADY = 0.3


def deed(spec: KernelSpec, failing: Sequence[Evidence]) -> tuple[str, str] | None:
    """A misdeed that explains the failure whatever the numbers, and its evidence."""
    doubtful = any(name in e.target.doubted for e in failing for name in e.failed)
    return (
        # A repeat that was run in another way may differ for no other reason than that it was run again.
        (_unsteady(spec, failing) if doubtful else None)
        or _misdeed(failing)
        or _reads_unwritten(spec, failing)
        or _unsteady(spec, failing)
    )


def _misdeed(failing: Sequence[Evidence]) -> tuple[str, str] | None:
    for e in failing:
        for t in e.tensors:
            text = e.target.faults.get(t.tensor)
            if text is not None:
                return cause_of(text, t.tensor, e.case.name)
    for e in failing:
        for t in e.tensors:
            if t.structure is not None and "elements" not in t.structure:
                return f"structure: {t.structure}", f"seen on {e.case.name}"
    return None


def cause_of(fault: str, tensor: str, case: str) -> tuple[str, str]:
    """Cause and evidence in words, from a misdeed as `Result.faults` tells it.

    Args:
        tensor, case: where it was seen.
    """
    if "grad_output" in fault:
        return (
            f"the backward overwrites grad_output: {tensor} is written in place into its memory, "
            "so every other consumer of that gradient and a second backward read garbage",
            fault,
        )
    if "input" in fault:
        return f"the kernel overwrites its input in place: {fault}", f"seen on {case}"
    if "wrote" in fault:
        return f"writes outside its buffers: {fault}", f"seen on {case}"
    return fault, f"seen on {case}"


def _reads_unwritten(spec: KernelSpec, failing: Sequence[Evidence]) -> tuple[str, str] | None:
    """NaN that is gone once fresh memory holds zeros: the target uses memory that nobody wrote."""
    for e in failing[:_CASES]:
        broken = [
            t.tensor for t in e.tensors if t.structure is not None and "NaN where golden" in t.structure
        ]
        if not broken or not _small(e):
            continue
        clean = _run_again(spec, e, fill=0.0)
        if clean is None:
            continue
        now = clean.named()
        cured = [n for n in broken if (got := now.get(n)) is not None and not bool(torch.isnan(got).any())]
        if cured:
            return (
                f"memory that was never written is used in {', '.join(cured)}: workspace slack, masked lanes "
                "of a buffer, or elements that no program stores",
                f"NaN while fresh memory holds NaN, none while it holds zeros, on {e.case.name}",
            )
    return None


def _unsteady(spec: KernelSpec, failing: Sequence[Evidence]) -> tuple[str, str] | None:
    """Runs on the same inputs that differ by about as much as the failed one is off."""
    for e in [e for e in failing if _small(e)][:_CASES]:
        runs = [e.target, *(r for _ in range(_RUNS) if (r := _run_again(spec, e)) is not None)]
        for name in e.failed:
            eager = e.reference.named().get(name)
            got = [t for r in runs if (t := r.named().get(name)) is not None]
            if eager is None or not eager.is_floating_point() or any(t.shape != eager.shape for t in got):
                continue
            scale = e.scale(name)
            off = [misfit(t, eager, scale) for t in got]
            apart = [misfit(t, got[0], scale) for t in got[1:]]
            if apart and max(apart) > max(_UNSTEADY * max(off), 1.0):
                others = sum(a > max(_UNSTEADY * max(off), 1.0) for a in apart)
                return (
                    f"{name} depends on the run, not on the inputs alone: a race, or state that is kept "
                    "between calls (a workspace, counter or cache)",
                    f"{others} of {len(apart)} repeats on one set of inputs differ, on {e.case.name}",
                )
    return None


def remembers(spec: KernelSpec, failing: Sequence[Evidence]) -> tuple[str, str] | None:
    """A target that is right on the failing inputs once its file is loaded anew: it keeps state."""
    for e in [e for e in failing if _small(e)][:_CASES]:
        fresh = _loaded_anew(spec)
        if fresh is None:
            return None
        made = _run_again(fresh, e)
        if made is None:
            continue
        now = made.named()
        for name in e.failed:
            eager, was, got = e.reference.named().get(name), e.target.named().get(name), now.get(name)
            if eager is None or was is None or got is None or not eager.is_floating_point():
                continue
            if not was.shape == eager.shape == got.shape:
                continue
            scale = e.scale(name)
            if misfit(got, eager, scale) < 0.1 * misfit(was, eager, scale):
                return (
                    f"{name} holds what an earlier call left: state is kept between calls "
                    "(a cache or buffer keyed by shape) and does not follow the inputs",
                    f"right on {e.case.name} when it is the first call after the file is loaded",
                )
    return None


def _loaded_anew(spec: KernelSpec) -> KernelSpec | None:
    """The spec of the kernel's file loaded again, with fresh module state; None for one that is no file."""
    from bridge.errors import BridgeError
    from bridge.verify.registry import load_spec

    path = getattr(getattr(spec.target, "__code__", None), "co_filename", "")
    if not path.endswith(".py") or not Path(path).is_file():
        return None
    try:
        return load_spec(path, op=spec.name).spec
    except BridgeError:
        return None  # The target lives in a module beside the file with the spec.


def _small(e: Evidence) -> bool:
    return e.target.watched and max(t.numel() for t in e.case.inputs) <= _LARGEST


def _run_again(spec: KernelSpec, e: Evidence, fill: float = float("nan")) -> Result | None:
    try:
        made = run_target(spec, far_case(e.case, e.target.device), fill=fill)
    except Exception:  # the judged run went through; what upsets another one says nothing here
        return None
    return None if isinstance(made, str) else near_result(made, e.case)
