"""One wrong variant of the reference: a sentence, and what it changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bridge.verify.case import Case
from bridge.verify.execute import Result, run
from bridge.verify.spec import KernelSpec
from bridge.verify.trace import Change, Replay, Swap, replay

#: The order in which the workflow looks for causes.
RANKS = ("index", "mask", "memory", "accumulator", "cast", "store", "stability", "approximation", "formula")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One wrong variant.

    noise: its errors depend on rounding order, so a kernel with this fault matches it in size only.
    """

    text: str
    rank: str
    changes: dict[int, Change] = field(default_factory=dict)
    swaps: dict[int, Swap] = field(default_factory=dict)
    upstream: Callable[[torch.Tensor], torch.Tensor] | None = None
    upstreams: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] | None = None
    function: Callable[..., Any] | None = None  #: a formula that the spec's author gave
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None
    after: Callable[[Result], Result] | None = None  #: what happens to the results of the right formula
    backward_only: bool = False  #: the outputs are those of the right formula
    noise: bool = False
    nth: int = 0  #: which of the variants that read alike
    key: str = ""  #: what tells it from others on every case, where its words hold a number fitted to one
    fit: Callable[[], Variant | None] | None = None  #: makes it for one case from the target's own results
    scaled: dict[int, float] = field(default_factory=dict)  #: inputs by place, as the backward finds them

    def settled(self) -> Variant | None:
        """The variant with its number fitted; None where no number explains anything."""
        return self if self.fit is None else self.fit()

    def run(self, spec: KernelSpec, case: Case) -> Result:
        """Results of the variant on `case`."""
        if self.function is not None:
            result = run(self.function, spec, case)
            assert not isinstance(result, str), result
            return result
        if self.inputs is not None:
            case = replace(case, inputs=tuple(self.inputs(t) for t in case.inputs))
        grads = None
        if self.upstream is not None:
            grads = tuple(self.upstream(g) for g in case.grad_outputs)
        if self.upstreams is not None:
            grads = self.upstreams(case.grad_outputs)
        mode = Replay(changes=dict(self.changes), swaps=dict(self.swaps), scaled=dict(self.scaled))
        result = replay(spec, case, mode, grads)
        if self.backward_only:
            right = run(spec.reference, spec, case)
            assert not isinstance(right, str), right
            result = replace(result, outputs=right.outputs)
        return self.after(result) if self.after is not None else result


def numbered(variants: Iterable[Variant]) -> list[Variant]:
    """Variants that read alike (one op of many of a kind) are told apart by their order in the trace."""
    seen: dict[str, int] = {}
    found = []
    for variant in variants:
        stem = _stem(variant)
        found.append(replace(variant, nth=seen.get(stem, 0)))
        seen[stem] = seen.get(stem, 0) + 1
    return found


def again(variant: Variant, others: Iterable[Variant]) -> Variant | None:
    """The same variant out of another case's catalogue, found by its words, since op numbers may differ."""
    stem = _stem(variant)
    alike = [other for other in others if _stem(other) == stem]
    return next((other for other in alike if other.nth == variant.nth), alike[0] if alike else None)


def _stem(variant: Variant) -> str:
    """The sentence without the lengths of one case."""
    return variant.key or re.sub(r"\d+ // |padded length \d+, not by \d+|of its \d+ terms", "", variant.text)
