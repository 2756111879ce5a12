"""How contents get from a tensor's memory into chunks: what is stored is what was there when it was recorded.

The next operator may write a tensor in place, or free its memory to the next one. So a content is copied
while the call that it belongs to is recorded: on the CPU at once, on a GPU in the order of the stream, on
the device itself, into one of a few staging buffers. A second stream carries full buffers to pinned memory
of the host while the step goes on. Nothing of the step's is kept alive for it.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch

from bridge.capture.device import aside, compact_copy
from bridge.capture.dtypes import itemsize
from bridge.capture.identity import Place
from bridge.capture.loads import Load
from bridge.capture.pool import Chunk, ChunkPool, chunk_of, copy_memory, host_chunks

#: Host memory for what waits to be written, of each kind, at most; less where less is free.
WAITING_BYTES = 1 << 30
_FREE_PART = 8
HOST_CHUNK = 8 << 20
DEVICE_CHUNK = 16 << 20
_WARM_BYTES = 256 << 20
#: Staging buffers on the device: one is filled, others are on their way.
STAGES = 4


class HostLane:
    """From addresses of host memory."""

    def __init__(self) -> None:
        self.pool = ChunkPool(host_chunks, chunk_bytes=HOST_CHUNK, most_bytes=waiting_bytes())

    def copy(self, source: int, begin: int, count: int, load: Load) -> None:
        """Copy bytes that lie at an address."""
        copy_memory(load.chunk.address + load.used, source + begin, count)

    def seal(self, load: Load) -> None:
        """There is nothing to wait for."""

    def takes(self, load: Load) -> bool:
        """Always: copies are done when they return."""
        return True


class DeviceLane:
    """From tensors on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.pool = ChunkPool(_pinned_chunks, chunk_bytes=DEVICE_CHUNK, most_bytes=waiting_bytes())
        self._device = device
        self._side: Any = _stream(device)
        #: Buffers, and the event after which each of them may be filled again.
        self._stages: deque[tuple[torch.Tensor, Any]] = deque()
        self._made = 0

    def bytes_of(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        """A content as a flat tensor of bytes on the device."""
        with aside():
            nbytes = place[1] * (itemsize(place[2]) or 0)
            offset = tensor.storage_offset() * tensor.element_size()
            if len(place) > 3:
                tensor, offset = compact_copy(tensor, place), 0
            flat = torch.empty(0, dtype=torch.uint8, device=self._device)
            return flat.set_(tensor.untyped_storage(), offset, (nbytes,), (1,))

    def copy(self, source: torch.Tensor, begin: int, count: int, load: Load) -> None:
        """Copy bytes into a staging buffer, on the current stream."""
        with aside():
            if load.state is None:
                load.state = (self._stage(), torch.cuda.current_stream(self._device))
            buffer = load.state[0]
            buffer[load.used : load.used + count].copy_(source[begin : begin + count])

    def seal(self, load: Load) -> None:
        """Send the buffer to the host behind everything that was copied into it."""
        buffer, stream = load.state
        load.state = None
        with aside():
            filled, arrived = _event(), _event()
            filled.record(stream)
            self._side.wait_event(filled)
            with torch.cuda.stream(self._side):
                load.chunk.owner[: load.used].copy_(buffer[: load.used], non_blocking=True)
                arrived.record(self._side)
        self._stages.append((buffer, arrived))
        load.ready = arrived.synchronize

    def takes(self, load: Load) -> bool:
        """A buffer is filled on one stream."""
        return load.state is None or bool(load.state[1] == torch.cuda.current_stream(self._device))

    def _stage(self) -> torch.Tensor:
        if self._made < STAGES and not (self._stages and self._stages[0][1].query()):
            self._made += 1
            return torch.empty(DEVICE_CHUNK, dtype=torch.uint8, device=self._device)
        buffer, arrived = self._stages.popleft()
        torch.cuda.current_stream(self._device).wait_event(arrived)
        return buffer


Lane = HostLane | DeviceLane


def warm_up() -> None:
    """Pin some of the host memory that a GPU's lane will take: torch keeps it, and pinning takes long."""
    if torch.cuda.is_available():
        held = [_pinned_chunks(DEVICE_CHUNK) for _ in range(_WARM_BYTES // DEVICE_CHUNK)]
        del held


def waiting_bytes() -> int:
    """How much host memory may wait to be written: at most WAITING_BYTES, and an eighth of what is free."""
    free = _available()
    return WAITING_BYTES if free is None else max(min(WAITING_BYTES, free // _FREE_PART), HOST_CHUNK)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _pinned_chunks(chunk_bytes: int) -> list[Chunk]:
    with aside():
        memory = torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True)
        return [chunk_of(memory.numpy(), owner=memory)]


def _stream(device: torch.device) -> Any:
    make: Any = torch.cuda.Stream
    return make(device)


def _event() -> Any:
    make: Any = torch.cuda.Event
    return make()
