"""Bytes on their way to disk: small blobs packed into a chunk, large ones in parts. Imports no torch."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from bridge.capture.pool import Chunk, ChunkPool
from bridge.capture.record import Digest

#: Where a blob starts in a chunk: copies are fastest from and to such addresses.
ALIGNMENT = 64
#: Blobs in one load at most: what one system call takes.
MOST_PIECES = 512


class Blob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One content that is to be stored.

    digested: told the digest by whoever writes the bytes; None where somebody else takes it.
    """

    content: int
    key: str  #: of the call that selected it
    tensor: str
    dtype: str
    shape: tuple[int, ...]  #: dimensions in memory order
    nbytes: int
    count: int = 0  #: elements
    digested: Callable[[Digest], None] | None = None


@dataclass(slots=True, eq=False)
class Load:
    """A chunk with blobs in it, or with a part of one.

    pieces: the blobs and where each of them, or its part, begins in the chunk and how long it is.
    used: bytes of the chunk up to the end of the last piece.
    ready: waits for the bytes where a device still copies them.
    """

    chunk: Chunk
    pool: ChunkPool
    pieces: list[tuple[Blob, int, int]] = field(default_factory=list)
    used: int = 0
    state: Any = None  #: the lane's own
    ready: Callable[[], None] | None = None

    def bytes(self) -> list[memoryview]:
        """The bytes of each piece; waits for them."""
        if self.ready is not None:
            self.ready()
            self.ready = None
        view = self.chunk.view
        return [view[begin : begin + count] for _, begin, count in self.pieces]

    def release(self) -> None:
        """The bytes are no longer needed."""
        self.pool.give(self.chunk)


@dataclass(slots=True, eq=False)
class Stream:
    """A blob that is larger than a chunk: its parts, made while it is being written."""

    blob: Blob
    parts: queue.SimpleQueue[Load | None] = field(default_factory=queue.SimpleQueue)  #: None: no more
    _over: bool = False

    def next(self) -> Load | None:
        """The next part; None, as often as asked, when there are no more."""
        if self._over:
            return None
        part = self.parts.get()
        self._over = part is None
        return part


Job = Load | Stream


class Lane(Protocol):
    """A way from a tensor's memory into chunks."""

    pool: ChunkPool

    def copy(self, source: Any, begin: int, count: int, load: Load) -> None:
        """Copy bytes of a source to where `load.used` says."""

    def seal(self, load: Load) -> None:
        """Nothing more is copied into this load: say when it is ready."""

    def takes(self, load: Load) -> bool:
        """Whether what is copied now may lie in one load with what is there."""
