"""What every Triton kernel here needs around it: registration, launching, casts, tile sizes.

Imported by the `kernel.py` files only, because it imports triton. `TRITON_INTERPRET` is read once, when
triton decorates a kernel; `INTERPRETED` is that decision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime.interpreter import InterpretedFunction

#: Columns a one-row tile may hold; the widest row a norm or softmax kernel accepts.
MAX_COLUMNS = 65536


@triton.jit
def _probe(x_ptr):
    tl.store(x_ptr, 0.0)


INTERPRETED = isinstance(_probe, InterpretedFunction)
_EMULATE = tl.constexpr(INTERPRETED)


def device_function(function: Callable[..., Any]) -> Any:
    """Decorate a function that kernels call.

    Compiled, it must be jitted. Interpreted, a jitted one makes the interpreter patch triton.language anew at
    every call (8 ms), and a plain one does the same work for nothing.
    """
    return function if INTERPRETED else triton.jit(function)


@device_function
def widen(value):
    """16-bit or fp32 block to fp32, exactly.

    The interpreter keeps bfloat16 as raw words and flushes its subnormals, so there the bits are moved.
    """
    if _EMULATE and value.dtype == tl.bfloat16:
        bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@device_function
def narrow(value, dtype: tl.constexpr):
    """fp32 block to `dtype`, rounded to nearest even.

    The interpreter cuts bfloat16 off instead of rounding, so there the rounding is done on the bits.
    """
    if _EMULATE and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # NaN would carry into the sign; it gets the quiet pattern instead.
        rounded = tl.where(value != value, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


class _EagerLaunch:
    """An interpreted kernel: run on real tensors, skipped where only shapes are being worked out."""

    def __init__(self, kernel: InterpretedFunction) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            if any(
                isinstance(arg, FakeTensor) or (isinstance(arg, torch.Tensor) and arg.is_meta) for arg in args
            ):
                return
            self._kernel[grid](*args, **kwargs)

        return run


def wrap_triton(kernel: Any) -> Any:
    """`torch.library.wrap_triton`, also where the kernel is interpreted.

    Torch up to 2.11 rejects interpreted kernels. The name is torch's own because torch finds the kernels
    of an op by looking for calls of that name in its source.
    """
    if isinstance(kernel, InterpretedFunction):
        return _EagerLaunch(kernel)
    return torch.library.wrap_triton(kernel)


def kernel_op(name: str, *, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that launches Triton kernels as the dispatcher op `name`.

    Compiled kernels become a `triton_op`, which torch.compile sees through. Interpreted ones cannot be
    traced, so they become an opaque `custom_op` with the same fake implementation.

    The first argument of `function` is a tensor; its device is made current, since Triton launches there.
    """

    def register(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def on_device(*args: Any, **kwargs: Any) -> Any:
            first = args[0]
            here = isinstance(first, FakeTensor) or not first.is_cuda
            if here or first.device.index == torch.cuda.current_device():
                return function(*args, **kwargs)
            with torch.cuda.device(first.device):
                return function(*args, **kwargs)

        if not INTERPRETED:
            return torch.library.triton_op(name, on_device, mutates_args=mutates_args)
        op = torch.library.custom_op(name, function, mutates_args=mutates_args)
        op.register_fake(function)
        return op

    return register


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """View `x` as [rows, columns] with unit column stride; copied only when no such view exists."""
    columns = x.shape[-1]
    rows = x.reshape(x.numel() // max(columns, 1), columns)
    return rows if rows.stride(-1) == 1 and rows.stride(0) >= columns else rows.contiguous()


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """View `x` as [rows, columns] with any strides, 0 included; copied only when no such view exists."""
    columns = x.shape[-1]
    return x.reshape(x.numel() // max(columns, 1), columns)


def column_block(columns: int) -> int:
    """Columns of a tile that holds whole rows: the next power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(columns)))


def rows_per_tile(block: int, *, elements: int = 2048) -> int:
    """Rows of a tile so that short rows share a program: at most `elements` elements, at most 64 rows."""
    return max(1, min(64, elements // block))


def warps_for(elements: int) -> int:
    """Warps for a tile of `elements`: 8 to 64 elements a thread."""
    if elements <= 2048:
        return 4
    if elements <= 8192:
        return 8
    return 16 if elements <= 16384 else 32


def row_grid(rows: int, columns: int) -> tuple[tuple[int], int, int, int]:
    """Grid, tile rows, tile columns and warps for a pass in which a tile holds whole rows."""
    block = column_block(columns)
    tile = rows_per_tile(block)
    return (triton.cdiv(rows, tile),), tile, block, warps_for(tile * block)


def matrix_grid(rows: int, columns: int) -> tuple[tuple[int, int], int, int, int]:
    """Grid, tile rows, tile columns and warps for an elementwise pass over a matrix.

    Tiles of 2048 elements, as wide as the matrix up to 1024 columns.
    """
    block = min(1024, column_block(columns))
    tile = 2048 // block
    return (int(triton.cdiv(rows, tile)), int(triton.cdiv(columns, block))), tile, block, 4
