"""Second stage of a parameter gradient: fp32 partial sums of row blocks, added up in a fixed order.

Imported by `kernel.py` files only, because it imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bridge.kernels._launch import INTERPRETED, column_block, narrow, rows_per_tile, wrap_triton

#: Row blocks at 4096 columns: as many as 132 SMs run at once, so that there is no half-empty second wave.
_ROW_BLOCKS = 256
_LEAST_ROW_BLOCKS = 128
_ROWS = 32
_COLUMNS = 64


@triton.jit
def fold_kernel(
    partial_ptr, total_ptr, blocks, columns,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum `[blocks, columns]` over the blocks, one program per group of columns."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_columns = column < columns
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for step in range(TILES):
        row = step * ROWS + tl.arange(0, ROWS)
        inside = (row < blocks)[:, None] & in_columns[None, :]
        at = partial_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(at, mask=inside, other=0.0)
    result = tl.sum(total, axis=0)
    tl.store(total_ptr + column, narrow(result, total_ptr.dtype.element_ty), mask=in_columns)


def fold(partial: torch.Tensor, total: torch.Tensor) -> None:
    """Write the column sums of `partial` `[blocks, columns]` fp32 to `total` `[columns]`, both contiguous."""
    blocks, columns = partial.shape
    # The interpreter pays about 50 ms a program here and nothing for a wide one.
    width = min(column_block(columns), 8192) if INTERPRETED else _COLUMNS
    wrap_triton(fold_kernel)[(triton.cdiv(columns, width),)](
        partial, total, blocks, columns,
        TILES=triton.cdiv(blocks, _ROWS), ROWS=_ROWS, BLOCK=width, num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the first stage shares out the rows."""

    blocks: int  #: programs, each with a row of partial sums
    tile: int  #: rows of a tile
    tiles: int  #: tiles that a program walks
    block: int  #: columns of a tile
    stages: int  #: tiles under way at once
    warps: int


def split_rows(rows: int, columns: int, element_bytes: int) -> Split:
    """Share `rows` of `columns` out, of whose elements each loads `element_bytes` from all inputs together.

    Depends on the shape alone, so that results repeat from GPU to GPU.
    """
    block = column_block(columns)
    tile = rows_per_tile(block)
    tiles = _tiles(rows, tile, block)
    return Split(
        blocks=triton.cdiv(rows, tile * tiles),
        tile=tile,
        tiles=tiles,
        block=block,
        stages=_stages(tile * block * element_bytes),
        warps=_warps(tile * block),
    )


def _tiles(rows: int, tile: int, block: int) -> int:
    """Tiles of `tile` rows that each first-stage program walks.

    A power of two or a multiple of 16, so that few variants are compiled; wide rows get fewer blocks, so that
    the partial sums stay small beside the input.
    """
    wanted = max(_LEAST_ROW_BLOCKS, min(_ROW_BLOCKS, _ROW_BLOCKS * 4096 // block))
    tiles = int(triton.cdiv(triton.cdiv(rows, tile), wanted))
    return int(triton.next_power_of_2(tiles)) if tiles <= 16 else 16 * int(triton.cdiv(tiles, 16))


def _stages(step_bytes: int) -> int:
    """Stages of a first-stage loop whose step loads `step_bytes`: as many as shared memory has room for."""
    return 3 if step_bytes <= 16384 else 2 if step_bytes <= 32768 else 1


def _warps(elements: int) -> int:
    """Warps of a first-stage program with `elements` in a tile: 16 a thread, as four such blocks are live."""
    return max(4, min(32, int(triton.next_power_of_2(elements)) // 512))
