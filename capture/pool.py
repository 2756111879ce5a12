"""Memory that waits to be written: chunks of one size, reused, and never more than a bound. Imports no torch.

Memory touched for the first time costs as much as the copy into it, so a chunk given back is the next one
taken. A tensor larger than a chunk passes through in parts; even the largest is held in bounded memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True, eq=False)
class Chunk:
    """Some memory of the host.

    view: its bytes, writable.
    address: of the first of them.
    owner: what keeps the memory; for a copy from a device the tensor over it.
    """

    view: memoryview
    address: int
    owner: Any


#: Makes some chunks of the given size at once.
Make = Callable[[int], list[Chunk]]


class ChunkPool:
    """At most `most_bytes` in chunks of `chunk_bytes`; one chunk there always is."""

    def __init__(self, make: Make, *, chunk_bytes: int, most_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._make = make
        self._left = max(most_bytes // chunk_bytes, 1)
        self._free: list[Chunk] = []
        self._given = threading.Condition()
        self.taken = 0  #: chunks that are in use
        self.most_taken = 0

    def take(self) -> Chunk | None:
        """A chunk; None while all are in use."""
        with self._given:
            if not self._free and self._left:
                made = self._make(self.chunk_bytes)[: self._left]
                self._left -= len(made)
                self._free += made
            if not self._free:
                return None
            self.taken += 1
            self.most_taken = max(self.most_taken, self.taken)
            return self._free.pop()

    def wait(self, seconds: float) -> None:
        """Return when a chunk was given back, or after so many seconds."""
        with self._given:
            if not self._free and not self._left:
                self._given.wait(seconds)

    def give(self, chunk: Chunk) -> None:
        """A chunk's bytes are no longer needed."""
        with self._given:
            self._free.append(chunk)
            self.taken -= 1
            self._given.notify_all()


def host_chunks(chunk_bytes: int) -> list[Chunk]:
    """Chunks of ordinary memory; several at once, so that huge pages fit in."""
    count = max((16 << 20) // chunk_bytes, 1)
    slab = np.empty(count * chunk_bytes, dtype=np.uint8)
    return [chunk_of(slab[i * chunk_bytes : (i + 1) * chunk_bytes]) for i in range(count)]


def chunk_of(array: Any, owner: Any = None) -> Chunk:
    """A chunk over a numpy array of bytes."""
    return Chunk(view=array.data, address=int(array.ctypes.data), owner=array if owner is None else owner)


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between addresses; other threads run meanwhile."""
    ctypes.memmove(target, source, nbytes)
