"""Shards: safetensors files written as a stream, one blob after the other. Imports no torch.

The format wants its header first, so room for it is reserved, padded with spaces (which the format
allows), and filled in when the shard is closed. Until then blobs.jsonl says where each blob lies.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from bridge.capture.dtypes import safetensors_name

#: Room for the header of one shard, its eight bytes of length included: about 450 blobs.
HEADER_BYTES = 64 << 10
SHARD_BYTES = 1 << 30

Buffer = memoryview | bytes | bytearray


class BlobLine(msgspec.Struct, frozen=True, kw_only=True):
    """Where one blob lies: a line of blobs.jsonl."""

    blob: str
    file: str  #: name of the shard, in the same folder
    dtype: str  #: torch's name
    shape: tuple[int, ...]  #: dimensions in memory order
    begin: int  #: offset of the first byte in the file
    nbytes: int


def blob_name(data: Buffer, *, dtype: str, shape: Sequence[int]) -> str:
    """Content hash of a blob, 32 hex digits; equal bytes of another type or shape are another blob."""
    state = xxhash.xxh3_128(f"{dtype} {','.join(map(str, shape))}\n".encode())
    state.update(data)
    return state.hexdigest()


class ShardWriter:
    """Appends blobs to shards of one folder and rolls them by size. One thread at a time."""

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = shard_bytes
        self._descriptor = -1
        self._number = -1
        self._end = 0
        self._header: dict[str, object] = {}
        self._header_size = 0
        self.written = 0  #: bytes of blobs in all shards

    def append(self, name: str, data: Buffer, *, dtype: str, shape: Sequence[int]) -> BlobLine:
        """Write one blob at the end of the current shard.

        Raises:
            OSError: the disk is full, or worse; the shard is as it was before.
        """
        nbytes = len(data)
        entry = _entry(dtype, shape, nbytes, self._end - HEADER_BYTES)
        room = len(json.dumps({name: entry})) + 2
        full = self._end - HEADER_BYTES + nbytes > self._limit and self._header
        if self._descriptor < 0 or full or self._header_size + room > HEADER_BYTES - 128:
            self.close()
            self._open()
            entry = _entry(dtype, shape, nbytes, 0)
        begin = self._end
        self._write_all(data)
        self._header[name] = entry
        self._header_size += room
        self.written += nbytes
        file = self._path().name
        return BlobLine(blob=name, file=file, dtype=dtype, shape=tuple(shape), begin=begin, nbytes=nbytes)

    def close(self) -> None:
        """Fill in the header of the current shard."""
        if self._descriptor < 0:
            return
        text = json.dumps({"__metadata__": {"format": "pt"}, **self._header}, separators=(",", ":")).encode()
        room = HEADER_BYTES - 8
        assert len(text) <= room, "a shard was given more blobs than its header holds"
        try:
            os.pwrite(self._descriptor, struct.pack("<Q", room) + text.ljust(room), 0)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1
            self._header, self._header_size = {}, 0

    def _open(self) -> None:
        self._number += 1
        self._descriptor = os.open(self._path(), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        os.pwrite(self._descriptor, struct.pack("<Q", HEADER_BYTES - 8) + b"{}".ljust(HEADER_BYTES - 8), 0)
        self._end = HEADER_BYTES

    def _path(self) -> Path:
        return self._folder / f"tensors-{self._number:05d}.safetensors"

    def _write_all(self, data: Buffer) -> None:
        view, at = memoryview(data), self._end
        try:
            while view:
                done = os.pwrite(self._descriptor, view[: 64 << 20], at)
                view, at = view[done:], at + done
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end = at


def _entry(dtype: str, shape: Sequence[int], nbytes: int, begin: int) -> dict[str, object]:
    known = safetensors_name(dtype)
    return {
        "dtype": known or "U8",
        "shape": list(shape) if known else [nbytes],
        "data_offsets": [begin, begin + nbytes],
    }
