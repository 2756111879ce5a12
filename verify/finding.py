"""One thing that a call's inputs do not explain, and how sure that is. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.capture.record import Call
from bridge.verify.diff_document import Basis, Origin

#: Tiers of evidence. 0: inputs agree and outputs do not (or the calls are told to do different things);
#: 1: told to do different things, but the inputs differ as well; 2: the difference entered from outside
#: the step; 3: outputs differ far more than inputs (heuristic).
SURE, TOLD, ENTERED, LIKELY = range(4)

#: Per pair, the scalar arguments and flags that differ: name -> (in A, in B).
Arguments = dict[int, dict[str, tuple[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that its inputs do not explain. Exactly one of pair, only_a, only_b is not -1."""

    tier: int
    place: float  #: position in execution order
    origin: Origin
    basis: Basis
    reason: str
    pair: int = -1
    only_a: int = -1
    only_b: int = -1
    detail: str = ""
    backward: bool = False  #: a module call whose gradients are meant, not its outputs
    module: str = ""  #: where the call itself does not say: the module it belongs to


def argument_differences(a: Call, b: Call) -> dict[str, tuple[str, str]]:
    """Scalar arguments and precision flags that differ; of different classes only what both have."""
    found: dict[str, tuple[str, str]] = {}
    common = a.op != b.op or a.kind == "module"
    for left, right, mark in ((a.attrs, b.attrs, ""), (a.flags, b.flags, "flag ")):
        if left == right:
            continue
        for name in sorted({*left, *right}, key=str):
            if mark and (name not in left or name not in right or name.startswith(("rng", "grid"))):
                continue
            if common and (name not in left or name not in right):
                continue
            pair = left.get(name, "absent"), right.get(name, "absent")
            if pair[0] != pair[1]:
                found[mark + name] = str(pair[0]), str(pair[1])
    return found
