"""Find blobs in shards and read them with every check there is. Imports no torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.capture.dtypes import itemsize
from bridge.capture.folder import RANK_FILE, RANK_FOLDER
from bridge.capture.lines import read_lines
from bridge.capture.record import ShardFile
from bridge.capture.shards import HEADER_BYTES, BlobLine, blob_name
from bridge.errors import CorruptCaptureError

_NAME = re.compile(r"[0-9a-f]{32}")


class BlobIndex:
    """All blobs of a capture by name."""

    def __init__(
        self,
        root: Path,
        folders: list[Path],
        hashes: Mapping[str, str],
        shards: Mapping[str, ShardFile] | None = None,
    ) -> None:
        """Read blobs.jsonl of each rank.

        Args:
            root: The capture.
            folders: Its ranks' folders.
            hashes: sha256 of each file, by path relative to the capture; files without one are not compared.
            shards: Size and header of each shard, likewise; older captures have them among the hashes.

        Raises:
            CorruptCaptureError: a line that cannot be read, or one that points outside its shard.
        """
        self._root = root
        self._hashes = hashes
        self._shards = shards or {}
        self._verified: set[str] = set()
        self._lines: dict[str, tuple[Path, BlobLine]] = {}
        ignored: list[str] = []
        for folder in folders:
            path = folder / "blobs.jsonl"
            if path.exists():
                self.verify(f"{folder.name}/{path.name}")
                for line in read_lines(path, BlobLine, ignored, None):
                    _check_line(line, path)
                    self._lines.setdefault(line.blob, (folder / line.file, line))

    def read(self, name: str) -> tuple[BlobLine, bytes]:
        """One blob and where it came from.

        Raises:
            CorruptCaptureError: it is missing, truncated or changed.
        """
        if name not in self._lines:
            raise CorruptCaptureError(
                f"{self._root} lacks the blob {name[:40]}: it was not written; capture again"
            )
        path, line = self._lines[name]
        self.verify(f"{path.parent.name}/{path.name}")
        return line, _read(path, line)

    def verify(self, name: str) -> None:
        """Compare a file with what the manifest says of it, once; a file of which it says nothing passes.

        Of a shard that is its size and its header: every blob is compared with its name when it is read.

        Raises:
            CorruptCaptureError: it differs or is missing.
        """
        wanted: Any = self._hashes.get(name)
        shard = self._shards.get(name)
        if (wanted is None and shard is None) or name in self._verified:
            return
        path = self._place(name)
        if shard is not None:
            _check_shard(path, shard)
        else:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                    raise CorruptCaptureError(
                        f"{path} is truncated or was changed: its sha256 is not the manifest's; capture again"
                    )
        self._verified.add(name)

    def faults(self) -> Iterator[str]:
        """Compare every file with the manifest, every blob with its name: what is wrong, a line a file."""
        wrong: set[Path] = set()
        for name in (*self._hashes, *self._shards):
            try:
                self.verify(name)
            except CorruptCaptureError as error:
                wrong.add(self._root / name)
                yield str(error)
        for path, line in self._lines.values():
            if path not in wrong:
                try:
                    _read(path, line)
                except CorruptCaptureError as error:
                    wrong.add(path)
                    yield str(error)

    def damage(self) -> list[str]:
        """What is wrong with the shards as far as their sizes and headers tell, one line for each."""
        ends: dict[Path, int] = {}
        for path, line in self._lines.values():
            ends[path] = max(ends.get(path, 0), line.begin + line.nbytes)
        for name in self._shards:
            ends.setdefault(self._root / name, HEADER_BYTES)
        found = []
        for path, end in sorted(ends.items()):
            shard = self._shards.get(f"{path.parent.name}/{path.name}")
            try:
                _check_size(path, shard.nbytes if shard is not None else end)
                if shard is not None:
                    _check_shard(path, shard)
            except CorruptCaptureError as error:
                found.append(str(error))
        return found

    def _place(self, name: str) -> Path:
        folder, _, inside = name.partition("/")
        if not RANK_FOLDER.fullmatch(folder) or not RANK_FILE.fullmatch(inside):
            raise CorruptCaptureError(
                f"{self._root}: the manifest lists {name[:80]!r}, which is no file of a capture"
            )
        path = self._root / folder / inside
        if path.is_symlink() or not path.is_file():
            raise CorruptCaptureError(f"{path} is missing; capture again")
        return path


def _read(path: Path, line: BlobLine) -> bytes:
    _check_size(path, line.begin + line.nbytes)
    with path.open("rb") as file:
        file.seek(line.begin)
        data = file.read(line.nbytes)
    if blob_name(data, dtype=line.dtype, shape=line.shape) != line.blob:
        raise CorruptCaptureError(
            f"{path} was changed: the bytes of blob {line.blob} are not what was written; capture again"
        )
    return data


def _check_size(path: Path, least: int) -> None:
    if path.is_symlink() or not path.is_file():
        raise CorruptCaptureError(f"{path} is missing; capture again")
    size = path.stat().st_size
    if size < least:
        raise CorruptCaptureError(
            f"{path} is truncated: it has {size} bytes, and blobs up to byte {least}; capture again"
        )


def _check_shard(path: Path, shard: ShardFile) -> None:
    size = path.stat().st_size
    if size != shard.nbytes:
        what = "is truncated" if size < shard.nbytes else "was changed"
        raise CorruptCaptureError(
            f"{path} {what}: it has {size} bytes, the manifest says {shard.nbytes}; capture again"
        )
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if hashlib.sha256(header).hexdigest() != shard.header:
        raise CorruptCaptureError(
            f"{path} was changed: the sha256 of its header is not the manifest's; capture again"
        )


def _check_line(line: BlobLine, path: Path) -> None:
    size = itemsize(line.dtype)
    nbytes = size or 0
    for extent in line.shape:
        nbytes *= extent
    sane = (
        _NAME.fullmatch(line.blob)
        and RANK_FILE.fullmatch(line.file)
        and line.file.startswith("tensors-")
        and size is not None
        and len(line.shape) <= 64
        and all(extent >= 0 for extent in line.shape)
        and line.begin >= 0
        and line.nbytes == nbytes
    )
    if not sane:
        raise CorruptCaptureError(
            f"{path} has an impossible entry for blob {line.blob[:40]!r}; capture again"
        )
