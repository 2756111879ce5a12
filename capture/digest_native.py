"""Compile digest.c once per machine and call it. Without a C compiler `load` returns None.

The object lives in the user's cache folder under a name that depends on the source and on the
processor's features, so that a home directory shared by different machines is safe.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger("bridge.capture")
SOURCE = Path(__file__).with_name("digest.c")
FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC")


#: sum, abs_sum, sq_sum, min, max; nan, pos_inf, neg_inf, finite, hash as a part, hash of the whole.
_RESULT = struct.Struct("5d6Q")
_local = threading.local()


@cache
def load() -> ctypes.CDLL | None:
    """The compiled walker; None when BRIDGE_DIGEST=numpy or when it cannot be compiled here."""
    if os.environ.get("BRIDGE_DIGEST") == "numpy":
        return None
    try:
        library = ctypes.CDLL(str(_object_file()))
        library.digest_init()
        library.digest_run.argtypes = (
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.info("digests on the CPU are taken by numpy, several times slower: %s", error)
        return None
    return library


def walk(
    library: ctypes.CDLL, address: int, count: int, kind: int, table: npt.NDArray[np.float64] | None
) -> tuple[float, float, float, float, float, int, int, int, int, int, int]:
    """What `_RESULT` names, of `count` elements at `address`; `kind` indexes KINDS, `table` serves "byte"."""
    try:
        buffer, place = _local.result
    except AttributeError:
        buffer = bytearray(_RESULT.size)
        place = ctypes.addressof((ctypes.c_char * _RESULT.size).from_buffer(buffer))
        _local.result = buffer, place
    status = library.digest_run(address, count, kind, 0, None if table is None else table.ctypes.data, place)
    assert status == 0, f"digest.c does not know kind {kind}"
    return _RESULT.unpack_from(buffer)


def _object_file() -> Path:
    source = SOURCE.read_bytes()
    tag = hashlib.sha256(source + " ".join(FLAGS).encode() + _processor()).hexdigest()[:16]
    target = _cache_folder() / f"digest-{tag}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc, clang or $CC) found")
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch, "digest.so")
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(built), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        built.replace(target)
    return target


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base, "numerics-bridge")
    # Code is loaded from here: it must be a folder that nobody else can write.
    if folder.exists() and (folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022):
        raise OSError(f"{folder} must belong to you and be writable by you alone")
    return folder


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.system()} {platform.machine()} {features}".encode()
