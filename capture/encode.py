"""Arguments of a call as data: its tensors by path, everything else as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

#: Calls back with the path and the tensor at it.
Visit = Callable[[str, torch.Tensor], None]


def split_arguments(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], visit: Visit
) -> dict[str, Any]:
    """Give every tensor to `visit`, in order, and return the other arguments by name.

    A positional tensor's path is its position, "0"; one in a list is "0.2"; one given by name is that
    name. A list that mixes tensors and None leaves {"tensors": [true, false, ...]} among the attributes.
    """
    attrs: dict[str, Any] = {}
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            visit(str(position), value)
        elif value is not None:
            name = names[position] if position < len(names) else str(position)
            _split(str(position), name, value, visit, attrs)
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            visit(name, value)
        elif value is not None:
            _split(name, name, value, visit, attrs)
    return attrs


def _split(path: str, name: str, value: Any, visit: Visit, attrs: dict[str, Any]) -> None:
    if isinstance(value, (list, tuple)) and any(
        isinstance(item, (torch.Tensor, list, tuple)) for item in value
    ):
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                visit(f"{path}.{index}", item)
            elif item is not None:
                _split(f"{path}.{index}", f"{name}.{index}", item, visit, attrs)
        if any(item is None for item in value):
            attrs[name] = {"tensors": [item is not None for item in value]}
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, torch.Tensor):
                visit(f"{path}.{key}", item)
            elif item is not None:
                _split(f"{path}.{key}", f"{name}.{key}", item, visit, attrs)
    else:
        attrs[name] = plain(value)


def visit_tensors(value: Any, visit: Visit, path: str = "") -> None:
    """Give every tensor in nested tuples, lists, dicts and dataclasses to `visit`; a bare one is "0"."""
    if isinstance(value, torch.Tensor):
        visit(path or "0", value)
    elif isinstance(value, dict):
        for key, item in value.items():
            visit_tensors(item, visit, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            visit_tensors(item, visit, f"{path}.{index}" if path else str(index))
    elif hasattr(value, "__dataclass_fields__"):
        for key in value.__dataclass_fields__:
            visit_tensors(getattr(value, key, None), visit, f"{path}.{key}" if path else key)


def plain(value: Any) -> Any:
    """A value as JSON holds it; what JSON lacks is tagged, {"float": "-inf"}, {"dtype": "bfloat16"}."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        # JSON readers differ beyond 64 bits; such an integer is no argument of an operator.
        return value if -(1 << 63) <= value < (1 << 64) else {"int": str(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, complex):
        return {"complex": [plain(value.real), plain(value.imag)]}
    for kind, tag in _TAGGED:
        if isinstance(value, kind):
            return {tag: str(value).removeprefix("torch.")}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {"symbol": str(value)}
    # A process group, a generator, a callable: named by type, since its text may be as long as it likes.
    return {"object": type(value).__name__}


_NAMED = (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format))
_TAGGED = (*((kind, tag) for tag, kind in _NAMED), (torch.device, "device"))


def unplain(value: Any) -> Any:
    """The argument that `plain` made into data.

    Raises:
        ValueError: a tagged object that cannot be made again (a process group, a generator).
    """
    if isinstance(value, list):
        return [unplain(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, text),) = value.items()
    if tag == "float":
        return float(text)
    if tag == "int":
        return int(text)
    if tag == "complex":
        return complex(unplain(text[0]), unplain(text[1]))
    if tag == "device":
        return torch.device(text)
    if tag in ("dtype", "layout", "memory_format"):
        found = getattr(torch, str(text), None)
        if isinstance(found, dict(_NAMED)[tag]):
            return found
    raise ValueError(f"argument {value} cannot be rebuilt from a capture")
