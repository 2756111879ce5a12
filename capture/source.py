"""The line of the user's code that led here: the nearest frame outside torch, Triton and this tool."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path
from types import CodeType, FrameType

import torch


def _folders() -> tuple[str, ...]:
    """Folders whose frames are plumbing; with separators, so that torch does not stand for torchtitan."""
    found = [str(Path(name).parent) for name in (torch.__file__, __file__, contextlib.__file__)]
    for name in ("triton", "spmd_types"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found.append(str(Path(spec.origin).parent))
    return tuple(folder + os.sep for folder in found)


#: Packages may be installed below the standard library's folder; those are not plumbing.
_INSTALLED = os.sep + "site-packages" + os.sep
_INSIDE = _folders()
_STDLIB = str(Path(contextlib.__file__).parent) + os.sep
#: What is known of code objects. By identity, since one's hash is that of all its instructions.
_OUTSIDE: dict[int, bool] = {}
_GENERATED: set[int] = set()
_LINES: dict[tuple[int, int], str] = {}
_KEPT: list[CodeType] = []  #: so that their ids stay theirs


class _Here(Exception):
    """Raised to learn the current frame."""


def source_line() -> str | None:
    """ "model.py:123 in forward", with one folder of the path before it."""
    return call_site()[0]


def call_site() -> tuple[str | None, bool]:
    """The user's line that led here, and whether code that Inductor generated lies between."""
    generated = False
    frame: FrameType | None = None
    try:
        raise _Here
    except _Here as here:
        # `sys._getframe` would tell audit hooks, of which filelock has a slow one.
        frame = here.__traceback__.tb_frame.f_back if here.__traceback__ is not None else None
    while frame is not None:
        code = frame.f_code
        known = id(code)
        outside = _OUTSIDE.get(known)
        if outside is None:
            _KEPT.append(code)
            outside = _OUTSIDE[known] = _is_outside(code.co_filename)
            if _is_generated(code.co_filename):
                _GENERATED.add(known)
        if outside:
            number = frame.f_lineno
            return _LINES.get((known, number)) or _line(code, number), generated
        generated = generated or known in _GENERATED
        frame = frame.f_back
    return None, generated


def _is_generated(name: str) -> bool:
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return "torchinductor" in name or bool(cache and name.startswith(cache))


def _is_outside(name: str) -> bool:
    if name.startswith("<") or _is_generated(name):
        return False
    inside = [folder for folder in _INSIDE if name.startswith(folder)]
    # The longest folder decides: site-packages lies inside the standard library's folder.
    return not inside or (inside == [_STDLIB] and _INSTALLED in name)


def _line(code: CodeType, number: int) -> str:
    short = "/".join(Path(code.co_filename).parts[-2:])
    text = _LINES[id(code), number] = f"{short}:{number} in {code.co_name}"
    return text
