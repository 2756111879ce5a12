"""Why a target failed: which wrong variant gives its values, or its misdeed, or "unexplained"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bridge.verify.deeds import deed, remembers
from bridge.verify.evidence import Evidence, misfit
from bridge.verify.place import where_it_sits
from bridge.verify.spec import KernelSpec
from bridge.verify.suspects import suspects
from bridge.verify.variant import RANKS, Variant, again
from bridge.verify.verdict import Diagnosis

#: Share of the error that a variant must reproduce to be named as the cause.
_NAMED = 0.5
#: Variants this close to the best are told apart by the order in which the workflow looks.
_TIE = 0.02
#: What a variant costs that breaks a tensor on the side, forward or backward, where nothing failed.
_OTHER_SIDE = 0.1
#: Cases on which variants are tried.
_CASES = 3
_LARGEST = 1 << 16
#: Block sizes to try where no launch showed any.
_USUAL_TILES = (8, 16, 32, 64, 128)


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
    done = deed(spec, failing)
    if done is not None:
        return Diagnosis(cause=done[0], explained=1.0, where=place, evidence=done[1])
    chosen = _choose(failing)
    tiles = tiles or _USUAL_TILES
    if not chosen:
        return Diagnosis(
            cause="unexplained", where=place, evidence="no failing case is small enough to try variants on"
        )
    scored = _scores(spec, chosen, passing, tiles)
    scored.sort(key=lambda pair: pair[0], reverse=True)
    if not scored or scored[0][0] < _NAMED:
        kept = remembers(spec, failing)
        if kept is not None:
            return Diagnosis(cause=kept[0], explained=1.0, where=place, evidence=kept[1])
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
        cause=variant.text + _side(spec, chosen[0], variant),
        explained=max(0.0, min(1.0, score)),
        where=place,
        evidence=_evidence(variant, score, chosen),
        alternatives=tuple(dict.fromkeys(f"{v.text} ({s:.0%})" for s, v in others[:3] if s > 0.2)),
    )


def _evidence(variant: Variant, score: float, chosen: Sequence[Evidence]) -> str:
    cases = "; ".join(e.case.name for e in chosen)
    how = "errors of the same size on the same rows" if variant.noise else "the target's own values"
    return f"the reference with this fault gives {how}: {score:.0%} of the error, on {cases}"


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


@dataclass(slots=True)
class _Library:
    """The variants of each case, made once."""

    spec: KernelSpec
    tiles: tuple[int, ...]
    made: dict[int, list[Variant]] = field(default_factory=dict)

    def of(self, e: Evidence) -> list[Variant]:
        """All variants on one case, those with a number to fit not fitted yet."""
        if id(e) not in self.made:
            self.made[id(e)] = suspects(self.spec, e, self.tiles)
        return self.made[id(e)]

    def same(self, variant: Variant, e: Evidence) -> Variant | None:
        """`variant` as it is on another case."""
        other = again(variant, self.of(e))
        return other.settled() if other is not None else None


def _scores(
    spec: KernelSpec, chosen: Sequence[Evidence], passing: Sequence[Evidence], tiles: tuple[int, ...]
) -> list[tuple[float, Variant]]:
    first = chosen[0]
    library = _Library(spec, tiles)
    variants = [v for one in library.of(first) if (v := one.settled()) is not None]
    scored = [(s, v) for v in variants if (s := _score(spec, first, v)) is not None]
    scored.sort(key=lambda pair: pair[0], reverse=True)
    if scored and 0.1 < scored[0][0] < 0.9:
        scored += _pairs(spec, first, scored)
        scored.sort(key=lambda pair: pair[0], reverse=True)
    confirmed: list[tuple[float, Variant]] = []
    for score, variant in scored[:12]:
        seconds = [_elsewhere(library, e, variant) for e in chosen[1:]]
        known = [s for s in seconds if s is not None]
        score = sum([score, *known]) / (1 + len(known))
        if any(_would_fail(library, e, variant) for e in passing if e.case.dtype == first.case.dtype):
            score *= 0.3
        confirmed.append((score, variant))
    return confirmed + scored[12:]


def _elsewhere(library: _Library, e: Evidence, variant: Variant) -> float | None:
    other = library.same(variant, e)
    return _score(library.spec, e, other) if other is not None else None


def _would_fail(library: _Library, e: Evidence, variant: Variant) -> bool:
    """Whether `variant` is plainly further from the reference than the target on a case that passed."""
    other = library.same(variant, e)
    if other is None:
        return False
    made, target, reference = other.run(library.spec, e.case).named(), e.target.named(), e.reference.named()
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
        if misfit(fake, eager, scale) > 2.0 * misfit(got, eager, scale) + 0.5:
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
            text = f"{a.text} (twice)" if a.text == b.text else f"{a.text}; and {b.text}"
            pair = Variant(text=text, rank=a.rank, changes={**a.changes, **b.changes})
            score = _score(spec, e, pair)
            if score is not None and score > scored[0][0] + _TIE:
                found.append((score, pair))
    return found


def _score(spec: KernelSpec, e: Evidence, variant: Variant) -> float | None:
    """Share of the failed tensors' error that `variant` reproduces, less what it breaks elsewhere.

    A kernel's forward and backward are two formulas. What a variant breaks on the side where nothing
    failed hardly counts: the fault is then in the other one alone.
    """
    try:
        made = variant.run(spec, e.case).named()
    except Exception:
        return None
    total, count, harm = 0.0, 0, 0.0
    target, reference = e.target.named(), e.reference.named()
    sides = {t.tensor in spec.outputs for t in e.tensors if t.verdict == "FAIL"}
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
        before, after = misfit(got, eager, scale), misfit(got, fake, scale)
        if t.verdict == "FAIL":
            if variant.noise:
                size = misfit(fake, eager, scale)
                total += _alike(before, size)
            else:
                total += 1.0 - (after / before) if before > 0 else 0.0
            count += 1
        elif after > 3.0 * before + 0.5:
            harm += 1.0 if (t.tensor in spec.outputs) in sides else _OTHER_SIDE
    if count == 0:
        return None
    return total / count - harm / max(1, len(e.tensors))


def _side(spec: KernelSpec, e: Evidence, variant: Variant) -> str:
    """Says where the fault sits alone, when the variant has it in forward and backward."""
    sides = {t.tensor in spec.outputs for t in e.tensors if t.verdict == "FAIL"}
    if len(sides) != 1 or not spec.grads:
        return ""
    made, target = variant.run(spec, e.case).named(), e.target.named()
    for t in e.tensors:
        got, fake = target.get(t.tensor), made.get(t.tensor)
        if t.verdict == "FAIL" or (t.tensor in spec.outputs) in sides or got is None or fake is None:
            continue
        if not got.is_floating_point() or got.shape != fake.shape:
            continue
        if misfit(got, fake, e.scale(t.tensor)) > 0.5:
            return (
                ", in the forward only" if True in sides else ", as the backward has it; the forward is right"
            )
    return ""


def _alike(size: float, other: float) -> float:
    """0.9 for equal error sizes, 0 at a factor of 10: size alone never proves a cause as values do."""
    if size <= 0 or other <= 0:
        return 0.0
    return 0.9 * max(0.0, 1.0 - abs(math.log(size / other)) / 2.3)


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
