"""What must agree before any number is compared: shape, dtype, device, and the places of NaN and Inf."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def meta_mismatch(target: torch.Tensor, reference: torch.Tensor) -> str | None:
    """Shape, dtype or device of `target` that differs from the reference's, in words; None when equal."""
    if tuple(target.shape) != tuple(reference.shape):
        return f"shape must be {tuple(reference.shape)} as the reference's, got {tuple(target.shape)}"
    if target.dtype != reference.dtype:
        return f"dtype must be {name_of(reference.dtype)} as the reference's, got {name_of(target.dtype)}"
    if target.device != reference.device:
        return f"device must be {reference.device} as the reference's, got {target.device}"
    return None


def name_of(dtype: torch.dtype) -> str:
    """ "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")


def nonfinite_mismatch(
    target: torch.Tensor,
    expected: torch.Tensor,
    reference: torch.Tensor,
    *,
    forgive_dropped_nan: bool,
    demand_inf: bool = False,
) -> tuple[str | None, torch.Tensor]:
    """Compare where NaN, +Inf and -Inf stand (FP64 tensors of one shape).

    Args:
        target: the kernel's result.
        expected: golden rounded to the target's dtype, so that a legal overflow is expected.
        reference: eager result; where its own non-finite places differ from golden's nothing is compared.
        forgive_dropped_nan: the inputs hold NaN or Inf on purpose; a kernel that swallows one where golden
            has NaN is not at fault (hardware max and min do), one that spreads it is.
        demand_inf: even then an infinity of golden must not become finite, or change its sign.

    Returns:
        The first mismatch in words (None: equal), and the mask of wrong elements.
    """
    found, wrong = first_mismatch(
        target, expected, reference, forgive_dropped_nan=forgive_dropped_nan, demand_inf=demand_inf
    )
    return (None if found is None else found.told(wrong.numel())), wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How many elements are not of golden's kind, and the first of them."""

    count: int
    got: str
    want: str
    where: tuple[int, ...]

    def told(self, total: int) -> str:
        """In words; total: elements in all."""
        return (
            f"{self.count} of {total} elements: {self.got} where golden is {self.want}, first at {self.where}"
        )


def first_mismatch(
    target: torch.Tensor,
    expected: torch.Tensor,
    reference: torch.Tensor,
    *,
    forgive_dropped_nan: bool,
    demand_inf: bool = False,
) -> tuple[Mismatch | None, torch.Tensor]:
    """As `nonfinite_mismatch`, in parts."""
    want, got, eager = _kinds(expected), _kinds(target), _kinds(reference)
    wrong = (want != got) & (eager == want)
    if forgive_dropped_nan:
        wrong &= (want == 0) | ((want > 1) & (got != 1)) if demand_inf else (want == 0)
    if not bool(wrong.any()):
        return None, wrong
    where = tuple(int(i) for i in wrong.nonzero()[0].tolist())
    names = ("finite", "NaN", "+Inf", "-Inf")
    found = Mismatch(
        count=int(wrong.sum()), got=names[int(got[where])], want=names[int(want[where])], where=where
    )
    return found, wrong


def _kinds(values: torch.Tensor) -> torch.Tensor:
    kinds = torch.zeros(values.shape, dtype=torch.int8, device=values.device)
    kinds[torch.isnan(values)] = 1
    kinds[torch.isposinf(values)] = 2
    kinds[torch.isneginf(values)] = 3
    return kinds
