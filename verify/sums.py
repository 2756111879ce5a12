"""Wrong variants of sums, means, variances and matrix products."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bridge.verify.case import Case
from bridge.verify.trace import Change, Op, Trace
from bridge.verify.variant import Variant


def of_sum(op: Op, trace: Trace, case: Case, tiles: tuple[int, ...], where: str) -> Iterator[Variant]:
    """Faults of one sum or mean: lost terms, padded lanes, low accumulators."""
    values = op.args[0]
    dims = (
        op.args[1] if len(op.args) > 1 and isinstance(op.args[1], list | tuple) else list(range(values.ndim))
    )
    if not dims:
        dims = list(range(values.ndim))
    axis = dims[0] % values.ndim if values.ndim else 0
    if values.ndim == 0 or values.shape[axis] < 2:
        return
    length = values.shape[axis]
    over = "rows" if axis == 0 and values.ndim > 1 else "the row"
    name = f"{where}the sum over {over} of {', '.join(sorted(op.sources))}"
    for tile in (t for t in tiles if 2 <= t and length % t and length > 1):
        whole = length // tile * tile
        if whole:
            yield Variant(
                text=f"tail block dropped: {name} adds only {length} // {tile} full blocks "
                "(floor where ceil is needed)",
                rank="mask",
                changes={op.number: _kept(axis, 0, whole)},
            )
    for tile in (t for t in tiles if t < length):
        yield Variant(
            text=f"{name} covers the first block of {tile} only",
            rank="mask",
            changes={op.number: _kept(axis, 0, tile)},
        )
    yield Variant(
        text=f"{name} misses its last term", rank="mask", changes={op.number: _kept(axis, 0, length - 1)}
    )
    yield Variant(
        text=f"{name} misses its first term", rank="mask", changes={op.number: _kept(axis, 1, length)}
    )
    half = torch.bfloat16 if case.dtype == "bfloat16" else torch.float16
    yield Variant(
        text=f"{name} is accumulated in {str(half)[6:]}",
        rank="accumulator",
        changes={op.number: _low_sum(axis, half, 1)},
        noise=True,
    )
    for tile in (t for t in tiles if t < length):
        yield Variant(
            text=f"{name} keeps partial sums of {tile} terms in {str(half)[6:]}",
            rank="accumulator",
            changes={op.number: _low_sum(axis, half, tile)},
            noise=True,
        )
    padded = 1 << (length - 1).bit_length()
    if op.name == "mean" and padded != length:
        yield Variant(
            text=f"the mean over {over} is divided by the padded length {padded}, not by {length}",
            rank="mask",
            changes={op.number: lambda f, a, k, out: out * (length / padded)},
        )
    maker = trace.ops.get(op.makers[0]) if op.makers else None
    if (
        padded != length
        and op.name == "sum"
        and maker is not None
        and maker.name == "exp"
        and not op.backward
    ):
        shift = trace.ops.get(maker.makers[0]) if maker.makers else None
        if shift is not None and shift.name == "sub" and isinstance(shift.args[1], torch.Tensor):
            top, spare = shift.args[1], padded - length
            yield Variant(
                text="padded lanes are loaded as 0 and enter the sum of exponentials "
                "(-inf is the neutral value)",
                rank="mask",
                changes={op.number: lambda f, a, k, out: out + spare * torch.exp(-top).reshape(out.shape)},
            )
    yield from _of_spread(op, trace, length, padded)


def _of_spread(op: Op, trace: Trace, length: int, padded: int) -> Iterator[Variant]:
    """Faults of a variance: the sum of squares of a centred value."""
    square = trace.ops.get(op.makers[0]) if op.makers else None
    if square is None or square.name not in ("mul", "pow") or op.backward:
        return
    centred = trace.ops.get(square.makers[0]) if square.makers else None
    if (
        centred is None
        or centred.name != "sub"
        or len(centred.args) < 2
        or not isinstance(centred.args[1], torch.Tensor)
    ):
        return
    mean_of = centred.args[1]
    if mean_of.ndim == 0 or mean_of.shape[-1] != 1:
        return
    values, scale = centred.args[0], (1.0 / length if op.name == "mean" else 1.0)

    def shaped(extra: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return (
            extra.reshape(out.shape) if extra.numel() == out.numel() else extra.mean() * torch.ones_like(out)
        )

    if padded != length:
        yield Variant(
            text="padded lanes count in the variance: (0 - mean)^2 of lanes past the row end, "
            "which are not masked again after the mean is subtracted",
            rank="mask",
            changes={
                op.number: lambda f, a, k, out: (
                    out + shaped((padded - length) * mean_of.square() * scale, out)
                )
            },
        )
    yield Variant(
        text="one-pass variance: E[x^2] - E[x]^2 cancels when |mean| is much larger than the spread",
        rank="stability",
        changes={
            op.number: lambda f, a, k, out: shaped(
                (values.square().sum(-1, keepdim=True) / length - mean_of.square()) * (length * scale), out
            )
        },
        noise=True,
    )
    yield Variant(
        text="the mean is not subtracted before squaring",
        rank="formula",
        changes={op.number: lambda f, a, k, out: shaped(values.square().sum(-1, keepdim=True) * scale, out)},
    )


def _kept(axis: int, start: int, stop: int) -> Change:
    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros_like(args[0])
        kept.narrow(axis, start, stop - start).copy_(args[0].narrow(axis, start, stop - start))
        result: torch.Tensor = func(kept, *args[1:], **kwargs)
        return result

    return change


def _low_sum(axis: int, dtype: torch.dtype, block: int) -> Change:
    """Sequential sum of blocks, each block and the running total rounded to `dtype`."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        exact = func(args[0].to(torch.float64), *args[1:], **kwargs)
        if args[0].shape[axis] > 4096:
            return out
        total = None
        for chunk in args[0].split(block, dim=axis):
            part = chunk.sum(axis, keepdim=True).to(dtype)
            total = (
                part if total is None else ((total + part) if block == 1 else total.float() + part.float())
            )
        assert total is not None
        rounded = total.to(torch.float64)
        low: torch.Tensor = (
            func(rounded, *args[1:], **kwargs)
            if func.name().startswith("aten::sum")
            else rounded / args[0].shape[axis]
        )
        return low.reshape(out.shape).to(out.dtype) if low.numel() == out.numel() else exact.to(out.dtype)

    return change


def of_product(op: Op, where: str) -> Iterator[Variant]:
    """Faults of one matrix product: TF32, low operands, a low accumulator, a lost tail."""
    name = f"{where}the product of {', '.join(sorted(op.sources))}"
    for text, variant in _product_faults(op):
        yield replace(variant, text=text.format(name))


def of_products(trace: Trace) -> list[Variant]:
    """The same fault in every product: a kernel's backward is written by the hand that wrote its forward."""
    ops = [op for op in trace.ops.values() if op.name in ("mm", "bmm")]
    joint: dict[str, Variant] = {}
    for op in ops:
        for text, variant in _product_faults(op):
            key = re.sub(r"of its \d+ terms", "term", text).format("every product")
            known = joint.setdefault(key, replace(variant, text=key, changes={}))
            known.changes.update(variant.changes)
    return [variant for variant in joint.values() if len(variant.changes) > 1]


def _product_faults(op: Op) -> Iterator[tuple[str, Variant]]:
    """Sentences with a place for the product's name, and the variants."""
    if op.args[0].dtype == torch.float32:
        yield (
            "{} runs in TF32 (10-bit significands)",
            Variant(
                text="",
                rank="cast",
                changes={op.number: lambda f, a, k, out: f(_tf32(a[0]), _tf32(a[1]))},
            ),
        )
        yield (
            "operands of {} are rounded to float16",
            Variant(
                text="",
                rank="cast",
                changes={op.number: lambda f, a, k, out: f(a[0].half().float(), a[1].half().float())},
            ),
        )
    depth = op.args[0].shape[-1]

    def low(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(out, dtype=torch.float16)
        for start in range(0, depth, 16):
            part = func(args[0][..., start : start + 16].float(), args[1][..., start : start + 16, :].float())
            total = (total.float() + part).half()
        return total.to(out.dtype)

    yield (
        "{} is accumulated in float16",
        Variant(text="", rank="accumulator", changes={op.number: low}, noise=True),
    )
    if depth > 1:
        yield (
            f"{{}} misses the last of its {depth} terms",
            Variant(
                text="",
                rank="mask",
                changes={op.number: lambda f, a, k, out: f(a[0][..., :-1], a[1][..., :-1, :])},
            ),
        )
    if depth > 16 and depth % 16:
        whole = depth // 16 * 16
        yield (
            "tail block dropped: {} adds only full blocks of 16 terms (floor where ceil is needed)",
            Variant(
                text="",
                rank="mask",
                changes={op.number: lambda f, a, k, out: f(a[0][..., :whole], a[1][..., :whole, :])},
            ),
        )


def _tf32(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
