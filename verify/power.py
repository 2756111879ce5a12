"""Could these inputs have failed anybody? Wrong variants in the target's place, on the same cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bridge.verify.compare import Trio, judge_tensor
from bridge.verify.evidence import Evidence
from bridge.verify.spec import KernelSpec
from bridge.verify.tasks import Tried
from bridge.verify.trace import record
from bridge.verify.variant import Variant, again
from bridge.verify.variants import catalogue
from bridge.verify.verdict import Constants, Power

#: Variants tried: one of each kind of sentence, the spec's own faults always.
_MOST = 32

#: Which added inputs show a kind of fault, for the ones that the given inputs do not.
_SHOWN_BY = (
    ("epsilon", "rows with rms near sqrt(eps): x * 1e-4, zero rows"),
    ("one-pass", "offset rows: x + 1000"),
    ("variance", "offset rows with a length that is no power of two"),
    ("row maximum", "all-negative rows: x - 1000"),
    ("overflow", "large values: x * 100"),
    ("strides", "transposed, sliced and expanded layouts"),
    ("first element", "a random grad_output"),
    ("tail block", "sizes just above a tile"),
    ("last term", "grad_output in the last row only"),
    ("accumulated", "long same-sign rows"),
    ("partial sums", "long same-sign rows, FP32 outputs"),
)


def measure_power(
    spec: KernelSpec, evidence: Sequence[Evidence], constants: Constants, tiles: tuple[int, ...]
) -> Power:
    """Which variants fail on at least one of the kept cases.

    Args:
        evidence: passing cases that were kept, declared ones first.
        constants: those the target was judged with.
    """
    return power_of(try_variants(spec, evidence, constants, tiles))


def power_of(tried: Iterable[Tried]) -> Power:
    """Power in words; tried: every variant, in any order."""
    inorder = sorted(tried, key=lambda one: one.place)
    missed = [one.text for one in inorder if not one.seen]
    return Power(
        revealed=tuple(one.text for one in inorder if one.seen),
        not_revealed=tuple(missed),
        would_reveal={text: family for text in missed for key, family in _SHOWN_BY if key in text},
    )


def try_variants(
    spec: KernelSpec,
    evidence: Sequence[Evidence],
    constants: Constants,
    tiles: tuple[int, ...],
    *,
    start: int = 0,
    step: int = 1,
) -> list[Tried]:
    """Every `step`-th variant from place `start` on, in the target's place."""
    if not evidence:
        return []
    first = max(evidence, key=lambda e: sum(t.numel() for t in e.case.inputs))
    found = {id(first): catalogue(spec, record(spec, first.case), first.case, tiles)}
    others = [e for e in evidence if e is not first]

    def fails(e: Evidence, variant: Variant) -> bool:
        if id(e) not in found:
            found[id(e)] = catalogue(spec, record(spec, e.case), e.case, tiles)
        own = variant if e is first else again(variant, found[id(e)])
        return own is not None and _fails(spec, e, own, constants)

    return [
        Tried(place=place, text=variant.text, seen=any(fails(e, variant) for e in (first, *others)))
        for place, variant in enumerate(_one_of_each(found[id(first)], spec))
        if place % step == start
    ]


def _one_of_each(variants: list[Variant], spec: KernelSpec) -> list[Variant]:
    kinds: dict[str, Variant] = {}
    for variant in variants:
        words = variant.text.split("`")
        key = variant.text if variant.text in spec.faults else (words[0] + words[-1])[:60] + variant.rank
        kinds.setdefault(key, variant)
    ranked: dict[str, int] = {}
    chosen = []
    for variant in kinds.values():
        ranked[variant.rank] = ranked.get(variant.rank, 0) + 1
        if variant.text in spec.faults or ranked[variant.rank] <= 6:
            chosen.append(variant)
    return chosen[:_MOST]


def _fails(spec: KernelSpec, e: Evidence, own: Variant, constants: Constants) -> bool:
    try:
        made = own.run(spec, e.case)
    except Exception:
        return False
    golden, reference, fake = e.golden.named(), e.reference.named(), made.named()
    return any(
        judge_tensor(
            name,
            e.case.name,
            Trio(golden=golden.get(name), reference=reference.get(name), target=fake.get(name)),
            constants=constants,
            envelope=replace(e.noise[name]) if name in e.noise else None,
            elementwise=spec.kind == "elementwise",
            brief=True,
        ).verdict
        == "FAIL"
        for name in golden
    )
