"""Writing a report file: complete or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from bridge.errors import UsageError


def write_file(path: Path | str, data: bytes | str) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part.

    Missing parent folders are made. A device such as /dev/stdout is written to directly.

    Raises:
        UsageError: The path cannot be written; what was written of the new file is removed.
    """
    content = data.encode("utf-8") if isinstance(data, str) else data
    # Through a symbolic link, so that replacing the file keeps the link.
    final = Path(os.path.realpath(path))
    try:
        if final.is_dir():
            raise UsageError(
                f"the report needs a file name, got the folder {path}; try {Path(path) / 'report.html'}"
            )
        if final.exists() and not final.is_file():
            final.write_bytes(content)
            return
        final.parent.mkdir(parents=True, exist_ok=True)
        _replace(final, content)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}; choose a folder you can write to"
        ) from None


def _replace(final: Path, content: bytes) -> None:
    partial = final.with_name(f".{final.name[:200]}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(final)
    except BaseException:
        # Also on Ctrl-C: a half-written file must not stay behind. The first error is the one to tell.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
