"""Draws of the reference under legal rounding noise, and what they say about each element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bridge.verify.case import Case
from bridge.verify.execute import run
from bridge.verify.noise import Noisy, noisy
from bridge.verify.spec import KernelSpec

#: Draws per case; large captured tensors get fewer, since their elements are statistics enough.
_DRAWS = 6
_DRAWS_LARGE = 3
_LARGE = 1 << 21


@dataclass(slots=True)
class Envelope:
    """Noise of one tensor before its last rounding.

    draws: the noisy reference's values, FP64, before the cast to the output dtype.
    """

    draws: list[torch.Tensor]

    def rms(self, golden: torch.Tensor) -> torch.Tensor:
        """Root mean square distance from golden, per element; Inf where a draw was not finite."""
        total = torch.zeros_like(golden)
        for draw in self.draws:
            total += (draw - golden) ** 2
        spread = torch.sqrt(total / max(1, len(self.draws)))
        return torch.where(torch.isnan(spread), torch.full_like(spread, float("inf")), spread)


def measure_noise(spec: KernelSpec, case: Case, *, seed: int) -> dict[str, Envelope]:
    """Noise envelope of every output and gradient; {} when the reference returns something else then."""
    names: dict[str, Envelope] = {}
    device = case.inputs[0].device
    size = max(t.numel() for t in case.inputs)
    for number in range(_DRAWS if size <= _LARGE else _DRAWS_LARGE):
        generator = torch.Generator(device=device).manual_seed(seed * 1009 + number)
        mode = Noisy(generator, stable=spec.kind != "elementwise")
        drawn = run(spec.reference, spec, case, context=noisy(mode))
        if isinstance(drawn, str):
            return {}
        for name, tensor in drawn.named().items():
            if tensor is not None and tensor.is_floating_point():
                names.setdefault(name, Envelope(draws=[])).draws.append(mode.unrounded(tensor))
    return names
