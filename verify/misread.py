"""Wrong variants of how an input is read: one row of it for all, its neighbour, or its end first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bridge.verify.case import Case
from bridge.verify.spec import KernelSpec
from bridge.verify.variant import Variant


def of_inputs(spec: KernelSpec, case: Case) -> Iterator[Variant]:
    """Faults of one input's rows; differentiable, so that its gradient goes astray in the same way."""
    for place, (name, tensor) in enumerate(zip(spec.inputs, case.inputs, strict=True)):
        for axis in range(min(2, tensor.ndim)):
            if tensor.shape[axis] < 2:
                continue
            what = "row" if axis == 0 and tensor.ndim > 1 else ("element" if tensor.ndim == 1 else "column")
            for words, change in (
                (f"the first {what} of {name} is read for every {what}", _first(axis)),
                (f"{name} is read one {what} too early", _rolled(axis, 1)),
                (f"{name} is read one {what} too late", _rolled(axis, -1)),
            ):
                yield Variant(text=words, rank="index", function=_with(spec, place, change))


def _first(axis: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.narrow(axis, 0, 1).expand(t.shape)


def _rolled(axis: int, by: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.roll(by, axis)


def _with(spec: KernelSpec, place: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def reference(*inputs: torch.Tensor, **attrs: Any) -> Any:
        return spec.reference(*(change(t) if i == place else t for i, t in enumerate(inputs)), **attrs)

    return reference
