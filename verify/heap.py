"""Memory that large tensors have left goes back to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Return free memory; nothing happens where the C library is not glibc."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
