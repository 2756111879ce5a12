"""The line of the user's code that led here: the nearest frame outside torch, Triton and this tool."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
_triton = importlib.util.find_spec("triton")
if _triton is not None and _triton.origin is not None:
    _INSIDE = (*_INSIDE, str(Path(_triton.origin).parent))
_OUTSIDE: dict[CodeType, bool] = {}
_LINES: dict[tuple[CodeType, int], str] = {}


def source_line() -> str | None:
    """ "model.py:123 in forward", with one folder of the path before it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        outside = _OUTSIDE.get(code)
        if outside is None:
            name = code.co_filename
            outside = _OUTSIDE[code] = not name.startswith(_INSIDE)
        if outside:
            place = (code, frame.f_lineno)
            return _LINES.get(place) or _line(place)
        frame = frame.f_back
    return None


def _line(place: tuple[CodeType, int]) -> str:
    code, number = place
    short = "/".join(Path(code.co_filename).parts[-2:])
    text = _LINES[place] = f"{short}:{number} in {code.co_name}"
    return text
