"""Wrong variants of what is handed from tile to tile: weights of a mean, a carry, a running maximum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bridge.verify.trace import Change, Op, Trace, times
from bridge.verify.variant import Variant


def of_tiles(op: Op, trace: Trace, tiles: tuple[int, ...]) -> Iterator[Variant]:
    """Faults of one op that a kernel computes tile by tile."""
    where = op.side
    if op.name in ("sum", "mean") and op.out.is_floating_point():
        yield from _of_mean(op, tiles, where)
        if not op.backward:
            yield from _of_merge(op, trace, tiles)
    if op.name == "cumsum":
        yield from _of_carry(op, tiles, where)
    if op.name == "div" and not op.backward:
        yield from _of_running_maximum(op, trace, tiles)


def _of_mean(op: Op, tiles: tuple[int, ...], where: str) -> Iterator[Variant]:
    values: torch.Tensor = op.args[0]
    given = op.args[1] if len(op.args) > 1 and isinstance(op.args[1], list | tuple) else ()
    axes = [int(a) % values.ndim for a in given] if values.ndim else []
    axis = axes[0] if axes else 0
    if values.ndim == 0 or values.shape[axis] < 2:
        return
    length = values.shape[axis]
    over = f"{op.name} of {op.origin}"
    for tile in (t for t in tiles if 1 < t and length % t and t < length):
        yield Variant(
            text=f"{where}every tile of {tile} has the same weight in the {over}: a ragged last tile counts "
            "as a full one (a mean of tile means, or a count that is never cut)",
            rank="mask",
            key=f"{where}equal tiles of {tile} in {over}",
            changes={op.number: _equal_tiles(axis, tile)},
        )


def _equal_tiles(axis: int, tile: int) -> Change:
    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        length = args[0].shape[axis]
        blocks = -(-length // tile)
        counts = torch.full((length,), float(tile), dtype=args[0].dtype, device=args[0].device)
        counts[(blocks - 1) * tile :] = float(length - (blocks - 1) * tile)
        weights = length / (blocks * counts)
        shape = [length if i == axis else 1 for i in range(args[0].ndim)]
        made: torch.Tensor = func(args[0] * weights.reshape(shape), *args[1:], **kwargs)
        return made

    return change


def _of_merge(op: Op, trace: Trace, tiles: tuple[int, ...]) -> Iterator[Variant]:
    """Mean and variance merged from tiles (Welford) with the full count of a ragged last tile."""
    square = trace.ops.get(op.makers[0]) if op.makers else None
    centred = trace.ops.get(square.makers[0]) if square is not None and square.makers else None
    if square is None or square.name not in ("mul", "pow") or centred is None or centred.name != "sub":
        return
    mean = trace.ops.get(centred.makers[1]) if len(centred.makers) > 1 else None
    values = centred.args[0]
    if mean is None or mean.name != "mean" or not isinstance(values, torch.Tensor) or values.ndim == 0:
        return
    length = values.shape[-1]
    if mean.args[0].shape != values.shape or mean.args[0].numel() != mean.out.numel() * length:
        return
    for tile in (t for t in tiles if 1 < t < length and length % t):
        tail = values[..., length // tile * tile :]
        parts = [part.mean(-1, keepdim=True) for part in torch.split(values, tile, -1)]
        middle = torch.stack(parts).mean(0)
        extra = (tile - tail.shape[-1]) * (parts[-1] - middle).square()
        yield Variant(
            text=f"mean and variance of {op.origin} are merged from tiles of {tile} with the full count of a "
            "ragged last tile (the merge weighs it by the tile size, not by the elements in it)",
            rank="mask",
            changes={
                mean.number: _equal_tiles(values.ndim - 1, tile),
                op.number: _plus(extra / length if op.name == "mean" else extra),
            },
        )


def _plus(extra: torch.Tensor) -> Change:
    return lambda func, args, kwargs, out: out + extra.detach().reshape(out.shape)


def _of_carry(op: Op, tiles: tuple[int, ...], where: str) -> Iterator[Variant]:
    axis = int(op.args[1])
    length = op.out.shape[axis] if op.out.ndim else 0
    for tile in (t for t in tiles if 1 < t < length):
        for words, carried in (
            ("the carry is overwritten: each tile gets the sum of the last one, not of all before it", 1),
            ("no carry is handed on: each tile starts anew", 0),
        ):
            if carried and length <= tile + 1:
                continue
            # A sum that runs backward over tiles cut from the front meets the ragged one first.
            for first in dict.fromkeys((tile, length % tile or tile)):
                yield Variant(
                    text=f"{where}in the running sum of {op.origin} over tiles of {tile}, {words}",
                    rank="index",
                    key=f"{where}running sum {tile} {carried} {first == tile}",
                    changes={op.number: _carried(axis, tile, first, carried)},
                )


def _carried(axis: int, tile: int, first: int, tiles_kept: int) -> Change:
    """A running sum to which the totals of the last `tiles_kept` tiles are added, not of all."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        length = args[0].shape[axis]
        parts = [
            args[0].narrow(axis, 0, first),
            *args[0].narrow(axis, first, length - first).split(tile, axis),
        ]
        made = []
        for number, part in enumerate(parts):
            carry = sum(p.sum(axis, keepdim=True) for p in parts[max(0, number - tiles_kept) : number])
            made.append(torch.cumsum(part, axis) + carry)
        return torch.cat(made, dim=axis).to(out.dtype)

    return change


def _of_running_maximum(op: Op, trace: Trace, tiles: tuple[int, ...]) -> Iterator[Variant]:
    """A streaming softmax that forgets to rescale what it gathered when the maximum rises."""
    if len(op.makers) < 2:
        return
    exp = trace.ops.get(op.makers[0])
    total = trace.ops.get(op.makers[1])
    shift = trace.ops.get(exp.makers[0]) if exp is not None and exp.name == "exp" and exp.makers else None
    if exp is None or total is None or total.name != "sum" or shift is None or shift.name != "sub":
        return
    scores, top = shift.args[0], shift.args[1]
    if not isinstance(top, torch.Tensor) or top.ndim != scores.ndim or top.shape[-1] != 1:
        return
    weights = exp.out
    for tile in (t for t in tiles if 1 < t < scores.shape[-1]):
        rise = top - _running_maximum(scores, tile)  # log of what each tile was gathered too large by
        lost = torch.exp(torch.nan_to_num(rise, nan=0.0, posinf=80.0, neginf=0.0).clamp(max=80.0))
        yield Variant(
            text=f"the gathered values are not rescaled when the running maximum rises (tiles of {tile}): "
            "the accumulator misses the factor exp(m_old - m_new)",
            rank="formula",
            changes={op.number: times(lost.detach())},
        )
        both = (weights * lost).sum(-1, keepdim=True)
        yield Variant(
            text=f"the running denominator is not rescaled when the maximum rises (tiles of {tile})",
            rank="formula",
            changes={op.number: times((weights.sum(-1, keepdim=True) / both).detach())},
        )


def _running_maximum(scores: torch.Tensor, tile: int) -> torch.Tensor:
    """Per element, the largest score up to the end of its tile."""
    highest = scores.cummax(-1).values
    ends = torch.arange(scores.shape[-1], device=scores.device) // tile * tile + tile - 1
    return highest[..., ends.clamp(max=scores.shape[-1] - 1)]
