"""Wrong variants of steps that choose, round, move or scatter: no rounding error explains these."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from bridge.verify.trace import Change, Op
from bridge.verify.variant import Variant

#: Finite stand-ins for -Inf that kernels use to mask.
_STAND_INS = (-1e9, -1e4, -1e3, -100.0, -50.0, -30.0, -20.0, -10.0)
#: Rows that a scatter is replayed over, one after the other.
_MOST_ROWS = 2048
_SCATTERS = ("embedding_dense_backward", "index_add", "index_put", "scatter_add", "_unsafe_index_put")


def of_discrete(op: Op) -> Iterator[Variant]:
    """Faults of one op that does not compute but pick."""
    where = op.side
    if op.name == "round":
        yield from _of_rounding(op)
    if not op.out.is_floating_point() and op.out.dtype == torch.int64 and op.name in ("mul", "add", "cumsum"):
        yield from _of_narrow_integers(op)
    if op.name in _SCATTERS and op.out.is_floating_point():
        yield from _of_scatter(op, where)
    if op.name == "constant_pad_nd":
        yield from _of_padding(op)
    if op.name in ("masked_fill", "where") and not op.backward and op.out.is_floating_point():
        yield from _of_mask_value(op)


def _of_rounding(op: Op) -> Iterator[Variant]:
    for words, change in (
        ("int(v + 0.5): right for positive values only", lambda x: (x + 0.5).trunc()),
        ("floor(v + 0.5), a half always upward", lambda x: (x + 0.5).floor()),
        ("a half always away from zero", lambda x: x.sign() * (x.abs() + 0.5).floor()),
        ("cutting toward zero", torch.trunc),
        ("rounding down", torch.floor),
        ("rounding up", torch.ceil),
    ):
        yield Variant(
            text=f"`round` of {op.origin} to nearest even is done by {words}",
            rank="store",
            changes={op.number: lambda f, a, k, out, change=change: change(a[0])},  # type: ignore[misc]
        )


def _of_narrow_integers(op: Op) -> Iterator[Variant]:
    if not op.out.numel() or int(op.out.abs().max()) < 1 << 31:
        return
    yield Variant(
        text=f"`{op.name}` of {op.origin} overflows 32-bit integers and wraps around (int64 is needed)",
        rank="index",
        changes={op.number: lambda f, a, k, out: out.to(torch.int32).to(torch.int64)},
    )


def _of_scatter(op: Op, where: str) -> Iterator[Variant]:
    rows, places = _scattered(op.name, op.args, op.out.shape)
    if (
        rows is None
        or places is None
        or places.numel() > _MOST_ROWS
        or torch.unique(places).numel() == places.numel()
    ):
        return
    for words, first in (("the last", False), ("the first", True)):
        yield Variant(
            text=f"{where}rows of {op.origin} that share an index overwrite each other instead of being "
            f"added: {words} one is left",
            rank="index",
            changes={op.number: _written(op.name, first)},
        )


def _scattered(
    name: str, args: tuple[Any, ...], shape: torch.Size
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What an op scatters, as rows, and where each row goes: along the first axis of its result's `shape`."""
    if name == "embedding_dense_backward":
        return args[0].reshape(-1, args[0].shape[-1]), args[1].reshape(-1)
    if name == "index_add" and int(args[1]) % max(1, len(shape)) == 0:
        return args[3], args[2].reshape(-1)
    if name in ("index_put", "_unsafe_index_put") and len(args[1]) == 1 and args[1][0] is not None:
        return args[2].reshape(args[1][0].numel(), *shape[1:]), args[1][0].reshape(-1)
    return None, None


def _written(name: str, first: bool) -> Change:
    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        rows, places = _scattered(name, args, out.shape)
        assert rows is not None and places is not None
        table = torch.zeros_like(out) if name == "embedding_dense_backward" else args[0].clone()
        order = range(len(places) - 1, -1, -1) if first else range(len(places))
        for number in order:
            table[int(places[number])] = rows[number].to(out.dtype)
        return table

    return change


def _of_padding(op: Op) -> Iterator[Variant]:
    """Padding that a kernel finds by its flat address: the neighbour's end stands where zeros are meant."""
    values, pads = op.args[0], op.args[1]
    if len(pads) < 2 or pads[0] <= 0 or values.ndim < 2 or values.shape[-1] < pads[0]:
        return
    for axis in range(values.ndim - 1):
        if values.shape[axis] > 1:
            yield Variant(
                text=f"the padding before {op.origin} is not masked at the start of each sequence: it holds "
                f"the end of the one before (axis {axis})",
                rank="mask",
                changes={op.number: _neighbours(axis, int(pads[0]))},
            )


def _neighbours(axis: int, count: int) -> Change:
    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        made = out.clone()
        before = args[0].roll(1, axis)[..., -count:]
        made[..., :count].narrow(axis, 1, out.shape[axis] - 1).copy_(
            before.narrow(axis, 1, out.shape[axis] - 1)
        )
        return made

    return change


def _of_mask_value(op: Op) -> Iterator[Variant]:
    value = _filled_with(op)
    if value is None or not value <= -1e4:
        return
    mask = op.out == value if math.isfinite(value) else torch.isneginf(op.out)
    source = next(
        (a for a in op.args if isinstance(a, torch.Tensor) and a.is_floating_point() and a.ndim), None
    )
    if source is None or not bool(mask.any()):
        return
    base = source.expand(op.out.shape).detach()
    for number in (*_STAND_INS, 0.0):
        words = f"{number:g} is added to masked values" if number else "masked values stay as they are"
        yield Variant(
            text=f"the mask is finite: {words} of {op.origin} where they must be removed (-Inf)",
            rank="mask",
            changes={op.number: _filled(mask, base + number)},
        )
        yield Variant(
            text=f"the mask is finite: masked values of {op.origin} are set to {number:g} where they must be "
            "removed (-Inf)",
            rank="mask",
            changes={op.number: _filled(mask, torch.full_like(base, number))},
        )


def _filled_with(op: Op) -> float | None:
    if op.name == "masked_fill":
        return float(op.args[2])
    for a in op.args[1:]:
        if isinstance(a, int | float) or (isinstance(a, torch.Tensor) and a.ndim == 0):
            return float(a)
    return None


def _filled(mask: torch.Tensor, values: torch.Tensor) -> Change:
    return lambda func, args, kwargs, out: torch.where(mask, values.to(out.dtype), out)
