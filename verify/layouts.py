"""The same values in other memory layouts; gaps hold NaN so that a wrong address cannot look right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    name: str
    make: Callable[[torch.Tensor], torch.Tensor]


def _filler(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """`count` elements for the gaps: NaN, or for indices other legal indices in another order."""
    if tensor.is_floating_point():
        return torch.full((count,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    flat = tensor.reshape(-1).flip(0)
    return flat.repeat(-(-count // flat.numel()))[:count]


def _strided(tensor: torch.Tensor, strides: tuple[int, ...], offset: int = 0, tail: int = 0) -> torch.Tensor:
    span = offset + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + tail
    view = _filler(tensor, span).as_strided(tensor.shape, strides, offset)
    view.copy_(tensor)
    return view


def _dense_strides(shape: torch.Size, *, pad: int = 0, step: int = 1) -> tuple[int, ...]:
    strides, run = [], step
    for i, size in enumerate(reversed(shape)):
        strides.append(run)
        run *= size
        if i == 0:
            run += pad * step
    return tuple(reversed(strides))


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Last two axes stored the other way round; 1-D tensors keep their layout."""
    if tensor.ndim < 2:
        return tensor
    return tensor.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)


def row_sliced(tensor: torch.Tensor) -> torch.Tensor:
    """Columns out of a wider buffer of NaN: the row stride is larger than the row."""
    if tensor.ndim < 2:
        return tensor
    return _strided(tensor, _dense_strides(tensor.shape, pad=5), offset=2, tail=3)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """Every other element of a buffer of NaN: the last stride is 2."""
    return _strided(tensor, _dense_strides(tensor.shape, step=2))


def embedded(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, but in the middle of a buffer of NaN: reads outside it are seen."""
    margin = max(64, tensor.shape[-1] if tensor.ndim else 0)
    return _strided(tensor, _dense_strides(tensor.shape), offset=margin, tail=4 * margin)


def stride_zero(tensor: torch.Tensor) -> torch.Tensor:
    """One value expanded over the whole shape, as `loss.sum()` hands it to backward."""
    return tensor.reshape(-1)[:1].reshape([1] * tensor.ndim).expand(tensor.shape)


def row_expanded(tensor: torch.Tensor) -> torch.Tensor:
    """One row expanded over all rows, as a sum over the batch hands it to backward."""
    return tensor[:1].expand(tensor.shape) if tensor.ndim > 1 else stride_zero(tensor)


INPUT_LAYOUTS: tuple[Layout, ...] = (
    Layout(name="inputs transposed", make=transposed),
    Layout(name="inputs sliced from wider rows", make=row_sliced),
    Layout(name="inputs with last stride 2", make=every_other),
    Layout(name="inputs embedded in NaN", make=embedded),
)

GRAD_LAYOUTS: tuple[Layout, ...] = (
    Layout(name="grad_output transposed", make=transposed),
    Layout(name="grad_output sliced from wider rows", make=row_sliced),
    Layout(name="grad_output with last stride 2", make=every_other),
    Layout(name="grad_output expanded with stride 0", make=stride_zero),
    Layout(name="grad_output of one row expanded", make=row_expanded),
)
