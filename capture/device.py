"""Digests of tensors on a GPU: each content is one small launch, and nothing waits until the step ends.

A launch runs on the stream of the operator that was just seen, before anything that is launched later can
write the memory or reuse it. So no content is copied or kept alive for it. What a launch leaves behind,
numbers for each chunk, is added up by a second kernel when there are many of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from bridge.capture.digest import BLOCK_BYTES, BYTE_TYPES, KINDS, digest_of
from bridge.capture.digest_host import byte_values
from bridge.capture.digest_numpy import mix_all
from bridge.capture.dtypes import REAL_OF, itemsize
from bridge.capture.record import Digest

#: Chunks of one tensor at most: enough programs to fill a GPU, few enough to add up in one tile.
MOST_CHUNKS = 1024
#: Chunks of one stream that are added up together; 72 bytes of device memory each.
CHUNKS = 1 << 16
_WORDS = 256
_UNROLL = 4
_COLUMNS = 8
_LARGEST = 1.7976931348623157e308


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Run operators of our own: unseen by modes, without autograd."""
    with _disable_current_modes(), torch.no_grad():
        yield


class DeviceDigests:
    """Digests of one step on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_host = device.type == "cpu"
        self._index = device.index or 0
        self._streams: dict[int, _Stream] = {}
        self._walks: dict[str, _Walk] = {}

    def add(self, number: int, tensor: torch.Tensor, place: tuple[Any, ...]) -> None:
        """Launch the digest of a content on the current stream.

        Args:
            number: Of the content.
            tensor: On this device, not empty.
            place: Where it lies (`identity.place_of`).
        """
        dtype: str = place[2]
        walk = self._walks.get(dtype) or self._walk(dtype)
        handle = 0 if self._on_host else torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(handle) or self._stream(handle)
        start = tensor.data_ptr()
        if len(place) > 3 or start % 8:
            # Freed after the launch: what gets its memory next on this stream comes after it.
            compact = compact_copy(tensor, place)
            start = compact.data_ptr()
        nbytes = place[1] * walk.size
        blocks = -(-nbytes // (MOST_CHUNKS * BLOCK_BYTES))
        chunks = -(-nbytes // (blocks * BLOCK_BYTES))
        if stream.used + chunks > CHUNKS:
            self._add_up(stream)
        row = stream.used
        walk.launch(chunks, stream, start, start + nbytes, blocks, row)
        stream.used = row + chunks
        stream.waiting.append((number, place[1] * walk.parts, nbytes, row, chunks))

    def collect(self) -> list[tuple[int, Digest]]:
        """Wait for the device and hand out all digests by content number."""
        for stream in self._streams.values():
            self._add_up(stream)
        if not self._on_host:
            # The walks may have run on several streams, the copies run on one.
            torch.cuda.synchronize(self.device)
        found: list[tuple[int, Digest]] = []
        for stream in self._streams.values():
            for rows, values, hashes in stream.results:
                with aside():
                    table, sums = values.cpu().numpy(), hashes.cpu().numpy().view(np.uint64)
                found += _digests(rows, table, sums)
            stream.results = []
        return found

    def warm_up(self, dtypes: set[str]) -> None:
        """Compile for these element types now rather than within the step."""
        with aside():
            sample = torch.zeros(64, dtype=torch.uint8, device=self.device)
        for dtype in sorted(dtypes):
            for _ in range(2):  # the first compiles, the second takes the short way
                self.add(0, sample, (0, 64 // (itemsize(dtype) or 1), dtype))
        self.collect()

    def _add_up(self, stream: _Stream) -> None:
        """Launch what makes one row of each content's chunks; the chunks' memory is free behind it."""
        from bridge.capture.digest_cuda import add_chunks

        rows, stream.waiting, stream.used = stream.waiting, [], 0
        if not rows:
            return
        table = np.array([[row[3] for row in rows], [row[4] for row in rows]], dtype=np.int64)
        with aside(), self._on_stream(stream.handle):
            host = torch.from_numpy(table)
            # The copy runs later; torch's host allocator keeps pinned memory until it has.
            sent = host if self._on_host else host.pin_memory().to(self.device, non_blocking=True)
            values = torch.empty((len(rows), _COLUMNS), dtype=torch.float64, device=self.device)
            hashes = torch.empty(len(rows), dtype=torch.int64, device=self.device)
            add_chunks[(len(rows),)](
                sent, stream.stats, stream.hashes, values, hashes, len(rows), MOST=MOST_CHUNKS
            )
        stream.results.append((rows, values, hashes))

    def _walk(self, dtype: str) -> _Walk:
        with aside():
            walk = self._walks[dtype] = _Walk(dtype, self.device)
        return walk

    def _stream(self, handle: int) -> _Stream:
        with aside():
            stream = self._streams[handle] = _Stream(handle, self.device)
        return stream

    def _on_stream(self, handle: int) -> Any:
        if self._on_host:
            return contextlib.nullcontext()
        # ExternalStream takes 0 for "any": the default stream has that handle.
        make: Any = torch.cuda.ExternalStream
        stream = make(handle, device=self.device) if handle else torch.cuda.default_stream(self.device)
        return torch.cuda.stream(stream)


class _Stream:
    """What the launches on one stream leave behind."""

    __slots__ = ("handle", "hashes", "results", "stats", "used", "waiting")

    def __init__(self, handle: int, device: torch.device) -> None:
        self.handle = handle
        self.stats = torch.empty((CHUNKS, _COLUMNS), dtype=torch.float64, device=device)
        self.hashes = torch.empty(CHUNKS, dtype=torch.int64, device=device)
        self.used = 0
        #: number of the content, elements, bytes, row of its first chunk, chunks
        self.waiting: list[tuple[int, int, int, int, int]] = []
        self.results: list[tuple[list[tuple[int, int, int, int, int]], torch.Tensor, torch.Tensor]] = []


class _Walk:
    """The walk for one element type."""

    __slots__ = ("_compiled", "_constants", "_values", "parts", "size")

    _compiled: tuple[Any, Any, Any] | None  #: how to launch it, the loaded function, facts for the launcher

    def __init__(self, dtype: str, device: torch.device) -> None:
        real = REAL_OF.get(dtype)
        element = real or dtype
        byte = element in BYTE_TYPES
        values = byte_values(element if byte else "uint8").astype(np.float32)
        self.size = itemsize(dtype) or 0
        self.parts = 2 if real else 1  #: numbers that an element consists of
        self._values = torch.from_numpy(values).to(device)
        kind = KINDS.index("byte" if byte else element)
        self._constants = (kind, 8 // (itemsize(element) or 8), _WORDS, _UNROLL)
        self._compiled = None

    def launch(self, chunks: int, stream: _Stream, start: int, end: int, blocks: int, row: int) -> None:
        """Walk the bytes from address `start` to `end` in chunks of so many blocks."""
        numbers = (self._values, stream.stats, stream.hashes, start, end, blocks, row, *self._constants)
        if self._compiled is not None:
            # As Triton does after it has bound the arguments and looked for hooks, which takes far longer.
            run, function, facts = self._compiled
            run(chunks, 1, 1, stream.handle, function, facts, None, None, None, *numbers)
            return
        from bridge.capture.digest_cuda import digest_chunks

        compiled = digest_chunks[(chunks,)](*numbers)
        if hasattr(compiled, "function"):  # Triton's interpreter hands nothing out
            self._compiled = compiled.run, compiled.function, compiled.packed_metadata


def _digests(rows: list[tuple[int, int, int, int, int]], table: Any, sums: Any) -> list[tuple[int, Digest]]:
    nbytes = np.fromiter((row[2] for row in rows), dtype=np.uint64, count=len(rows))
    names = mix_all(sums + mix_all(nbytes)).tolist()
    # Sums of float64 values may overflow, and JSON has no infinity.
    table[:, :3] = np.nan_to_num(table[:, :3], posinf=_LARGEST, neginf=-_LARGEST)
    found = []
    for row, line, name in zip(rows, table.tolist(), names, strict=True):
        number, elements = row[:2]
        found.append((number, digest_of(elements, line, name)))
    return found


def compact_copy(tensor: torch.Tensor, place: tuple[Any, ...]) -> torch.Tensor:
    """The distinct elements of a tensor in memory order, copied, on its device."""
    with aside():
        if len(place) > 3:
            _, _, _, sizes, strides = place
            shown = tensor.detach().as_strided(sizes, strides, tensor.storage_offset())
        else:
            shown = tensor.detach().as_strided((place[1],), (1,), tensor.storage_offset())
        return shown.clone(memory_format=torch.contiguous_format)
