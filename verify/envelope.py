"""Draws of the reference under legal rounding noise, and what they say about each element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bridge.verify.case import Case
from bridge.verify.execute import Result, run
from bridge.verify.noise import Noisy, noisy
from bridge.verify.spec import KernelSpec
from bridge.verify.ulp import is_low

#: Draws per case; large captured tensors get fewer, since their elements are statistics enough.
_DRAWS = 6
_DRAWS_LARGE = 3
_LARGE = 1 << 20
#: Draws where an element lies just outside the spread of the few.
DRAWS_SURE = 48


@dataclass(slots=True)
class Envelope:
    """Noise of one tensor before its last rounding.

    rms: root mean square distance of the draws from golden, FP64, per element; Inf where one was not finite.
    draws: the noisy reference's values as they round to the output dtype; kept for 16-bit outputs only.
    """

    rms: torch.Tensor
    draws: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, draws: Sequence[torch.Tensor], golden: torch.Tensor, dtype: torch.dtype) -> Envelope:
        """Envelope of FP64 values drawn around FP64 `golden`, for outputs of `dtype`."""
        gathered = Gathered.like(golden)
        for draw in draws:
            gathered.add(draw, golden, dtype)
        return gathered.envelope()


@dataclass(slots=True)
class Gathered:
    """Draws as they come, of which sums are kept: all at full width are most of a judgement's memory."""

    total: torch.Tensor
    count: int = 0
    low: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def like(cls, golden: torch.Tensor) -> Gathered:
        """Nothing yet, for draws around `golden`."""
        return cls(total=torch.zeros_like(golden, dtype=torch.float64))

    def add(self, draw: torch.Tensor, golden: torch.Tensor, dtype: torch.dtype) -> None:
        self.total += (draw - golden).square_()
        self.count += 1
        if is_low(dtype):
            self.low.append(draw.to(dtype))

    def envelope(self) -> Envelope:
        spread = (self.total / max(1, self.count)).sqrt_()
        return Envelope(rms=torch.nan_to_num(spread, nan=float("inf"), posinf=float("inf")), draws=self.low)


def surer_noise(
    spec: KernelSpec, case: Case, golden: Result, noise: dict[str, Envelope], *, seed: int
) -> dict[str, Envelope]:
    """`noise` with many more draws: of thousands of elements some have few draws that are all lucky.

    Only the spread grows, and only where it was underestimated; what the few draws are kept for stays.
    """
    return wider(noise, measure_noise(spec, case, golden, seed=seed + 1, draws=DRAWS_SURE))


def wider(noise: dict[str, Envelope], more: dict[str, Envelope]) -> dict[str, Envelope]:
    """`noise`, with the spread of `more` where that is larger."""
    return {
        name: Envelope(rms=torch.maximum(was.rms, more[name].rms), draws=was.draws) if name in more else was
        for name, was in noise.items()
    }


def draws_of(case: Case) -> int:
    """How many draws the envelope of a case is made of."""
    return _DRAWS if max(t.numel() for t in case.inputs) <= _LARGE else _DRAWS_LARGE


def measure_noise(
    spec: KernelSpec, case: Case, golden: Result, *, seed: int, draws: int | None = None
) -> dict[str, Envelope]:
    """Noise envelope of every output and gradient; {} when the reference returns something else then.

    Args:
        draws: how many runs to take; by size when None.
    """
    found: dict[str, Gathered] = {}
    exact = golden.named()
    device = case.inputs[0].device
    for number in range(draws or draws_of(case)):
        generator = torch.Generator(device=device).manual_seed(seed * 1009 + number)
        mode = Noisy(generator, stable=spec.kind != "elementwise")
        drawn = run(spec.reference, spec, case, context=noisy(mode))
        if isinstance(drawn, str):
            return {}
        for name, tensor in drawn.named().items():
            want = exact.get(name)
            if tensor is None or want is None or tensor.shape != want.shape or not tensor.is_floating_point():
                continue
            gathered = found.setdefault(name, Gathered.like(want))
            gathered.add(mode.unrounded(tensor), want, tensor.dtype)
    return {name: gathered.envelope() for name, gathered in found.items()}
