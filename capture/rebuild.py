"""Make tensors of blobs again, with strides, offset, expansion and shared memory as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bridge.capture.dtypes import itemsize
from bridge.capture.layout import contiguous_stride, layout_of
from bridge.capture.record import TensorRecord
from bridge.errors import CaptureError, CorruptCaptureError

#: A slice of a huge storage is rebuilt inside memory of its span; more than this is not believed.
_MAX_SPARSENESS = 1 << 16
_SMALL = 1 << 28
_ALIGN = 256


def rebuild(records: Sequence[TensorRecord], read: Callable[[TensorRecord], bytes]) -> list[torch.Tensor]:
    """Tensors on the CPU for records that all have blobs.

    Records of one storage and epoch come back as views of one buffer. Their storage offsets are the recorded
    ones, except that a far one (a parameter inside a flat buffer of gigabytes) is made small; its remainder
    modulo 256 elements, which is what kernels look at, stays.

    Raises:
        CaptureError: as `read` does, or a stride that would need an absurd amount of memory.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, record in enumerate(records):
        # Each type gets its own buffer: a storage seen as two types is rare, and its parts then do not alias.
        place = (record.storage, record.epoch, record.dtype) if record.storage >= 0 else (index,)
        groups.setdefault(place, []).append(index)
    tensors: list[torch.Tensor] = [torch.empty(0)] * len(records)
    for members in groups.values():
        _fill_group([records[i] for i in members], members, tensors, read)
    return tensors


def _fill_group(
    group: list[TensorRecord],
    members: list[int],
    tensors: list[torch.Tensor],
    read: Callable[[TensorRecord], bytes],
) -> None:
    dtype = _dtype(group[0])
    spans = [layout_of(record.shape, _stride(record)) for record in group]
    start = min(record.offset for record in group)
    end = max(record.offset + span.span for record, span in zip(group, spans, strict=True))
    stored = {(record.blob, record.offset, span): None for record, span in zip(group, spans, strict=True)}
    elements = sum(span.count for _, _, span in stored)
    lead = start if start <= max(elements, 1024) else start % _ALIGN
    room = lead + end - start
    if room > _SMALL and room > _MAX_SPARSENESS * max(elements, 1):
        raise CaptureError(
            f"tensor {group[0].name!r} would need {room} elements of memory for {elements} stored ones"
        )
    buffer = torch.empty(0, dtype=dtype)
    filled: set[tuple[object, ...]] = set()
    for record, span, index in zip(group, spans, members, strict=True):
        place = (record.blob, record.offset, span)
        at = record.offset - start + lead
        if place not in filled:
            filled.add(place)
            data = _typed(read(record), dtype)
            if not buffer.numel() and span.dense and room == span.count and not at:
                buffer = data
            else:
                if not buffer.numel():
                    buffer = torch.zeros(room * dtype.itemsize, dtype=torch.uint8).view(dtype)
                buffer.as_strided(span.sizes, span.strides, at).copy_(data.view(span.sizes))
        tensors[index] = buffer.as_strided(record.shape, _stride(record), at if span.count else 0)


def _typed(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def _dtype(record: TensorRecord) -> torch.dtype:
    found = getattr(torch, record.dtype, None) if itemsize(record.dtype) else None
    if not isinstance(found, torch.dtype):
        raise CorruptCaptureError(
            f"tensor {record.name!r} is of type {record.dtype[:40]!r}, which torch does not have here"
        )
    return found


def _stride(record: TensorRecord) -> tuple[int, ...]:
    if record.stride or not record.shape:
        return record.stride
    return contiguous_stride(record.shape)
