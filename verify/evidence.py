"""One judged case with everything that was computed on it, and how far two results are apart on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bridge.verify.case import Case
from bridge.verify.envelope import Envelope
from bridge.verify.execute import Result
from bridge.verify.ulp import is_low, smallest_normal, ulp_of
from bridge.verify.verdict import TensorVerdict


@dataclass(slots=True, kw_only=True)
class Evidence:
    """One judged case with everything that was computed on it."""

    case: Case
    golden: Result
    reference: Result
    target: Result
    noise: dict[str, Envelope]
    tensors: Sequence[TensorVerdict]

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(t.tensor for t in self.tensors if t.verdict == "FAIL")

    def scale(self, name: str) -> torch.Tensor:
        """What counts as no difference for tensor `name`: a fraction of a ULP and the legal noise."""
        golden = self.golden.named()[name]
        like = self.reference.named()[name]
        assert golden is not None and like is not None
        golden = torch.nan_to_num(golden.to(torch.float64), nan=0.0, posinf=0.0, neginf=0.0)
        unit = ulp_of(golden, like.dtype) * (0.5 if is_low(like.dtype) else 1.0) + smallest_normal(like.dtype)
        noise = self.noise.get(name)
        return unit + (torch.nan_to_num(noise.rms, nan=0.0, posinf=0.0) if noise is not None else 0.0)


def misfit(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> float:
    """Typical distance in units of `scale`; large outliers count by their logarithm."""
    x, y = a.to(torch.float64), b.to(torch.float64)
    distance = (x - y).abs() / scale
    same = (torch.isnan(x) & torch.isnan(y)) | (x == y)
    distance = torch.where(same, torch.zeros_like(distance), distance)
    distance = torch.nan_to_num(distance, nan=1e9, posinf=1e9)
    return float(torch.log1p(distance).square().mean().sqrt()) if distance.numel() else 0.0
