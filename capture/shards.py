"""Shards: safetensors files written as a stream, one blob after the other. Imports no torch.

The format wants its header first, so room for it is reserved, padded with spaces (which the format
allows), and filled in when the shard is closed. Until then blobs.jsonl says where each blob lies.

A blob's name is the hash of its bytes, and the header has all names. So the header's sha256 stands for the
whole shard, and no byte of a tensor is hashed twice.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from bridge.capture.dtypes import safetensors_name
from bridge.capture.record import ShardFile

#: Room for the header of one shard, its eight bytes of length included: about 450 blobs.
HEADER_BYTES = 64 << 10
SHARD_BYTES = 1 << 30
#: Buffers that one system call takes.
_MOST_BUFFERS = 512

Buffer = memoryview | bytes | bytearray


class BlobLine(msgspec.Struct, frozen=True, kw_only=True):
    """Where one blob lies: a line of blobs.jsonl."""

    blob: str
    file: str  #: name of the shard, in the same folder
    dtype: str  #: torch's name
    shape: tuple[int, ...]  #: dimensions in memory order
    begin: int  #: offset of the first byte in the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class Named:
    """A blob to be written: its name, type, shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer


def blob_name(data: Buffer, *, dtype: str, shape: Sequence[int]) -> str:
    """Content hash of a blob, 32 hex digits; equal bytes of another type or shape are another blob."""
    state = name_state(dtype, shape)
    state.update(data)
    return state.hexdigest()


def name_state(dtype: str, shape: Sequence[int]) -> xxhash.xxh3_128:
    """The hash that becomes a blob's name once it has been given the bytes."""
    return xxhash.xxh3_128(f"{dtype} {','.join(map(str, shape))}\n".encode())


class ShardWriter:
    """Appends blobs to shards of its own in a folder and rolls them by size. One thread at a time."""

    def __init__(
        self, folder: Path, *, numbers: Iterator[int] | None = None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Nothing is written yet.

        Args:
            folder: Of the rank.
            numbers: Where several write into one folder: what numbers the shards of all of them.
            shard_bytes: About the most bytes of one shard.
        """
        self._folder = folder
        self._numbers = numbers if numbers is not None else itertools.count()
        self._limit = shard_bytes
        self._descriptor = -1
        self._path = folder
        self._end = 0
        self._written_to = 0
        self._header: dict[str, object] = {}
        self._header_size = 0
        self.written = 0  #: bytes of blobs in all shards
        self.closed: dict[str, ShardFile] = {}  #: name of the file -> what it is, for the manifest

    def append(self, blobs: Sequence[Named]) -> tuple[list[BlobLine], OSError | None]:
        """Write blobs at the end of the current shard.

        Returns:
            Where those lie that were written whole, the first ones, and what kept the others out. The file
            ends with the last one that was written whole.
        """
        lines: list[BlobLine] = []
        try:
            while len(lines) < len(blobs):
                group = self._fitting(blobs[len(lines) :])
                done = self._write([blob.data for blob in group])
                for blob in group:
                    if len(blob.data) > done:
                        break
                    done -= len(blob.data)
                    lines.append(self._enter(blob.name, blob.dtype, blob.shape, len(blob.data)))
                else:
                    continue
                # Written in part: the disk is about to say that it is full.
                os.ftruncate(self._descriptor, self._end)
        except OSError as error:
            return lines, error
        return lines, None

    def begin(self, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        """A large blob follows, in parts given to `extend`, whose name will be known when it is over.

        Raises:
            OSError: no shard could be made.
        """
        self._make_room(nbytes, _room(dtype, shape))
        self._written_to = self._end

    def extend(self, data: Buffer) -> None:
        """Write a part of the blob that has begun.

        Raises:
            OSError: the disk is full, or worse; `abandon` makes the shard what it was before.
        """
        while data:
            done = os.pwrite(self._descriptor, data, self._written_to)
            data, self._written_to = data[done:], self._written_to + done

    def end(self, name: str, dtype: str, shape: tuple[int, ...]) -> BlobLine:
        """The blob is whole."""
        return self._enter(name, dtype, shape, self._written_to - self._end)

    def abandon(self) -> None:
        """The blob that has begun is not wanted."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, self._end)

    def close(self) -> None:
        """Fill in the header of the current shard."""
        if self._descriptor < 0:
            return
        text = json.dumps({"__metadata__": {"format": "pt"}, **self._header}, separators=(",", ":")).encode()
        room = HEADER_BYTES - 8
        assert len(text) <= room, "a shard was given more blobs than its header holds"
        header = struct.pack("<Q", room) + text.ljust(room)
        try:
            os.pwrite(self._descriptor, header, 0)
            self.closed[self._path.name] = ShardFile(
                nbytes=self._end, header=hashlib.sha256(header).hexdigest()
            )
        finally:
            os.close(self._descriptor)
            self._descriptor = -1
            self._header, self._header_size = {}, 0

    def _fitting(self, blobs: Sequence[Named]) -> Sequence[Named]:
        """The first of some blobs that one shard and one system call take; there is a shard for them then."""
        self._make_room(len(blobs[0].data), _room(blobs[0].dtype, blobs[0].shape))
        end, size = self._end - HEADER_BYTES, self._header_size
        for count, blob in enumerate(blobs[:_MOST_BUFFERS]):
            end += len(blob.data)
            size += _room(blob.dtype, blob.shape)
            if count and (end > self._limit or size > HEADER_BYTES - 128):
                return blobs[:count]
        return blobs[:_MOST_BUFFERS]

    def _make_room(self, nbytes: int, room: int) -> None:
        full = self._end - HEADER_BYTES + nbytes > self._limit and self._header
        if self._descriptor < 0 or full or self._header_size + room > HEADER_BYTES - 128:
            self.close()
            self._open(self._folder / f"tensors-{next(self._numbers):05d}.safetensors")

    def _open(self, path: Path) -> None:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            room = struct.pack("<Q", HEADER_BYTES - 8) + b"{}".ljust(HEADER_BYTES - 8)
            if os.pwrite(descriptor, room, 0) < HEADER_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        self._descriptor, self._path, self._end = descriptor, path, HEADER_BYTES

    def _write(self, buffers: list[Buffer]) -> int:
        """Bytes written; fewer than there are when the disk fills up."""
        try:
            return os.pwritev(self._descriptor, buffers, self._end)
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            raise

    def _enter(self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> BlobLine:
        begin, self._end = self._end, self._end + nbytes
        known = safetensors_name(dtype)
        self._header[name] = {
            "dtype": known or "U8",
            "shape": shape if known else (nbytes,),
            "data_offsets": (begin - HEADER_BYTES, self._end - HEADER_BYTES),
        }
        self._header_size += _room(dtype, shape)
        self.written += nbytes
        return BlobLine(blob=name, file=self._path.name, dtype=dtype, shape=shape, begin=begin, nbytes=nbytes)


def _room(dtype: str, shape: tuple[int, ...]) -> int:
    """At least the bytes of a blob's entry in the header: its name, type and offsets, and what is around."""
    return 130 + len(dtype) + (len(str(shape)) if shape else 2)
