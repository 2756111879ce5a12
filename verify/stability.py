"""Where golden itself jumps: ties, kinks and thresholds, at which more than one answer is legal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bridge.verify.bits import pieces
from bridge.verify.case import Case
from bridge.verify.execute import Result
from bridge.verify.golden import run_golden, widen
from bridge.verify.spec import KernelSpec

#: Relative move of the inputs, far below what FP32 resolves, and the relative jump that betrays a tie.
_MOVE, _JUMP = 1e-9, 1e-4
#: Discrete outputs may flip within what FP32 arithmetic can tell apart.
_MOVE_DISCRETE = 1e-6
#: Every move that is tried.
MOVES = (_MOVE, _MOVE, _MOVE_DISCRETE)


def unstable_elements(spec: KernelSpec, case: Case, golden: Result, *, seed: int) -> dict[str, torch.Tensor]:
    """Mask per tensor of the elements that change by far more than the inputs are moved."""
    masks: dict[str, torch.Tensor] = {}
    for number, move in enumerate(MOVES):
        generator = torch.Generator(device=case.inputs[0].device).manual_seed(seed * 7919 + number)
        moved = run_golden(
            spec, case, inputs=tuple(_moved(t, move * size_of(t), generator) for t in widen(case.inputs))
        )
        for name, other in moved.named().items():
            was = golden.named().get(name)
            jumped = None if was is None or other is None else jumps(was, other, move)
            if jumped is not None:
                masks[name] = masks[name] | jumped if name in masks else jumped
    return masks


def jumps(was: torch.Tensor, other: torch.Tensor, move: float) -> torch.Tensor | None:
    """Where golden jumped when the inputs were moved by `move`; None: that move tells nothing here."""
    if not was.is_floating_point():
        return other != was
    if move != _MOVE:
        return None
    scale = was.abs().amax() if was.ndim == 0 else was.abs().amax(dim=-1, keepdim=True)
    return (other - was).abs() > _JUMP * torch.maximum(was.abs(), 1e-2 * scale)


def moved_golden(
    spec: KernelSpec, block: Case, move: float, sizes: Sequence[float], seeds: Sequence[int]
) -> Result:
    """Golden of some rows of a case with inputs moved.

    Args:
        sizes: `size_of` each input of the whole case.
        seeds: one per input; equal ones move an input that belongs to all rows by the same.
    """
    device = block.inputs[0].device
    values = tuple(
        _moved(t, move * size, torch.Generator(device=device).manual_seed(seed))
        for t, size, seed in zip(widen(block.inputs), sizes, seeds, strict=True)
    )
    return run_golden(spec, block, inputs=values)


def size_of(tensor: torch.Tensor) -> float:
    """Root mean square, non-finite elements as 0; 1 where there is nothing else to go by."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 1.0
    total = 0.0
    for part in pieces(tensor):
        wide = part.to(torch.float64)
        total += float(torch.where(torch.isfinite(wide), wide, torch.zeros_like(wide)).square().sum())
    # As the mean of one piece has it, bit for bit.
    return math.sqrt(total / tensor.numel()) or 1.0


def _moved(tensor: torch.Tensor, by: float, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    shift = 2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=tensor.device) - 1
    return tensor + by * shift
