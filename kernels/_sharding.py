"""DTensor in, DTensor out, for operators that treat rows or elements alone: the kernel sees local tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from bridge.errors import UsageError


def rowwise(function: Callable[..., torch.Tensor], x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
    """Call `function(x, *params)` on the local shards of `x`.

    Args:
        function: treats every row of the last axis alone and reads `params` whole.
        x: `[..., columns]`; as a DTensor it may be sharded over any axis but the last.
        params: plain tensors with a plain `x`, DTensors of the same mesh with a DTensor `x`.

    Returns:
        The result, with the placements of `x`; gradients of `params` are partial sums where `x` is sharded.
    """
    if not isinstance(x, DTensor):
        for param in params:
            if isinstance(param, DTensor):
                raise UsageError(
                    f"x and the parameters must all be DTensors or all plain, got plain x, {param.placements}"
                )
        return function(x, *params)
    placements = tuple(_keep_rows(placement, x.ndim) for placement in x.placements)
    reduced = tuple(Partial() if placement.is_shard() else Replicate() for placement in placements)
    whole = (Replicate(),) * len(placements)
    local = x.redistribute(placements=placements).to_local(grad_placements=placements)
    local_params = []
    for param in params:
        if not isinstance(param, DTensor):
            raise UsageError(
                "x and the parameters must all be DTensors or all plain, got DTensor x, plain parameter"
            )
        local_params.append(param.redistribute(placements=whole).to_local(grad_placements=reduced))
    return assemble(function(local, *local_params), x, placements)


def pointwise(
    function: Callable[..., torch.Tensor], first: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """Call `function` on the local shards of tensors of one shape that it combines element by element.

    Args:
        function: treats every element alone.
        first: its placements rule; a partial sum is added up first.
        others: like `first` in shape; redistributed to its placements.

    Returns:
        The result, with the placements of `first`.
    """
    if any(isinstance(tensor, DTensor) is not isinstance(first, DTensor) for tensor in others):
        raise UsageError("tensors combined element by element must all be DTensors or all plain, got both")
    if not isinstance(first, DTensor):
        return function(first, *others)
    placements = tuple(Replicate() if p.is_partial() else p for p in first.placements)
    local = [
        tensor.redistribute(placements=placements).to_local(grad_placements=placements)  # type: ignore[attr-defined]
        for tensor in (first, *others)
    ]
    return assemble(function(*local), first, placements)


def assemble(local: torch.Tensor, like: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """The DTensor of the shape and mesh of `like` that has `local` as its shard; shards may be uneven."""
    shape = like.shape
    strides = _contiguous_strides(shape)
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=shape, stride=strides
    )


def _keep_rows(placement: Placement, ndim: int) -> Placement:
    """The placement itself when rows stay whole under it, else Replicate."""
    if isinstance(placement, Shard) and placement.dim % ndim != ndim - 1:
        return placement
    return Replicate()


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides)
