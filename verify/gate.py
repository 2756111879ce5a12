"""The stated gate: five numbers per tensor, in FP64, and the inequality between them.

    target_error <= fudge_factor * reference_error + max(project_atol, rounding_floor)

It counts only while the reference itself is within `max_reference_relative_error` of golden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bridge.verify.ulp import round_to
from bridge.verify.verdict import Constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The numbers of one tensor; absolute errors are in the tensor's own unit."""

    reference_error: float
    target_error: float
    rounding_floor: float
    threshold: float
    reference_relative_error: float
    valid: bool

    @property
    def passes(self) -> bool:
        """Whether the inequality holds (it decides only when `valid`)."""
        return self.target_error <= self.threshold

    @property
    def ratio(self) -> float:
        """Error over threshold; 0 when both are 0."""
        if self.target_error == 0:
            return 0.0
        return self.target_error / self.threshold if self.threshold > 0 else float("inf")


def gate_of(errors: tuple[float, float, float, float], constants: Constants) -> Gate:
    """The gate from the four maxima that it is made of; `largest_errors` gives them."""
    reference_error, target_error, rounding_floor, size = errors
    absolute_floor = max(constants.project_atol, rounding_floor)
    scale = max(size, absolute_floor)
    relative = 0.0 if reference_error == 0 else (reference_error / scale if scale > 0 else float("inf"))
    return Gate(
        reference_error=reference_error,
        target_error=target_error,
        rounding_floor=rounding_floor,
        threshold=constants.fudge_factor * reference_error + absolute_floor,
        reference_relative_error=relative,
        valid=relative <= constants.max_reference_relative_error,
    )


def measure(
    golden: torch.Tensor,
    reference: torch.Tensor,
    target: torch.Tensor,
    *,
    dtype: torch.dtype,
    constants: Constants,
    keep: torch.Tensor | None = None,
) -> Gate:
    """Apply the gate to FP64 tensors of one shape.

    Args:
        golden, reference, target: FP64.
        dtype: the target's own dtype, for the rounding floor.
        constants: declared before the target ran.
        keep: elements that can be compared (all finite); None means all.
    """
    return gate_of(largest_errors(golden, reference, target, dtype=dtype, keep=keep), constants)


def largest_errors(
    golden: torch.Tensor,
    reference: torch.Tensor,
    target: torch.Tensor,
    *,
    dtype: torch.dtype,
    keep: torch.Tensor | None = None,
) -> tuple[float, float, float, float]:
    """Largest |reference - golden|, |target - golden|, rounding of golden, and |golden|; as in `measure`."""
    if keep is not None and not bool(keep.all()):
        golden, reference, target = golden[keep], reference[keep], target[keep]
    return (
        _largest(reference - golden),
        _largest(target - golden),
        _largest(round_to(golden, dtype) - golden) if dtype.is_floating_point else 0.0,
        _largest(golden),
    )


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
