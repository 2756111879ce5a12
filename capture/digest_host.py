"""Digests of bytes in host memory: the compiled walker where there is a C compiler, numpy elsewhere.

Works on addresses, not tensors, so that no operator is dispatched while a step is being observed.
"""

from __future__ import annotations

import ctypes
import logging
import math
from functools import cache

import numpy as np
import numpy.typing as npt

from bridge.capture import digest_native, digest_numpy
from bridge.capture.digest import BYTE_TYPES, EMPTY, KINDS, digest_of, finish, json_safe
from bridge.capture.dtypes import REAL_OF, itemsize
from bridge.capture.record import Digest

log = logging.getLogger("bridge.capture")


@cache
def walker_name() -> str:
    """ "C" or "numpy": which of the two walks here."""
    return "C" if digest_native.load() is not None else "numpy"


def digest_bytes(address: int, count: int, dtype: str) -> Digest:
    """Digest `count` elements that lie one after the other at `address`.

    Raises:
        ValueError: an element type that has no digest (see `dtypes.itemsize`).
    """
    size = itemsize(dtype)
    if size is None:
        raise ValueError(f"no digest for elements of type {dtype}")
    real = REAL_OF.get(dtype)
    if real is not None:
        count, dtype = 2 * count, real
    nbytes = count * (itemsize(dtype) or 1)
    if count == 0:
        return EMPTY
    library = digest_native.load()
    if library is None:
        table = byte_values(dtype) if dtype in BYTE_TYPES else None
        return finish(digest_numpy.walk(view(address, nbytes), dtype, table), count=count, nbytes=nbytes)
    kind = _KIND_OF[dtype]
    found = digest_native.walk(library, address, count, kind, byte_values(dtype) if kind == _BYTE else None)
    *figures, _, _, name = found
    if figures[2] == math.inf:
        figures[:3] = map(json_safe, figures[:3])
    return digest_of(count, figures, name)


_BYTE = KINDS.index("byte")
_KIND_OF = dict.fromkeys(BYTE_TYPES, _BYTE) | {kind: code for code, kind in enumerate(KINDS)}
_KIND_OF["bool"] = KINDS.index("uint8")


@cache
def byte_values(dtype: str) -> npt.NDArray[np.float64]:
    """Value of each of the 256 bit patterns of an eight-bit type, shape [256]."""
    patterns = np.arange(256, dtype=np.uint8)
    if dtype in ("bool", "uint8"):
        return patterns.astype(np.float64)
    if dtype == "int8":
        return patterns.view(np.int8).astype(np.float64)
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float64).numpy()


def view(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The bytes at an address as an array that does not own them, shape [nbytes]."""
    return np.frombuffer(_memory(address, nbytes, _READ), dtype=np.uint8)


_READ = 0x100
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
