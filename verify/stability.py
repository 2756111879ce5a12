"""Where golden itself jumps: ties, kinks and thresholds, at which more than one answer is legal."""

from __future__ import annotations

import torch

from bridge.verify.case import Case
from bridge.verify.execute import Result
from bridge.verify.golden import run_golden, widen
from bridge.verify.spec import KernelSpec

#: Relative move of the inputs, far below what FP32 resolves, and the relative jump that betrays a tie.
_MOVE, _JUMP = 1e-9, 1e-4
#: Discrete outputs may flip within what FP32 arithmetic can tell apart.
_MOVE_DISCRETE = 1e-6


def unstable_elements(spec: KernelSpec, case: Case, golden: Result, *, seed: int) -> dict[str, torch.Tensor]:
    """Mask per tensor of the elements that change by far more than the inputs are moved."""
    masks: dict[str, torch.Tensor] = {}
    for number, move in enumerate((_MOVE, _MOVE, _MOVE_DISCRETE)):
        generator = torch.Generator(device=case.inputs[0].device).manual_seed(seed * 7919 + number)
        moved = run_golden(spec, case, inputs=tuple(_moved(t, move, generator) for t in widen(case.inputs)))
        for name, other in moved.named().items():
            was = golden.named().get(name)
            if was is None or other is None:
                continue
            discrete = not was.is_floating_point()
            if discrete:
                jumped = other != was
            elif move != _MOVE:
                continue
            else:
                scale = was.abs().amax() if was.ndim == 0 else was.abs().amax(dim=-1, keepdim=True)
                jumped = (other - was).abs() > _JUMP * torch.maximum(was.abs(), 1e-2 * scale)
            masks[name] = masks[name] | jumped if name in masks else jumped
    return masks


def _moved(tensor: torch.Tensor, move: float, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    finite = torch.where(torch.isfinite(tensor), tensor, torch.zeros_like(tensor))
    size = float(finite.square().mean().sqrt()) or 1.0
    shift = 2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=tensor.device) - 1
    return tensor + move * size * shift
