"""A file of JSON lines that is hashed while it is written. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path


class LineFile:
    """Appends; a write that fails leaves no half line behind. Any thread may."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self._end = 0
        self._hash = hashlib.sha256()
        self._lock = threading.Lock()

    def append(self, data: bytes) -> None:
        """Write whole lines at the end.

        Raises:
            OSError: the disk is full, or worse; the file is as it was before.
        """
        with self._lock:
            view, at = memoryview(data), self._end
            try:
                while view:
                    done = os.pwrite(self._descriptor, view, at)
                    view, at = view[done:], at + done
            except OSError:
                os.ftruncate(self._descriptor, self._end)
                raise
            self._end = at
            self._hash.update(data)

    def close(self) -> str:
        """Close the file; its sha256."""
        os.close(self._descriptor)
        return self._hash.hexdigest()
