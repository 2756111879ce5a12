"""Find blobs in shards and read them with every check there is. Imports no torch."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from bridge.capture.dtypes import itemsize
from bridge.capture.folder import RANK_FILE, RANK_FOLDER
from bridge.capture.lines import read_lines
from bridge.capture.shards import BlobLine, blob_name
from bridge.errors import CorruptCaptureError

_NAME = re.compile(r"[0-9a-f]{32}")


class BlobIndex:
    """All blobs of a capture by name."""

    def __init__(self, root: Path, folders: list[Path], hashes: dict[str, str]) -> None:
        """Read blobs.jsonl of each rank.

        Args:
            root: The capture.
            folders: Its ranks' folders.
            hashes: sha256 of each file, by path relative to the capture; files without one are not compared.

        Raises:
            CorruptCaptureError: a line that cannot be read, or one that points outside its shard.
        """
        self._root = root
        self._hashes = hashes
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
        if path.is_symlink() or not path.is_file():
            raise CorruptCaptureError(f"{path} is missing; capture again")
        size = path.stat().st_size
        if line.begin + line.nbytes > size:
            raise CorruptCaptureError(
                f"{path} is truncated: blob {name} ends at byte {line.begin + line.nbytes}, the file "
                f"at {size}; capture again"
            )
        with path.open("rb") as file:
            file.seek(line.begin)
            data = file.read(line.nbytes)
        if blob_name(data, dtype=line.dtype, shape=line.shape) != name:
            raise CorruptCaptureError(
                f"{path} was changed: the bytes of blob {name} are not what was written; capture again"
            )
        return line, data

    def verify(self, name: str) -> None:
        """Compare a file with its sha256 in the manifest, once; a file without one passes.

        Raises:
            CorruptCaptureError: it differs or is missing.
        """
        wanted: Any = self._hashes.get(name)
        if wanted is None or name in self._verified:
            return
        folder, _, inside = name.partition("/")
        if not RANK_FOLDER.fullmatch(folder) or not RANK_FILE.fullmatch(inside):
            raise CorruptCaptureError(
                f"{self._root}: the manifest lists {name[:80]!r}, which is no file of a capture"
            )
        path = self._root / folder / inside
        if path.is_symlink() or not path.is_file():
            raise CorruptCaptureError(f"{path} is missing; capture again")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                raise CorruptCaptureError(
                    f"{path} is truncated or was changed: its sha256 is not the manifest's; capture again"
                )
        self._verified.add(name)


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
