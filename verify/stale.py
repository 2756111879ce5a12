"""Wrong variants that take a value one step too early: what an op reads before its last change."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bridge.verify.trace import Change, Op, Trace
from bridge.verify.variant import Variant

_ARITHMETIC = ("add", "sub", "mul", "div", "pow", "exp", "sum", "mean", "neg", "mm", "bmm")
#: Steps whose operand can stand in their place: the same thing before a term or factor came in.
_STEPS = (
    "add",
    "sub",
    "mul",
    "div",
    "clamp",
    "clamp_min",
    "clamp_max",
    "where",
    "masked_fill",
    "sqrt",
    "rsqrt",
)


def of_operands(op: Op, trace: Trace) -> Iterator[Variant]:
    """`op` with one operand as it was before the step that made it."""
    if op.name not in _ARITHMETIC or not op.out.is_floating_point():
        return
    where = op.side
    for place, argument in enumerate(op.args[:2]):
        maker = _maker(op, place, trace)
        if maker is None or maker.name not in _STEPS or not isinstance(argument, torch.Tensor):
            continue
        if len(trace.readers(maker.number)) < 2:
            continue  # Nothing else reads it: that is the step left out, which has its own words.
        for earlier in maker.args:
            if (
                not isinstance(earlier, torch.Tensor)
                or not earlier.is_floating_point()
                or earlier.shape != argument.shape
                or earlier.dtype != argument.dtype
            ):
                continue
            yield Variant(
                text=f"{where}one step takes a value too early: `{op.name}` of {op.origin} reads what "
                f"`{maker.name}` of {maker.origin} started from, not its result",
                rank="formula",
                changes={op.number: _instead(place, earlier)},
            )


def _maker(op: Op, place: int, trace: Trace) -> Op | None:
    """The op that made tensor argument `place`."""
    tensors = [i for i, a in enumerate(op.args) if isinstance(a, torch.Tensor)]
    if place not in tensors or tensors.index(place) >= len(op.makers):
        return None
    return trace.ops.get(op.makers[tensors.index(place)])


def _instead(place: int, earlier: torch.Tensor) -> Change:
    return lambda func, args, kwargs, out: func(
        *(earlier.detach() if i == place else a for i, a in enumerate(args)), **kwargs
    )
