"""Two calls at once: forward on the case, forward on other values, then the backward of the first.

A network calls a kernel once a layer before any backward runs. A kernel that keeps its result or its saved
statistics in memory of its own gives right answers one call at a time, and garbage there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bridge.verify.bits import same_bits
from bridge.verify.case import Case
from bridge.verify.execute import Result, copy_with_layout, run_target, split
from bridge.verify.spec import KernelSpec

#: What is said of a result that only such a call gets wrong.
CROSSED = (
    "another call between its forward and its backward, or a repeat, changes it: state is kept between calls "
    "(a buffer or cache that the calls share)"
)
#: Cases with more input elements are run one call at a time: a second graph is a second set of activations.
_LARGEST = 1 << 20


def interleaved(spec: KernelSpec, case: Case) -> Result | str:
    """What the target returns when another call comes between its forward and its backward.

    The other call gets the same shapes, attributes and indices, and the floating values in another order.
    A result that it overwrites is a fault.
    """
    if sum(t.numel() for t in case.inputs) > _LARGEST:
        return run_target(spec, case)
    overwritten: list[str] = []

    def target(*leaves: torch.Tensor, **attrs: Any) -> Any:
        made = spec.target(*leaves, **attrs)
        results = split(made, len(spec.outputs))
        if isinstance(results, str):
            return made
        before = [t.detach().clone() for t in results]
        others = tuple(_reordered(t, wanted=t.requires_grad) for t in leaves)
        try:
            spec.target(*others, **attrs)
        except Exception:  # values that it refuses say nothing about the first call
            return made
        overwritten.extend(
            name
            for name, now, was in zip(spec.outputs, results, before, strict=True)
            if not same_bits(now.detach(), was)
        )
        return made

    result = run_target(replace(spec, target=target), case)
    if isinstance(result, Result):
        for name in overwritten:
            result.faults[name] = (
                f"`{name}` is overwritten by a later call: two calls return the same memory, so a caller "
                "that holds the first result sees it change"
            )
    return result


def _reordered(tensor: torch.Tensor, *, wanted: bool) -> torch.Tensor:
    other = copy_with_layout(tensor.detach())
    if other.is_floating_point() and other.numel() > 1 and 0 not in other.stride():
        other.copy_(tensor.detach().reshape(-1).roll(1).reshape(tensor.shape))
    return other.requires_grad_(wanted)
