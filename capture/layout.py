"""How a strided tensor lies in its storage. Arithmetic on shapes and strides; imports no torch.

A blob and a digest cover the *distinct* elements of a tensor in the order they have in memory. That
way `x`, `x.t()` and `x.view(-1)` are one blob, and a slice with gaps costs only what it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Canonical form of (shape, stride).

    sizes, strides: dimensions with more than one element and a stride, largest stride first.
    order: which dimension of the tensor each of them is.
    count: number of distinct elements; `prod(sizes)`.
    span: elements from the first to the last one touched, both included; 0 when empty.
    dense: the distinct elements lie one after the other, without gaps.
    overlapping: some elements are seen at more than one index other than by stride 0.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]
    count: int
    span: int
    dense: bool
    overlapping: bool


@lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> Layout:
    """Canonical form of a layout; strides are non-negative, as torch's are."""
    if prod(shape) == 0:
        return Layout(sizes=(0,), strides=(1,), order=(), count=0, span=0, dense=True, overlapping=False)
    kept = [
        (step, dim)
        for dim, (size, step) in enumerate(zip(shape, stride, strict=True))
        if size > 1 and step > 0
    ]
    kept.sort(key=lambda pair: (-pair[0], pair[1]))
    order = tuple(dim for _, dim in kept)
    sizes = tuple(shape[dim] for dim in order)
    strides = tuple(step for step, _ in kept)
    dense, overlapping, reach = True, False, 1
    for size, step in zip(reversed(sizes), reversed(strides), strict=True):
        dense = dense and step == reach
        overlapping = overlapping or step < reach
        reach = step * (size - 1) + reach
    return Layout(
        sizes=sizes,
        strides=strides,
        order=order,
        count=prod(sizes),
        span=reach,
        dense=dense,
        overlapping=overlapping,
    )


def memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions from slowest to fastest in memory, without those of size 1 or stride 0.

    Two tensors of one shape whose orders agree have equal contents exactly when their hashes agree
    (up to a collision of the 64-bit hash).
    """
    return layout_of(shape, stride).order


def is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """The elements lie in memory in the order of their indices, each once, without gaps."""
    layout = layout_of(shape, stride)
    return layout.dense and layout.count == prod(shape) and layout.order == tuple(sorted(layout.order))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of a shape, as torch gives them."""
    steps, reach = [], 1
    for size in reversed(shape):
        steps.append(reach)
        reach *= max(size, 1)
    return tuple(reversed(steps))
