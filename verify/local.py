"""The stated gate once more on every row, column and tile, so that a small one cannot hide.

A line's own reference error can be lucky, so the allowance is the larger of the line's threshold and
its worst element's noise budget; a line whose reference is itself off by more than the validity limit
is left to the budget alone.
"""

from __future__ import annotations

from collections.abc import Iterable

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

    ratio = line_ratio(
        (
            worst(round_to(data.golden, data.dtype) - data.golden),
            worst(data.reference - data.golden),
            worst(data.budget()),
            worst(data.target - data.golden),
        ),
        constants,
    )
    line = int(ratio.argmax())
    return line_companion(float(ratio[line]), line, int((ratio > 1).sum()), ratio.numel(), word)


def line_ratio(largest: Iterable[torch.Tensor], constants: Constants) -> torch.Tensor:
    """Error over what is allowed.

    Args:
        largest: rounding of golden, reference error, budget and target error, the largest of each part.
    """
    floor, own, budget, error = largest
    threshold = constants.fudge_factor * own + floor.clamp_min(constants.project_atol)
    return error / torch.maximum(threshold, budget).clamp_min(torch.finfo(torch.float64).tiny)


def line_companion(value: float, line: int, over: int, total: int, word: str) -> Companion:
    """The row or column gate from its worst line."""
    return Companion(
        value=value,
        limit=1.0,
        passed=value <= 1.0,
        detail=f"{over} of {total} {word}s over, worst {word} {line}" if over else f"worst {word} {line}",
    )


def tile_gate(data: Compared, constants: Constants, tiles: tuple[int, ...]) -> dict[str, Companion]:
    """The gate on every block of the extents seen in the kernel's launches; {} where there is one block only.

    Noise is pooled within a row's part of the tile and not over the row: a quiet tile beside loud ones is
    held to its own size.

    Args:
        tiles: integer constexprs of the launches; the largest that cuts an axis counts for it.
    """
    rows, cols = as_matrix(data.golden).shape
    cell = cell_of(rows, cols, tiles)
    if cell is None:
        return {}
    high, wide = cell

    def worst(values: torch.Tensor) -> torch.Tensor:
        matrix = torch.where(as_matrix(data.keep), as_matrix(values).abs(), 0.0)
        return block_max(matrix, high, wide)

    ratio = line_ratio(
        (
            worst(round_to(data.golden, data.dtype) - data.golden),
            worst(data.reference - data.golden),
            worst(data.budget(wide)),
            worst(data.target - data.golden),
        ),
        constants,
    )
    return {"tile gate": tile_companion(ratio, cell)}


def cell_of(rows: int, cols: int, tiles: tuple[int, ...]) -> tuple[int, int] | None:
    """Height and width of the tiles that a [rows, cols] result is cut into; None where it is not cut."""
    high = max((t for t in tiles if t < rows), default=rows)
    wide = max((t for t in tiles if t < cols), default=cols)
    return None if (high, wide) == (rows, cols) or not rows * cols else (high, wide)


def tile_companion(ratio: torch.Tensor, cell: tuple[int, int]) -> Companion:
    """The tile gate from error over allowance of every tile."""
    high, wide = cell
    at = int(ratio.argmax())
    value, over = float(ratio.reshape(-1)[at]), int((ratio > 1).sum())
    place = f"worst tile ({at // ratio.shape[1]}, {at % ratio.shape[1]}) of {high} x {wide}"
    return Companion(
        value=value,
        limit=1.0,
        passed=value <= 1.0,
        detail=f"{over} of {ratio.numel()} tiles over, {place}" if over else place,
    )


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
    row_step, col_step = map_steps(rows, cols)
    # One pass on the device: padded to whole blocks, with -1 where there is nothing to see.
    known = torch.nan_to_num(matrix, nan=-1.0, posinf=float("inf"))
    high, wide = -(-rows // row_step), -(-cols // col_step)
    padded = torch.nn.functional.pad(
        known, (0, wide * col_step - cols, 0, high * row_step - rows), value=-1.0
    )
    return map_of(padded.reshape(high, row_step, wide, col_step).amax((1, 3)), rows, cols, threshold)


def map_steps(rows: int, cols: int) -> tuple[int, int]:
    """Height and width of the blocks of an error map."""
    return -(-rows // _BLOCKS), -(-cols // _BLOCKS)


def map_of(worst: torch.Tensor, rows: int, cols: int, threshold: float) -> ErrorMap:
    """The map from the largest error of each block, -1 where nothing is known."""
    row_step, col_step = map_steps(rows, cols)
    scale = threshold if threshold > 0 else 1.0
    values = tuple(tuple(_number(v / scale) if v >= 0 else None for v in line) for line in worst.tolist())
    return ErrorMap(rows=rows, cols=cols, row_step=row_step, col_step=col_step, values=values)


def worst_elements(data: Compared, *, count: int = 8) -> tuple[WorstElement, ...]:
    """The elements furthest from golden; a non-finite one where golden is finite comes first."""
    return tuple(element for _, element in ranked_elements(data, count=count))


def ranked_elements(data: Compared, *, count: int = 8) -> list[tuple[float, WorstElement]]:
    """The same with what they are ranked by."""
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
            (
                float(flat[place]),
                WorstElement(
                    index=index,
                    golden=_number(float(data.golden[index])),
                    reference=_number(float(data.reference[index])),
                    target=_number(float(data.target[index])),
                    error=_number(error),
                    ulp=_number(error / float(unit[place])),
                ),
            )
        )
    return found


def _number(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
