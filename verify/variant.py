"""One wrong variant of the reference: a sentence, and what it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bridge.verify.case import Case
from bridge.verify.execute import Result, run
from bridge.verify.spec import KernelSpec
from bridge.verify.trace import Change, Replay, replay

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
    swaps: dict[int, Any] = field(default_factory=dict)
    upstream: Callable[[torch.Tensor], torch.Tensor] | None = None
    function: Callable[..., Any] | None = None  #: a formula that the spec's author gave
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None
    noise: bool = False

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
        return replay(spec, case, Replay(changes=dict(self.changes), swaps=dict(self.swaps)), grads)
