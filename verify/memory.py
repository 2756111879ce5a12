"""Allocations of the target under watch: NaN in memory it never wrote, guard bands around every buffer.

A kernel that reads memory before writing it gets NaN instead of the zeros that a fresh process
happens to hand out; one that writes past a buffer lands in a band that is compared afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack

#: Elements before and after each buffer. A whole tile must land inside, so the band is at least this long.
_BAND = 1024
#: Bands of a buffer with more elements than this are a small part of it: memory is what is scarce then.
_LARGE = 1 << 20
_PART = 64

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty_strided.default,
}


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands out floating buffers filled with NaN and fenced by bands; `overruns()` reads the bands back."""

    def __init__(self, *, fill: float = float("nan")) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fill = fill
        self._bands: list[tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY and isinstance(out, torch.Tensor) and out.dtype.is_floating_point and out.numel():
            if out.is_meta or out.layout != torch.strided:
                return out
            place = out.shape, out.stride(), out.dtype, out.device
            del out  # before a buffer of its size is made
            return self._fenced(*place)
        return out

    def _fenced(
        self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        # A multiple of the longest vector load, so that alignment is what a fresh buffer would have.
        band = max(_BAND, -(-(span // _PART if span > _LARGE else span) // 64) * 64)
        buffer = torch.full((span + 2 * band,), self._fill, dtype=dtype, device=device)
        self._bands.append((buffer[:band], buffer[band + span :], tuple(shape)))
        return _own_storage(buffer[band:]).as_strided(shape, strides, 0)

    def overruns(self) -> list[str]:
        """Buffers whose bands were written, in words."""
        found = []
        for before, after, shape in self._bands:
            for side, band in (("before", before), ("past the end of", after)):
                hit = ~torch.isnan(band) if self._fill != self._fill else band != self._fill
                if bool(hit.any()):
                    found.append(f"wrote {int(hit.sum())} elements {side} a buffer of shape {shape}")
        return found


def _own_storage(part: torch.Tensor) -> torch.Tensor:
    """The same memory under a storage that begins with it, as a fresh tensor's does.

    Autograd takes that for granted where it makes the gradient of a view that was written in place. DLPack
    knows no 8-bit floats, so bytes are handed over; the new storage keeps the memory alive.
    """
    bytes_of = torch.to_dlpack(part.view(torch.uint8))  # type: ignore[attr-defined]
    return from_dlpack(bytes_of).view(part.dtype)
