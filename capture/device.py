"""Digests of tensors on a GPU, in batches: nothing waits for the device until the step ends.

A launch costs tens of microseconds of Python, more than many an operator, so contents are collected and
digested many at a time. Until then their storages are kept alive; `flush` must run before any of
them is written, and on the stream on which they were made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from bridge.capture.digest import BLOCK_BYTES, BYTE_TYPES, KINDS, MASK, Sums, finish
from bridge.capture.digest_host import byte_values, view
from bridge.capture.dtypes import REAL_OF, itemsize
from bridge.capture.record import Digest

#: Chunks of one tensor at most: enough programs to fill a GPU, few enough to add up in one tile.
MOST_CHUNKS = 1024
#: A batch is launched when it holds this many contents or bytes.
BATCH_CONTENTS = 128
BATCH_BYTES = 1 << 30
_ROWS = 16384
_WORDS = 256
_UNROLL = 4
_COLUMNS = 8


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Run operators of our own: unseen by modes, without autograd."""
    with _disable_current_modes(), torch.no_grad():
        yield


class DeviceDigests:
    """Digests of one step on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._batch: list[tuple[int, int, str, Any]] = []  #: address, bytes, type, what keeps the memory
        self._rows: list[
            tuple[int, int, int]
        ] = []  #: number of the content, elements, bytes; one per result row
        self._stream = -1
        self._bytes = 0
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tables: dict[str, torch.Tensor] = {}
        self._keep: list[torch.Tensor] = []

    def add(self, number: int, tensor: torch.Tensor, place: tuple[Any, ...]) -> bool:
        """Take a content into the batch; True while its memory must not be written.

        Args:
            number: Of the content.
            tensor: On this device, not empty.
            place: Where it lies (`identity.place_of`).
        """
        dtype: str = place[2]
        size = itemsize(dtype) or 0
        nbytes = place[1] * size
        stream = self._current_stream()
        if self._batch and stream != self._stream:
            self.flush()
        self._stream = stream
        address, keeper = tensor.data_ptr(), tensor.untyped_storage()
        if len(place) > 3 or address % 8:
            compact = compact_copy(tensor, place)
            address, keeper = compact.data_ptr(), compact.untyped_storage()
        real = REAL_OF.get(dtype)
        self._rows.append((number, place[1] * (2 if real else 1), nbytes))
        self._batch.append((address, nbytes, real or dtype, keeper))
        self._bytes += nbytes
        if len(self._batch) >= BATCH_CONTENTS or self._bytes >= BATCH_BYTES:
            self.flush()
            return False
        return True

    def flush(self) -> None:
        """Launch the batch on the stream that its contents were made on."""
        batch, self._batch, self._bytes = self._batch, [], 0
        if not batch:
            return
        with aside(), self._on_stream():
            self._launch(batch, first_row=len(self._rows) - len(batch))

    def collect(self) -> list[tuple[int, Digest]]:
        """Wait for the device and hand out all digests by content number."""
        self.flush()
        rows, self._rows = self._rows, []
        with aside():
            parts = [(values.cpu().numpy(), hashes.cpu().numpy()) for values, hashes in self._results]
        self._results, self._keep = [], []
        found = []
        for index, (number, count, nbytes) in enumerate(rows):
            values, hashes = parts[index // _ROWS]
            line = values[index % _ROWS].tolist()
            nan, pos, neg = int(line[5]), int(line[6]), int(line[7])
            sums = Sums(
                sum=line[0],
                abs_sum=line[1],
                sq_sum=line[2],
                min=line[3],
                max=line[4],
                nan=nan,
                pos_inf=pos,
                neg_inf=neg,
                finite=count - nan - pos - neg,
                hash=int(hashes[index % _ROWS]) & MASK,
            )
            found.append((number, finish(sums, count=count, nbytes=nbytes)))
        return found

    def warm_up(self, dtypes: set[str]) -> None:
        """Compile for these element types now rather than within the step."""
        for dtype in sorted(dtypes):
            with aside():
                sample = torch.zeros(64, dtype=torch.uint8, device=self.device)
            self._rows.append((0, 64 // (itemsize(dtype) or 1), 64))
            self._batch.append((sample.data_ptr(), 64, REAL_OF.get(dtype, dtype), sample))
            self._stream = self._current_stream()
            self.flush()
        self.collect()

    def _launch(self, batch: list[tuple[int, int, str, Any]], *, first_row: int) -> None:
        from bridge.capture.digest_cuda import add_chunks, digest_chunks

        kinds: dict[str, list[int]] = {}
        for index, (_, _, dtype, _) in enumerate(batch):
            kinds.setdefault("byte:" + dtype if dtype in BYTE_TYPES else dtype, []).append(index)
        # One table goes over: chunks sorted by type, then what adds them up again.
        addresses: list[int] = []
        lengths: list[int] = []
        blocks: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        rows: list[int] = []
        groups: list[tuple[str, int, int]] = []
        for kind, members in kinds.items():
            begin = len(addresses)
            for index in members:
                address, nbytes, _, _ = batch[index]
                per_chunk = -(-nbytes // (MOST_CHUNKS * BLOCK_BYTES)) * BLOCK_BYTES
                starts.append(len(addresses))
                for offset in range(0, nbytes, per_chunk):
                    addresses.append(address + offset)
                    lengths.append(min(per_chunk, nbytes - offset))
                    blocks.append(offset // BLOCK_BYTES)
                counts.append(len(addresses) - starts[-1])
                rows.append(first_row + index)
            groups.append((kind, begin, len(addresses) - begin))
        chunks, tensors = len(addresses), len(starts)
        table = self._send([*addresses, *lengths, *blocks, *starts, *counts, *rows])
        address_t, length_t, block_t = (table[i * chunks : (i + 1) * chunks] for i in range(3))
        start_t, count_t, row_t = (
            table[3 * chunks + i * tensors : 3 * chunks + (i + 1) * tensors] for i in range(3)
        )
        stats = torch.empty((chunks, _COLUMNS), dtype=torch.float64, device=self.device)
        hashes = torch.empty(chunks, dtype=torch.int64, device=self.device)
        for kind, begin, count in groups:
            dtype = kind.removeprefix("byte:")
            code = KINDS.index("byte" if kind.startswith("byte:") else kind)
            digest_chunks[(count,)](
                address_t[begin:],
                length_t[begin:],
                block_t[begin:],
                self._byte_table(dtype if kind.startswith("byte:") else "uint8"),
                stats[begin:],
                hashes[begin:],
                KIND=code,
                PER_WORD=8 // (itemsize(dtype) or 8),
                WORDS=_WORDS,
                UNROLL=_UNROLL,
            )
        self._add(add_chunks, start_t, count_t, row_t, stats, hashes, rows)

    def _add(
        self, kernel: Any, start: Any, count: Any, row: Any, stats: Any, hashes: Any, rows: list[int]
    ) -> None:
        # A batch may straddle two result buffers: rows are ascending only within a type, so each buffer
        # takes its own and leaves the others alone.
        for buffer in range(min(rows) // _ROWS, max(rows) // _ROWS + 1):
            while len(self._results) <= buffer:
                self._results.append(
                    (
                        torch.empty((_ROWS, _COLUMNS), dtype=torch.float64, device=self.device),
                        torch.empty(_ROWS, dtype=torch.int64, device=self.device),
                    )
                )
            values, result_hashes = self._results[buffer]
            kernel[(len(rows),)](
                start,
                count,
                row,
                stats,
                hashes,
                values,
                result_hashes,
                buffer * _ROWS,
                ROWS=_ROWS,
                MOST=MOST_CHUNKS,
            )

    def _send(self, numbers: list[int]) -> torch.Tensor:
        host = torch.from_numpy(np.array(numbers, dtype=np.int64))
        if self.device.type == "cpu":
            return host
        pinned = host.pin_memory()
        # The copy runs later; torch's host allocator keeps pinned memory until it has.
        return pinned.to(self.device, non_blocking=True)

    def _byte_table(self, dtype: str) -> torch.Tensor:
        found = self._tables.get(dtype)
        if found is None:
            values = torch.from_numpy(byte_values(dtype).astype(np.float32))
            found = self._tables[dtype] = values.to(self.device)
        return found

    def _current_stream(self) -> int:
        if self.device.type == "cpu":
            return 0
        return int(torch._C._cuda_getCurrentRawStream(self.device.index or 0))

    def _on_stream(self) -> Any:
        if self.device.type == "cpu" or self._stream == self._current_stream():
            return contextlib.nullcontext()
        return torch.cuda.stream(_external_stream(self._stream, self.device))


def _external_stream(stream: int, device: torch.device) -> Any:
    make: Any = torch.cuda.ExternalStream
    return make(stream, device=device)


def _event() -> Any:
    make: Any = torch.cuda.Event
    return make()


def compact_copy(tensor: torch.Tensor, place: tuple[Any, ...]) -> torch.Tensor:
    """The distinct elements of a tensor in memory order, copied, on its device."""
    with aside():
        if len(place) > 3:
            _, _, _, sizes, strides = place
            shown = tensor.detach().as_strided(sizes, strides, tensor.storage_offset())
        else:
            shown = tensor.detach().as_strided((place[1],), (1,), tensor.storage_offset())
        return shown.clone(memory_format=torch.contiguous_format)


def device_bytes(tensor: torch.Tensor, place: tuple[Any, ...]) -> Callable[[], memoryview]:
    """Start to copy a content to the host; the result waits for the bytes and returns them.

    The copy runs on the stream that made the tensor, so neither a later write nor the reuse of its memory
    can overtake it.
    """
    with aside():
        if len(place) > 3:
            source = compact_copy(tensor, place).view(-1)
        else:
            source = tensor.detach().as_strided((place[1],), (1,), tensor.storage_offset())
        host = torch.empty(place[1], dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        host.copy_(source, non_blocking=True)
        event: Any = _event() if tensor.device.type == "cuda" else None
        if event is not None:
            event.record()

    def fetch() -> memoryview:
        if event is not None:
            event.synchronize()
        return view(host.data_ptr(), host.numel() * host.element_size()).data

    # `host` lives as long as `fetch` does, which the queue holds until the bytes are written.
    return fetch
