"""Are two tensors the same to the bit, and does one still hold what it held? Without copies of large ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Elements that are looked at at once.
_PIECE = 1 << 17
#: Odd, so that multiplying by it modulo 2^64 loses nothing: 2^64 over the golden ratio.
_WEIGHT = -7046029254386353131
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OverwrittenError(Exception):
    """What a tensor held is gone, and only a mark of it was kept."""


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in views of at most `_PIECE` elements, so that what is made of them stays small."""
    if tensor.numel() <= _PIECE or not tensor.ndim:
        yield tensor
        return
    axis = max(range(tensor.ndim), key=lambda a: tensor.shape[a])
    count = max(1, tensor.shape[axis] * _PIECE // tensor.numel())
    yield from torch.split(tensor, count, dim=axis)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return not tensor.is_floating_point() or all(bool(torch.isfinite(p).all()) for p in pieces(tensor))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes and values, NaN equal to NaN; meta tensors, which have no values, are the same."""
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return a.shape == b.shape and a.is_meta and b.is_meta
    return all(
        bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in zip(pieces(a), pieces(b), strict=True)
    )


def mark(tensor: torch.Tensor, *, clone: bool) -> torch.Tensor | int:
    """What `as_marked` needs later: a copy, or of a large tensor a checksum that sees bits and places."""
    if clone or tensor.is_meta or tensor.numel() <= _PIECE or tensor.element_size() not in _SAME_SIZE:
        return tensor.clone()
    return _checksum(tensor)


def is_marked(tensor: torch.Tensor, what: torch.Tensor | int) -> bool:
    """Whether the tensor holds what was marked."""
    return same_bits(tensor, what) if isinstance(what, torch.Tensor) else _checksum(tensor) == what


def as_marked(tensor: torch.Tensor, what: torch.Tensor | int) -> torch.Tensor:
    """What the tensor held when it was marked.

    Raises:
        OverwrittenError: it holds something else by now, and no copy was made.
    """
    if isinstance(what, torch.Tensor):
        return what
    if _checksum(tensor) != what:
        raise OverwrittenError
    return tensor


def _checksum(tensor: torch.Tensor) -> int:
    total = 0
    for number, part in enumerate(pieces(tensor)):
        words = part.contiguous().view(_SAME_SIZE[part.element_size()]).reshape(-1).to(torch.int64)
        weights = torch.arange(words.numel(), device=words.device).mul_(2).add_(1).mul_(_WEIGHT)
        total = total * 31 + int((words * weights).sum()) + number
    return total
