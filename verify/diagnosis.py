"""Why a target failed: which wrong variant gives its values, or its misdeed, or "unexplained"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bridge.verify.case import Case
from bridge.verify.envelope import Envelope
from bridge.verify.execute import Result, run_target
from bridge.verify.nearby import far_case, near_result
from bridge.verify.place import where_it_sits
from bridge.verify.spec import KernelSpec
from bridge.verify.trace import record
from bridge.verify.ulp import is_low, smallest_normal, ulp_of
from bridge.verify.variant import RANKS, Variant, again
from bridge.verify.variants import catalogue
from bridge.verify.verdict import Diagnosis, TensorVerdict

#: Share of the error that a variant must reproduce to be named as the cause.
_NAMED = 0.5
#: Variants this close to the best are told apart by the order in which the workflow looks.
_TIE = 0.02
#: Cases on which variants are tried.
_CASES = 3
_LARGEST = 1 << 16
#: Block sizes to try where no launch showed any.
_USUAL_TILES = (8, 16, 32, 64, 128)


@dataclass(slots=True, kw_only=True)
class Evidence:
    """One judged case with everything that was computed on it."""

    case: Case
    golden: Result
    reference: Result
    target: Result
    noise: dict[str, Envelope]
    tensors: Sequence[TensorVerdict]

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(t.tensor for t in self.tensors if t.verdict == "FAIL")

    def scale(self, name: str) -> torch.Tensor:
        """What counts as no difference for tensor `name`: a fraction of a ULP and the legal noise."""
        golden = self.golden.named()[name]
        like = self.reference.named()[name]
        assert golden is not None and like is not None
        golden = torch.nan_to_num(golden.to(torch.float64), nan=0.0, posinf=0.0, neginf=0.0)
        unit = ulp_of(golden, like.dtype) * (0.5 if is_low(like.dtype) else 1.0) + smallest_normal(like.dtype)
        noise = self.noise.get(name)
        return unit + (torch.nan_to_num(noise.rms, nan=0.0, posinf=0.0) if noise is not None else 0.0)


def diagnose(
    spec: KernelSpec, failing: Sequence[Evidence], passing: Sequence[Evidence], tiles: tuple[int, ...]
) -> Diagnosis:
    """Name the cause of a FAIL, with evidence.

    Args:
        failing: cases with a failed tensor, declared ones first.
        passing: some cases without; a variant that would have failed there is not the cause.
        tiles: tile sizes seen in the launches.
    """
    place = where_it_sits(failing)
    deed = _misdeed(spec, failing) or _reads_unwritten(spec, failing)
    if deed is not None:
        return Diagnosis(cause=deed[0], explained=1.0, where=place, evidence=deed[1])
    chosen = _choose(failing)
    tiles = tiles or _USUAL_TILES
    if not chosen:
        return Diagnosis(
            cause="unexplained", where=place, evidence="no failing case is small enough to try variants on"
        )
    scored = _scores(spec, chosen, passing, tiles)
    scored.sort(key=lambda pair: pair[0], reverse=True)
    if not scored or scored[0][0] < _NAMED:
        near = tuple(f"{v.text} ({s:.0%})" for s, v in scored[:3] if s > 0.1)
        cause = f"unexplained{_hint(failing)}"
        return Diagnosis(
            cause=cause, explained=scored[0][0] if scored else None, where=place, alternatives=near
        )
    best = scored[0][0]
    tied = [pair for pair in scored if pair[0] >= best - _TIE]
    tied.sort(key=lambda pair: (RANKS.index(pair[1].rank), -pair[0]))
    score, variant = tied[0]
    others = [pair for pair in scored if pair[1].text != variant.text]
    return Diagnosis(
        cause=variant.text,
        explained=max(0.0, min(1.0, score)),
        where=place,
        evidence=_evidence(variant, score, chosen),
        alternatives=tuple(dict.fromkeys(f"{v.text} ({s:.0%})" for s, v in others[:3] if s > 0.2)),
    )


def _evidence(variant: Variant, score: float, chosen: Sequence[Evidence]) -> str:
    cases = "; ".join(e.case.name for e in chosen)
    how = "errors of the same size on the same rows" if variant.noise else "the target's own values"
    return f"the reference with this fault gives {how}: {score:.0%} of the error, on {cases}"


def _misdeed(spec: KernelSpec, failing: Sequence[Evidence]) -> tuple[str, str] | None:
    for e in failing:
        for t in e.tensors:
            text = e.target.faults.get(t.tensor)
            if text is None:
                continue
            if "grad_output" in text:
                return (
                    f"the backward overwrites grad_output: {t.tensor} is written in place into its memory, "
                    "so every other consumer of that gradient and a second backward read garbage",
                    text,
                )
            if "input" in text:
                return f"the kernel overwrites its input in place: {text}", f"seen on {e.case.name}"
            if "wrote" in text:
                return f"writes outside its buffers: {text}", f"seen on {e.case.name}"
            return text, f"seen on {e.case.name}"
    for e in failing:
        for t in e.tensors:
            if t.structure is not None and "elements" not in t.structure:
                return f"structure: {t.structure}", f"seen on {e.case.name}"
    return None


def _reads_unwritten(spec: KernelSpec, failing: Sequence[Evidence]) -> tuple[str, str] | None:
    """NaN that is gone once fresh memory holds zeros: the target uses memory that nobody wrote."""
    for e in failing[:_CASES]:
        broken = [
            t.tensor for t in e.tensors if t.structure is not None and "NaN where golden" in t.structure
        ]
        if not broken or not e.target.watched or max(t.numel() for t in e.case.inputs) > _LARGEST:
            continue
        try:
            clean = run_target(spec, far_case(e.case, e.target.device), fill=0.0)
        except Exception:  # the poisoned run went through; what another fill upsets says nothing here
            continue
        if isinstance(clean, str):
            continue
        now = near_result(clean, e.case).named()
        cured = [n for n in broken if (got := now.get(n)) is not None and not bool(torch.isnan(got).any())]
        if cured:
            return (
                f"memory that was never written is used in {', '.join(cured)}: workspace slack, masked lanes "
                "of a buffer, or elements that no program stores",
                f"NaN while fresh memory holds NaN, none while it holds zeros, on {e.case.name}",
            )
    return None


def _choose(failing: Sequence[Evidence]) -> list[Evidence]:
    """Small failing cases of different families, those with most tensors wrong and finite values first."""

    def order(e: Evidence) -> tuple[int, int, int]:
        broken = sum(1 for t in e.tensors if t.structure is not None)
        size = max(t.numel() for t in e.case.inputs)
        return (-len(e.failed), broken, 0 if 64 <= size <= 8192 else 1)

    small = [e for e in failing if max(t.numel() for t in e.case.inputs) <= _LARGEST]
    chosen: list[Evidence] = []
    for e in sorted(small, key=order):
        if len(chosen) < _CASES and all(
            e.case.family != c.case.family or len(small) <= _CASES for c in chosen
        ):
            chosen.append(e)
    return chosen


def _scores(
    spec: KernelSpec, chosen: Sequence[Evidence], passing: Sequence[Evidence], tiles: tuple[int, ...]
) -> list[tuple[float, Variant]]:
    first = chosen[0]
    variants = catalogue(spec, record(spec, first.case), first.case, tiles)
    scored = [(s, v) for v in variants if (s := _score(spec, first, v)) is not None]
    scored.sort(key=lambda pair: pair[0], reverse=True)
    if scored and 0.1 < scored[0][0] < 0.9:
        scored += _pairs(spec, first, scored)
        scored.sort(key=lambda pair: pair[0], reverse=True)
    confirmed: list[tuple[float, Variant]] = []
    for score, variant in scored[:12]:
        seconds = [_elsewhere(spec, e, variant, tiles) for e in chosen[1:]]
        known = [s for s in seconds if s is not None]
        score = sum([score, *known]) / (1 + len(known))
        if any(_would_fail(spec, e, variant, tiles) for e in passing if e.case.dtype == first.case.dtype):
            score *= 0.3
        confirmed.append((score, variant))
    return confirmed + scored[12:]


def _elsewhere(spec: KernelSpec, e: Evidence, variant: Variant, tiles: tuple[int, ...]) -> float | None:
    other = _again(spec, e, variant, tiles)
    return _score(spec, e, other) if other is not None else None


def _again(spec: KernelSpec, e: Evidence, variant: Variant, tiles: tuple[int, ...]) -> Variant | None:
    return again(variant, catalogue(spec, record(spec, e.case), e.case, tiles))


def _would_fail(spec: KernelSpec, e: Evidence, variant: Variant, tiles: tuple[int, ...]) -> bool:
    """Whether `variant` is plainly further from the reference than the target on a case that passed."""
    other = _again(spec, e, variant, tiles)
    if other is None:
        return False
    made, target, reference = other.run(spec, e.case).named(), e.target.named(), e.reference.named()
    for name, eager in reference.items():
        got, fake = target.get(name), made.get(name)
        if (
            got is None
            or eager is None
            or fake is None
            or not eager.is_floating_point()
            or fake.shape != eager.shape
        ):
            continue
        scale = e.scale(name)
        if _misfit(fake, eager, scale) > 2.0 * _misfit(got, eager, scale) + 0.5:
            return True
    return False


def _pairs(spec: KernelSpec, e: Evidence, scored: list[tuple[float, Variant]]) -> list[tuple[float, Variant]]:
    """Two early casts (or two formula slips) together, since faults often come as a habit."""
    singles = [v for s, v in scored[:8] if s > 0.02 and v.changes and not v.noise]
    found = []
    for i, a in enumerate(singles):
        for b in singles[i + 1 :]:
            if a.rank != b.rank or set(a.changes) & set(b.changes):
                continue
            pair = Variant(text=f"{a.text}; and {b.text}", rank=a.rank, changes={**a.changes, **b.changes})
            score = _score(spec, e, pair)
            if score is not None and score > scored[0][0] + _TIE:
                found.append((score, pair))
    return found


def _score(spec: KernelSpec, e: Evidence, variant: Variant) -> float | None:
    """Share of the failed tensors' error that `variant` reproduces, less what it breaks elsewhere."""
    try:
        made = variant.run(spec, e.case).named()
    except Exception:
        return None
    total, count, harm = 0.0, 0, 0.0
    target, reference = e.target.named(), e.reference.named()
    for t in e.tensors:
        got, eager, fake = target.get(t.tensor), reference.get(t.tensor), made.get(t.tensor)
        if (
            got is None
            or eager is None
            or fake is None
            or got.shape != fake.shape
            or not eager.is_floating_point()
        ):
            continue
        scale = e.scale(t.tensor)
        before, after = _misfit(got, eager, scale), _misfit(got, fake, scale)
        if t.verdict == "FAIL":
            if variant.noise:
                size = _misfit(fake, eager, scale)
                total += _alike(before, size)
            else:
                total += 1.0 - (after / before) if before > 0 else 0.0
            count += 1
        elif after > 3.0 * before + 0.5:
            harm += 1.0
    if count == 0:
        return None
    return total / count - harm / max(1, len(e.tensors))


def _alike(size: float, other: float) -> float:
    """0.9 for equal error sizes, 0 at a factor of 10: size alone never proves a cause as values do."""
    if size <= 0 or other <= 0:
        return 0.0
    return 0.9 * max(0.0, 1.0 - abs(math.log(size / other)) / 2.3)


def _misfit(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> float:
    """Typical distance in units of `scale`; large outliers count by their logarithm."""
    x, y = a.to(torch.float64), b.to(torch.float64)
    distance = (x - y).abs() / scale
    same = (torch.isnan(x) & torch.isnan(y)) | (x == y)
    distance = torch.where(same, torch.zeros_like(distance), distance)
    distance = torch.nan_to_num(distance, nan=1e9, posinf=1e9)
    return float(torch.log1p(distance).square().mean().sqrt()) if distance.numel() else 0.0


def _hint(failing: Sequence[Evidence]) -> str:
    families = list(
        dict.fromkeys(e.case.name.split(", ", 2)[-1] for e in failing if e.case.family == "layout")
    )
    only = all(e.case.family == "layout" for e in failing)
    return (
        f"; fails only with another memory layout ({families[0]}): strides are not honoured"
        if only and families
        else ""
    )
