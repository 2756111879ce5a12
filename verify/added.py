"""The reference's results that have no rows, added up over blocks of rows.

A formula that goes to FP32 inside adds a weight's gradient up in FP32 and rounds it once, at the end. Over
blocks it does so as well, if the weight is handed to it in FP32: the parts then come unrounded. Whether a
reference is of that kind is seen on a few rows, where it must give the same bits either way.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bridge.verify.apart import FEW, Rows
from bridge.verify.bits import same_bits
from bridge.verify.case import Case
from bridge.verify.execute import Result, run
from bridge.verify.spec import KernelSpec
from bridge.verify.ulp import is_low


class Cascade:
    """A sum in pairs, pairs of pairs and so on, as `torch.sum` adds up."""

    def __init__(self) -> None:
        self._levels: list[torch.Tensor | None] = []

    def add(self, part: torch.Tensor) -> None:
        """Take one more term."""
        for place, waiting in enumerate(self._levels):
            if waiting is None:
                self._levels[place] = part
                return
            part = waiting + part
            self._levels[place] = None
        self._levels.append(part)

    def sum(self) -> torch.Tensor:
        """What all terms come to.

        Raises:
            ValueError: there are none.
        """
        parts = [part for part in self._levels if part is not None]
        if not parts:
            raise ValueError("a sum needs at least one term")
        total = parts[0]
        for part in parts[1:]:
            total = part + total
        return total


def run_wide(spec: KernelSpec, case: Case, rows: Rows) -> Result | str:
    """Run the reference with what belongs to all rows and gets a gradient in FP32."""
    shared = [n in spec.grads and rows.results[f"grad_{n}"] is None for n in spec.inputs]
    inputs = tuple(
        t.float() if wide and is_low(t.dtype) else t for t, wide in zip(case.inputs, shared, strict=True)
    )
    return run(spec.reference, spec, replace(case, inputs=inputs))


def may_add(spec: KernelSpec, case: Case, rows: Rows) -> bool:
    """Whether what has no rows is, over blocks of rows, what the reference would add up itself."""
    try:
        wide = run_wide(spec, rows.block(case, 0, FEW), rows)
    except Exception:  # it takes no tensors of unlike dtypes
        return False
    if isinstance(wide, str):
        return False
    parts = wide.named()
    for name, like in rows.likes.items():
        part = parts[name]
        if like is None or part is None:
            if part is not like:
                return False
            continue
        if rows.results[name] is None:
            if is_low(part.dtype) or not part.is_floating_point():
                return False
            part = part.to(like.dtype)
        if part.dtype != like.dtype or not same_bits(part, like):
            return False
    return True
