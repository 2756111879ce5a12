"""The stated gate once more on every row, column and tile, so that a small one cannot hide.

A line's own reference error can be lucky, so the allowance is the larger of the line's threshold and
its worst element's noise budget; a line whose reference is itself off by more than the validity limit
is left to the budget alone.
"""

from __future__ import annotations

import torch

from bridge.verify.companions import Compared
from bridge.verify.ulp import round_to, ulp_of
from bridge.verify.verdict import Companion, Constants, ErrorMap, WorstElement

_BLOCKS = 48


def as_matrix(values: torch.Tensor) -> torch.Tensor:
    """[rows, cols] view of any tensor: the last axis is the columns."""
    if values.ndim == 0:
        return values.reshape(1, 1)
    return values.reshape(-1, values.shape[-1])


def line_gates(data: Compared, constants: Constants) -> dict[str, Companion]:
    """Row and column gates of one tensor."""
    matrix = as_matrix(data.golden)
    found = {}
    if matrix.shape[0] > 1:
        found["row gate"] = _lines(data, constants, dim=1, word="row")
    if matrix.shape[0] > 1 and matrix.shape[1] > 1:
        found["column gate"] = _lines(data, constants, dim=0, word="column")
    return found


def _lines(data: Compared, constants: Constants, *, dim: int, word: str) -> Companion:
    keep = as_matrix(data.keep)
    golden = torch.where(
        keep, as_matrix(data.golden), torch.zeros((), dtype=torch.float64, device=keep.device)
    )

    def worst(values: torch.Tensor) -> torch.Tensor:
        return torch.where(keep, as_matrix(values).abs(), torch.zeros_like(golden)).amax(dim)

    floor = worst(round_to(data.golden, data.dtype) - data.golden).clamp_min(constants.project_atol)
    threshold = constants.fudge_factor * worst(data.reference - data.golden) + floor
    allowed = torch.maximum(threshold, worst(data.budget()))
    ratio = worst(data.target - data.golden) / allowed.clamp_min(torch.finfo(torch.float64).tiny)
    line = int(ratio.argmax())
    value = float(ratio[line])
    over = int((ratio > 1).sum())
    return Companion(
        value=value,
        limit=1.0,
        passed=value <= 1.0,
        detail=f"{over} of {ratio.numel()} {word}s over, worst {word} {line}"
        if over
        else f"worst {word} {line}",
    )


def tile_gate(data: Compared, constants: Constants, tiles: tuple[int, ...]) -> dict[str, Companion]:
    """The gate on every block of the extents seen in the kernel's launches; {} where there is one block only.

    Noise is pooled within a row's part of the tile and not over the row: a quiet tile beside loud ones is
    held to its own size.

    Args:
        tiles: integer constexprs of the launches; the largest that cuts an axis counts for it.
    """
    rows, cols = as_matrix(data.golden).shape
    high = max((t for t in tiles if t < rows), default=rows)
    wide = max((t for t in tiles if t < cols), default=cols)
    if (high, wide) == (rows, cols) or not data.golden.numel():
        return {}

    def worst(values: torch.Tensor) -> torch.Tensor:
        matrix = torch.where(as_matrix(data.keep), as_matrix(values).abs(), 0.0)
        return block_max(matrix, high, wide)

    floor = worst(round_to(data.golden, data.dtype) - data.golden).clamp_min(constants.project_atol)
    threshold = constants.fudge_factor * worst(data.reference - data.golden) + floor
    allowed = torch.maximum(threshold, worst(data.budget(wide)))
    ratio = worst(data.target - data.golden) / allowed.clamp_min(torch.finfo(torch.float64).tiny)
    at = int(ratio.argmax())
    value, over = float(ratio.reshape(-1)[at]), int((ratio > 1).sum())
    place = f"worst tile ({at // ratio.shape[1]}, {at % ratio.shape[1]}) of {high} x {wide}"
    return {
        "tile gate": Companion(
            value=value,
            limit=1.0,
            passed=value <= 1.0,
            detail=f"{over} of {ratio.numel()} tiles over, {place}" if over else place,
        )
    }


def block_max(matrix: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """Largest value of each `high` x `wide` block of a non-negative matrix."""
    rows, cols = matrix.shape
    down, across = -(-rows // high), -(-cols // wide)
    padded = torch.nn.functional.pad(matrix, (0, across * wide - cols, 0, down * high - rows))
    return padded.reshape(down, high, across, wide).amax((1, 3))


def error_map(data: Compared, threshold: float) -> ErrorMap:
    """|target - golden| over `threshold`, the largest per block of at most 48 x 48 blocks."""
    errors = torch.where(
        data.keep, (data.target - data.golden).abs(), torch.full_like(data.golden, float("nan"))
    )
    matrix = as_matrix(errors)
    rows, cols = matrix.shape
    row_step, col_step = -(-rows // _BLOCKS), -(-cols // _BLOCKS)
    scale = threshold if threshold > 0 else 1.0
    # One pass on the device: padded to whole blocks, with -1 where there is nothing to see.
    known = torch.nan_to_num(matrix, nan=-1.0, posinf=float("inf"))
    high, wide = -(-rows // row_step), -(-cols // col_step)
    padded = torch.nn.functional.pad(
        known, (0, wide * col_step - cols, 0, high * row_step - rows), value=-1.0
    )
    worst = padded.reshape(high, row_step, wide, col_step).amax((1, 3)).tolist()
    values = tuple(tuple(_number(v / scale) if v >= 0 else None for v in line) for line in worst)
    return ErrorMap(rows=rows, cols=cols, row_step=row_step, col_step=col_step, values=values)


def worst_elements(data: Compared, *, count: int = 8) -> tuple[WorstElement, ...]:
    """The elements furthest from golden; a non-finite one where golden is finite comes first."""
    errors = (data.target - data.golden).abs()
    errors = torch.where(
        torch.isnan(errors) & torch.isfinite(data.golden), torch.full_like(errors, float("inf")), errors
    )
    errors = torch.nan_to_num(errors, nan=-1.0, posinf=torch.finfo(torch.float64).max)
    flat = errors.reshape(-1)
    unit = ulp_of(data.golden, data.dtype).reshape(-1)
    found = []
    for place in flat.topk(min(count, flat.numel())).indices.tolist():
        index = (
            tuple(int(i) for i in torch.unravel_index(torch.tensor(place), errors.shape))
            if errors.ndim
            else ()
        )
        error = abs(float(data.target[index]) - float(data.golden[index]))
        found.append(
            WorstElement(
                index=index,
                golden=_number(float(data.golden[index])),
                reference=_number(float(data.reference[index])),
                target=_number(float(data.target[index])),
                error=_number(error),
                ulp=_number(error / float(unit[place])),
            )
        )
    return tuple(found)


def _number(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
