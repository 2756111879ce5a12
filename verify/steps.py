"""The nine steps of the workflow, each with the evidence that it left, for `coverage.steps`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from bridge.verify.evidence import Evidence
from bridge.verify.spec import KernelSpec
from bridge.verify.structure import name_of
from bridge.verify.trace import Op, record
from bridge.verify.verdict import Diagnosis, TensorVerdict

if TYPE_CHECKING:
    from bridge.verify.weigh import JudgedCase

#: Ops whose dtype is that of an accumulator.
_SUMS = frozenset("sum mean mm bmm addmm cumsum var_mean logsumexp dot mv index_add scatter_add".split())
_MASKS = frozenset("where masked_fill tril triu clamp clamp_min clamp_max constant_pad_nd".split())
#: Families of values that show what a kernel does with NaN and infinities.
_ODD = ("NaN in one row", "first half of each row -Inf", "all but the last of each row -Inf")


def steps_of(
    spec: KernelSpec, judged: Sequence[JudgedCase], diagnosis: Diagnosis | None, repeats: int
) -> tuple[str, ...]:
    """One line a step: what was recorded, compared or run, in numbers.

    Args:
        judged: every case, with evidence where that was kept.
        diagnosis: of a failure; None when nothing failed.
        repeats: runs of each declared or captured case.
    """
    tensors = [t for j in judged for t in j.tensors]
    golden = "the FP64 formula of the spec" if spec.golden is not None else "the reference, casts lifted,"
    upstream = "; one upstream gradient an output, random or captured, for all three" if spec.grads else ""
    return (
        f"1 formula: {_formula(spec, judged)}",
        f"2 inputs: {len(judged)} cases, one set of values each for reference and target; golden is "
        f"{golden} on the same values widened to FP64",
        f"3 structure: shape, dtype, device and the places of NaN and Inf of {len(tensors)} tensors; "
        f"{sum(t.structure is not None for t in tensors)} differ",
        f"4 conditioning: {_conditioning(tensors)}",
        f"5 outputs: {_failures(tensors, spec.outputs)}",
        f"6 gradients: {_failures(tensors, [f'grad_{n}' for n in spec.grads])}{upstream}",
        f"7 shapes and values: {_families(judged)}",
        f"8 repeats: {repeats} runs of each declared or captured case, one with another call in between; "
        f"{sum(_unsteady(j) for j in judged)} cases give other bits from run to run",
        f"9 diagnosis: {diagnosis.cause if diagnosis is not None else 'nothing failed'}",
    )


def _formula(spec: KernelSpec, judged: Sequence[JudgedCase]) -> str:
    told = f"declared for {', '.join(spec.dtypes)} and {len(spec.shapes)} shapes"
    kept = [j.evidence for j in judged if j.evidence is not None]
    if not kept:
        return f"not traced, since no case was small enough to keep; {told}"
    seen: list[str] = []
    for dtype in dict.fromkeys(e.case.dtype for e in kept):
        seen.append(_observed(spec, next(e for e in kept if e.case.dtype == dtype)))
    odd = [f"{name} {j.record.verdict}" for j in judged for name in _ODD if j.record.name.endswith(name)]
    return f"{'; '.join(seen)}; {told}" + (f"; {', '.join(dict.fromkeys(odd))}" if odd else "")


def _observed(spec: KernelSpec, e: Evidence) -> str:
    """dtypes in, inside and out of the reference, as its ops were seen to run."""
    into = _dtypes(zip(spec.inputs, e.case.inputs, strict=True))
    out = _dtypes((n, t) for n, t in e.reference.named().items() if t is not None)
    ops = list(record(spec, e.case).ops.values())
    sides = [_inside([op for op in ops if op.backward == side]) for side in (False, True)]
    inside = sides[0] + (f", backward {sides[1]}" if spec.grads and sides[1] else "")
    return f"{into} -> {inside or 'no arithmetic'} -> {out}"


def _inside(ops: Sequence[Op]) -> str:
    counts = Counter(name_of(op.out.dtype) for op in ops if not op.exact and op.out.is_floating_point())
    sums = Counter(name_of(op.out.dtype) for op in ops if op.name in _SUMS and op.out.is_floating_point())
    masks = sorted({op.name for op in ops if op.name in _MASKS})
    text = ", ".join(f"{n} ops in {dtype}" for dtype, n in counts.items())
    text += f" (sums in {', '.join(sums)})" if sums else ""
    return text + (f" (masks: {', '.join(masks)})" if masks else "")


def _dtypes(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    return ", ".join(f"{name} {name_of(tensor.dtype)}" for name, tensor in tensors)


def _conditioning(tensors: Sequence[TensorVerdict]) -> str:
    valid = [t for t in tensors if t.gate_valid]
    largest = max((t.reference_relative_error or 0.0 for t in valid), default=0.0)
    text = (
        f"gate valid on {len(valid)} of {len(tensors)} tensors, the reference there at most {largest:.2g} off"
    )
    grown = [t.growth for t in tensors if t.growth is not None]
    return text + (f"; growth with the length fitted on {len(grown)}" if grown else "")


def _failures(tensors: Sequence[TensorVerdict], names: Sequence[str]) -> str:
    if not names:
        return "none declared"
    found = []
    for name in names:
        own = [t for t in tensors if t.tensor == name]
        bad = sum(t.verdict == "FAIL" for t in own)
        found.append(f"{name} {bad} of {len(own)} fail" if bad else f"{name} on {len(own)} cases")
    return ", ".join(found)


def _families(judged: Sequence[JudgedCase]) -> str:
    counts = Counter(j.record.family for j in judged)
    tiles = sorted({t for j in judged for t in j.tiles})
    text = ", ".join(f"{n} {family}" for family, n in counts.items())
    return text + (f"; tile sizes seen in launches: {', '.join(map(str, tiles))}" if tiles else "")


def _unsteady(judged: JudgedCase) -> bool:
    return any(note.startswith("nondeterministic") for note in judged.record.notes)
