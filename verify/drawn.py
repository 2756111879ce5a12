"""Why did the unit tests pass? What the run's inputs have that the spec's own `sample` never draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bridge.verify.case import Case
from bridge.verify.spec import KernelSpec

#: How far the run must be beyond what was drawn to be worth telling; less is the luck of a draw.
TELLING = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One property of a tensor, over its rows (the last axis); compared on a log scale."""

    name: str
    low: float
    high: float


def features(tensor: torch.Tensor) -> dict[str, Feature]:
    """Size, spread and offset of a floating tensor's rows; non-finite elements are left out.

    Args:
        tensor: any shape and floating dtype; rows run along the last axis.
    """
    rows = tensor.detach().double().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    rows = torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
    if not rows.numel():
        return {}
    rms = rows.square().mean(-1).sqrt()
    peak = rows.abs().amax(-1)
    found = {
        "row RMS": _over(rms),
        "largest over RMS of a row": _over(peak[rms > 0] / rms[rms > 0]),
    }
    if rows.shape[-1] > 1:
        spread = rows.std(-1, correction=0)
        some = spread > 0
        found["|mean| over spread of a row"] = _over(rows.mean(-1)[some].abs() / spread[some])
    return {name: Feature(name=name, low=low, high=high) for name, (low, high) in found.items() if high > 0}


def _over(values: torch.Tensor) -> tuple[float, float]:
    if not values.numel():
        return 0.0, 0.0
    return float(values.min()), float(values.max())


def layout_words(tensor: torch.Tensor) -> str:
    """ "expanded (stride 0)", "transposed or sliced", "offset 3 elements" or "" for a plain tensor."""
    words = []
    strided = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    if 0 in strided:
        words.append("expanded (stride 0)")
    elif not tensor.is_contiguous():
        words.append(f"not contiguous (strides {tuple(tensor.stride())})")
    if tensor.storage_offset():
        words.append(f"at offset {tensor.storage_offset()} of its storage")
    return " and ".join(words)


def _tensors(spec: KernelSpec, case: Case) -> dict[str, torch.Tensor]:
    named = dict(zip(spec.inputs, case.inputs, strict=True))
    named.update({f"grad_output {name}": g for name, g in zip(spec.outputs, case.grad_outputs, strict=False)})
    return {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}


def compare(spec: KernelSpec, real: Sequence[Case], drawn: Iterable[Case]) -> tuple[str, ...]:
    """Sentences about what the real cases have and the drawn ones lack, most telling first.

    Args:
        real: captured cases, the failing ones.
        drawn: cases made by `sample` alone (family "declared").
    """
    told: list[tuple[float, str]] = []
    pools = _pool(spec, drawn)
    layouts = {name: {layout_words(tensor) for tensor in tensors} for name, tensors in pools.items()}
    ranges = {name: _ranges(tensors) for name, tensors in pools.items()}
    for name, tensors in _pool(spec, real).items():
        if name not in pools:
            continue
        for feature in _ranges(tensors).values():
            other = ranges[name].get(feature.name)
            if other is not None:
                told += _gap(name, feature, other)
        for words in sorted({layout_words(tensor) for tensor in tensors} - layouts[name]):
            if words:
                told.append((math.inf, f"{name} is {words} in the run; `sample` never draws it so"))
        told += _sizes(name, tensors, pools[name])
    return tuple(text for _, text in sorted(told, key=lambda item: -item[0]))


def _pool(spec: KernelSpec, cases: Iterable[Case]) -> dict[str, list[torch.Tensor]]:
    pools: dict[str, list[torch.Tensor]] = {}
    for case in cases:
        for name, tensor in _tensors(spec, case).items():
            pools.setdefault(name, []).append(tensor)
    return pools


def _ranges(tensors: Iterable[torch.Tensor]) -> Mapping[str, Feature]:
    merged: dict[str, Feature] = {}
    for tensor in tensors:
        for name, feature in features(tensor).items():
            old = merged.get(name, feature)
            merged[name] = Feature(name=name, low=min(old.low, feature.low), high=max(old.high, feature.high))
    return merged


def _gap(name: str, real: Feature, drawn: Feature) -> list[tuple[float, str]]:
    told = []
    if drawn.high > 0 and real.high > TELLING * drawn.high:
        factor = real.high / drawn.high
        told.append(
            (factor, f"{name}: {real.name} reaches {real.high:.3g}; drawn inputs stop at {drawn.high:.3g}")
        )
    if drawn.low > 0 and real.low * TELLING < drawn.low:
        factor = drawn.low / real.low if real.low > 0 else math.inf
        told.append(
            (factor, f"{name}: {real.name} falls to {real.low:.3g}; drawn inputs stay above {drawn.low:.3g}")
        )
    return told


def _sizes(name: str, real: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor]) -> list[tuple[float, str]]:
    def rows(tensor: torch.Tensor) -> int:
        return tensor.numel() // max(tensor.shape[-1], 1) if tensor.dim() else 1

    most, known = max(map(rows, real)), max(map(rows, drawn))
    if most > TELLING * known:
        return [(most / known, f"{name}: {most} rows in the run; drawn inputs have at most {known}")]
    return []
