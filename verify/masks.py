"""Wrong variants of masks: diagonals, alignment, boundaries, and tiles that are masked throughout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bridge.verify.trace import Change, Op
from bridge.verify.variant import Variant

_OTHER = {"ge": torch.gt, "gt": torch.ge, "le": torch.lt, "lt": torch.le}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def of_mask(op: Op, tiles: tuple[int, ...]) -> Iterator[Variant]:
    """Faults of one op that makes a mask, or that meets masked values."""
    if op.name in ("triu", "tril"):
        yield from _of_triangle(op)
    if op.name in _OTHER and not op.backward:
        yield from _of_comparison(op)
    if op.name == "amax" and isinstance(op.args[0], torch.Tensor) and len(op.args) > 1:
        yield from _of_leading_tile(op, tiles)


def _of_triangle(op: Op) -> Iterator[Variant]:
    rows, cols = op.out.shape[-2:]
    diagonal = int(op.args[1]) if len(op.args) > 1 else 0

    def moved(by: int) -> dict[int, Change]:
        return {op.number: lambda f, a, k, out: f(a[0], diagonal + by)}

    if rows != cols:
        yield Variant(
            text="the mask is aligned to the top left corner where the bottom right one is meant",
            rank="mask",
            changes=moved(rows - cols),
        )
        yield Variant(
            text="the mask is aligned to the bottom right corner where the top left one is meant",
            rank="mask",
            changes=moved(cols - rows),
        )
    for by in (1, -1):
        yield Variant(text=f"the diagonal of the mask is off by {by:+d}", rank="mask", changes=moved(by))


def _of_comparison(op: Op) -> Iterator[Variant]:
    """Comparisons of integers make masks out of indices; of floats they choose between formulas."""
    first = op.args[0]
    if not isinstance(first, torch.Tensor) or first.is_floating_point():
        return
    other = _OTHER[op.name]
    yield Variant(
        text=f"a mask's boundary is off by one: `{_SIGNS[op.name]}` without or with equality",
        rank="mask",
        changes={op.number: lambda f, a, k, out: other(a[0], a[1])},
    )
    if op.out.ndim >= 2 and op.out.shape[-1] != op.out.shape[-2]:
        gap = op.out.shape[-1] - op.out.shape[-2]
        for sign, corner, meant in ((1, "top left", "bottom right"), (-1, "bottom right", "top left")):
            yield Variant(
                text=f"the mask is aligned to the {corner} corner where the {meant} one is meant",
                rank="mask",
                changes={op.number: _compared(sign * (gap if op.name in ("ge", "gt") else -gap))},
            )


def _compared(by: int) -> Change:
    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = func(args[0] - by, *args[1:])
        return made

    return change


def _of_leading_tile(op: Op, tiles: tuple[int, ...]) -> Iterator[Variant]:
    values: torch.Tensor = op.args[0]
    dims = op.args[1] if isinstance(op.args[1], list | tuple) else [op.args[1]]
    if values.ndim == 0 or not dims or not bool(torch.isneginf(values).any()):
        return
    axis = int(dims[0]) % values.ndim
    for tile in (t for t in tiles if t < values.shape[axis]):
        yield Variant(
            text=f"a leading tile of {tile} that holds -Inf only gives NaN: exp(-Inf - -Inf) is not guarded",
            rank="stability",
            changes={op.number: _poisoned(axis, tile)},
        )


def _poisoned(axis: int, tile: int) -> Change:
    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        empty = torch.isneginf(args[0].narrow(axis, 0, tile)).all(axis, keepdim=True)
        return torch.where(empty.reshape(out.shape), torch.full_like(out, float("nan")), out)

    return change
