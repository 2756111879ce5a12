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
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import _disable_current_modes

from bridge.capture.digest import BLOCK_BYTES, BYTE_TYPES, KINDS
from bridge.capture.digest_host import byte_values, view
from bridge.capture.digest_numpy import mix_all
from bridge.capture.dtypes import REAL_OF, itemsize
from bridge.capture.record import Digest

#: Chunks of one tensor at most: enough programs to fill a GPU, few enough to add up in one tile.
MOST_CHUNKS = 1024
#: A batch is launched when it holds this many contents, or bytes: a fiftieth of what the run has used at
#: its peak, since a batch keeps memory alive, within these bounds.
BATCH_CONTENTS = 128
BATCH_BYTES = (32 << 20, 1 << 30)
_ROWS = 16384
_WORDS = 256
_UNROLL = 4
_COLUMNS = 8
_FIELDS = 6
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
        self._batch: list[tuple[int, int, str, Any]] = []  #: address, bytes, type, what keeps the memory
        self._rows: list[
            tuple[int, int, int]
        ] = []  #: number of the content, elements, bytes; one per result row
        self._stream = -1
        self._bytes = 0
        used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        self._most_bytes = min(max(used // 50, BATCH_BYTES[0]), BATCH_BYTES[1])
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tables: dict[str, torch.Tensor] = {}

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
        if len(self._batch) >= BATCH_CONTENTS or self._bytes >= self._most_bytes:
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
        if not self._on_host:
            # The walks may have run on several streams, the copy runs on one.
            torch.cuda.synchronize(self.device)
        with aside():
            parts = [(values.cpu().numpy(), hashes.cpu().numpy()) for values, hashes in self._results]
        self._results = []
        if not rows:
            return []
        count = len(rows)
        table = np.concatenate([values for values, _ in parts])[:count]
        sums = np.concatenate([hashes for _, hashes in parts])[:count].view(np.uint64)
        nbytes = np.fromiter((row[2] for row in rows), dtype=np.uint64, count=count)
        names = mix_all(sums + mix_all(nbytes)).tolist()
        # Sums of float64 values may overflow, and JSON has no infinity.
        table[:, :3] = np.nan_to_num(table[:, :3], posinf=_LARGEST, neginf=-_LARGEST)
        found = []
        for (number, elements, _), line, name in zip(rows, table.tolist(), names, strict=True):
            total, magnitude, square, least, most, nan, pos, neg = line
            some = nan + pos + neg < elements
            digest = Digest(
                count=elements,
                sum=total,
                abs_sum=magnitude,
                sq_sum=square,
                min=least if some else None,
                max=most if some else None,
                nan=int(nan),
                pos_inf=int(pos),
                neg_inf=int(neg),
                hash=f"{name:016x}",
            )
            found.append((number, digest))
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
        for index, entry in enumerate(batch):
            kinds.setdefault(entry[2], []).append(index)
        # Chunks of one type lie together, so that one launch takes them all.
        order = [index for members in kinds.values() for index in members]
        tensors = len(order)
        lengths = np.fromiter((batch[index][1] for index in order), dtype=np.int64, count=tensors)
        per_chunk = -(-lengths // (MOST_CHUNKS * BLOCK_BYTES)) * BLOCK_BYTES
        counts = -(-lengths // per_chunk)
        ends = np.cumsum(counts)
        chunks = int(ends[-1])
        table = np.empty(_FIELDS * tensors + chunks, dtype=np.int64)
        fields = table[: _FIELDS * tensors].reshape(_FIELDS, tensors)
        fields[0] = [batch[index][0] for index in order]
        fields[1], fields[2], fields[3], fields[4] = lengths, per_chunk, ends - counts, counts
        fields[5] = order
        fields[5] += first_row
        table[_FIELDS * tensors :] = np.repeat(np.arange(tensors), counts)
        sent = self._send(table)
        stats = torch.empty((chunks, _COLUMNS), dtype=torch.float64, device=self.device)
        hashes = torch.empty(chunks, dtype=torch.int64, device=self.device)
        begin = done = 0
        for dtype, members in kinds.items():
            byte = dtype in BYTE_TYPES
            done += len(members)
            end = int(ends[done - 1])
            digest_chunks[(end - begin,)](
                sent,
                self._byte_table(dtype if byte else "uint8"),
                stats,
                hashes,
                tensors,
                begin,
                KIND=KINDS.index("byte" if byte else dtype),
                PER_WORD=8 // (itemsize(dtype) or 8),
                WORDS=_WORDS,
                UNROLL=_UNROLL,
            )
            begin = end
        # A batch may straddle two result buffers: each takes its own rows and leaves the others alone.
        for buffer in range(first_row // _ROWS, (first_row + tensors - 1) // _ROWS + 1):
            while len(self._results) <= buffer:
                self._results.append(
                    (
                        torch.empty((_ROWS, _COLUMNS), dtype=torch.float64, device=self.device),
                        torch.empty(_ROWS, dtype=torch.int64, device=self.device),
                    )
                )
            add_chunks[(tensors,)](
                sent,
                stats,
                hashes,
                *self._results[buffer],
                tensors,
                buffer * _ROWS,
                ROWS=_ROWS,
                MOST=MOST_CHUNKS,
            )

    def _send(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        host = torch.from_numpy(numbers)
        if self.device.type == "cpu":
            return host
        # The copy runs later; torch's host allocator keeps pinned memory until it has.
        return host.pin_memory().to(self.device, non_blocking=True)

    def _byte_table(self, dtype: str) -> torch.Tensor:
        found = self._tables.get(dtype)
        if found is None:
            values = torch.from_numpy(byte_values(dtype).astype(np.float32))
            found = self._tables[dtype] = values.to(self.device)
        return found

    def _current_stream(self) -> int:
        return 0 if self._on_host else int(torch._C._cuda_getCurrentRawStream(self._index))

    def _on_stream(self) -> Any:
        if self._on_host or self._stream == self._current_stream():
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
