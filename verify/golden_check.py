"""Golden checks itself: FP64 is an oracle only where two orders of summation agree in it.

Every sum of golden is run front to back and back to front. A tensor with elements that differ by more than a
hundredth of a ULP of the judged dtype is recomputed with sums that round once (`math.fsum` over the terms,
products split into two FP64 parts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.verify.case import Case
from bridge.verify.execute import Result
from bridge.verify.formulas import spelled_out
from bridge.verify.golden import run_golden
from bridge.verify.spec import KernelSpec
from bridge.verify.ulp import ulp_of

#: ULP of the judged dtype within which two FP64 orders must agree.
AGREE = 0.01
#: Terms of one sum, over all its results, that are worth going through one by one.
_MOST_TERMS = 1 << 20
_SPLIT = float((1 << 27) + 1)


@dataclass(slots=True, kw_only=True)
class Doubt:
    """Elements of one tensor that depend on the order of FP64 sums.

    left: of those, how many still do after they were recomputed.
    refused: why they were not recomputed.
    """

    count: int
    left: int = 0
    refused: str = ""

    def told(self, name: str, total: int) -> str:
        """In words; total: elements of the tensor `name`."""
        text = f"golden: {self.count} of {total} elements of {name} depend on the order of FP64 sums"
        if self.refused:
            return f"{text}; not recomputed: {self.refused}"
        return f"{text}; all were recomputed with math.fsum" + (
            f"; {self.left} stay doubtful, since their terms round in FP64 too" if self.left else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Golden, what the same formula gives with its sums back to front, and where the two part.

    again: None where nothing is summed.
    """

    golden: Result
    again: Result | None
    doubts: dict[str, Doubt]


def checked_golden(spec: KernelSpec, case: Case, reference: Result) -> tuple[Result, tuple[str, ...]]:
    """Golden with its doubtful tensors recomputed, and what there is to say about them.

    Args:
        reference: gives the dtype that each tensor is judged in.

    Raises:
        SpecError: as `run_golden`.
    """
    eager = {name: like.dtype for name, like in reference.named().items() if like is not None}
    found = check_golden(spec, case, eager)
    wanted = found.golden.named()
    notes = []
    for name, doubt in found.doubts.items():
        tensor = wanted[name]
        assert tensor is not None
        notes.append(doubt.told(name, tensor.numel()))
    return found.golden, tuple(notes)


def check_golden(
    spec: KernelSpec, case: Case, dtypes: Mapping[str, torch.dtype], *, times: float = 1.0, refused: str = ""
) -> Checked:
    """Run golden in two orders and recompute what differs.

    Args:
        dtypes: of the tensors to check, as they are judged.
        times: how often sums as long as this case's occur in the whole of which it is a part.
        refused: why nothing is recomputed, when that is known already.

    Raises:
        SpecError: as `run_golden`.
    """
    golden = run_golden(spec, case)
    if spec.kind == "elementwise" and not spec.grads:
        return Checked(golden=golden, again=None, doubts={})
    again = run_golden(spec, case, under=_Sums(reverse=True))
    doubts = _doubts(golden, again, dtypes)
    if not doubts:
        return Checked(golden=golden, again=again, doubts={})
    found = {name: Doubt(count=int(mask.sum()), refused=refused) for name, mask in doubts.items()}
    if refused:
        return Checked(golden=golden, again=again, doubts=found)
    careful = _Sums(exact=True, times=times)
    better = run_golden(spec, case, under=careful)
    still = _doubts(
        better, run_golden(spec, case, under=_Sums(exact=True, reverse=True, times=times)), dtypes
    )
    for name, mask in doubts.items():
        found[name].refused = careful.refused
        if not careful.refused:
            _put(golden, better, name)
            found[name].left = int((still[name] & mask).sum()) if name in still else 0
    return Checked(golden=golden, again=again, doubts=found)


def _doubts(one: Result, other: Result, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Mask per tensor of the elements on which two goldens do not agree; tensors without any left out."""
    found: dict[str, torch.Tensor] = {}
    second = other.named()
    for name, first in one.named().items():
        again, dtype = second.get(name), dtypes.get(name)
        if first is None or again is None or dtype is None or first.shape != again.shape:
            continue
        if not dtype.is_floating_point or not first.is_floating_point():
            continue
        mask = disagree(first, again, dtype)
        if bool(mask.any()):
            found[name] = mask
    return found


def disagree(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where two FP64 tensors are further apart than golden's orders may be, judged in `dtype`."""
    gap = (one - other).abs()
    return torch.isfinite(gap) & (gap > AGREE * ulp_of(torch.nan_to_num(one), dtype))


def _put(golden: Result, better: Result, name: str) -> None:
    """Take a whole tensor over: where some elements depend on the order, others agree by luck."""
    if name in golden.outputs:
        golden.outputs[name] = better.outputs[name]
    else:
        golden.grads[name.removeprefix("grad_")] = better.grads[name.removeprefix("grad_")]


class _Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs sums and products of matrices in reverse order, or rounding once.

    Args:
        times: how often each sum occurs in the whole that this is a part of.
    """

    def __init__(self, *, reverse: bool = False, exact: bool = False, times: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reverse, self._exact, self._times = reverse, exact, times
        self.refused = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        spelled = spelled_out(self, func, args, kwargs)
        if spelled is not NotImplemented:
            return spelled
        name = str(func.name()).removeprefix("aten::").split(".")[0]
        if name in ("sum", "mean") and args[0].is_floating_point() and args[0].ndim:
            return self._sum(func, name, args, kwargs)
        if name in ("mm", "bmm") and args[0].is_floating_point():
            return self._product(func, args, kwargs)
        return func(*args, **kwargs)

    def _sum(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        values: torch.Tensor = args[0]
        given = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else kwargs.get("dim")
        dims = [d % values.ndim for d in given] if given else list(range(values.ndim))
        if self._reverse:
            values = values.flip(dims)
        out = func(values, *args[1:], **kwargs)
        if not self._exact:
            return out
        last = list(range(values.ndim - len(dims), values.ndim))
        terms = values.movedim(dims, last).reshape(out.numel(), -1)
        total = self._rounded_once(terms, out)
        if total is None:
            return out
        return total / terms.shape[1] if name == "mean" else total

    def _product(self, func: Any, args: Any, kwargs: Any) -> Any:
        left, right = args[0], args[1]
        if self._reverse:
            left, right = left.flip(-1), right.flip(-2)
        out = func(left, right, *args[2:], **kwargs)
        if not self._exact:
            return out
        if self._too_many(2 * out.numel() * left.shape[-1]):
            return out
        a, b = left.unsqueeze(-2), right.transpose(-1, -2).unsqueeze(-3)
        product = a * b
        terms = torch.cat((product, _lost(a, b, product)), -1)
        total = self._rounded_once(terms.reshape(out.numel(), -1), out)
        return out if total is None else total

    def _rounded_once(self, terms: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """Sums of the rows of [n, terms], each rounded once, in the shape of `like`."""
        if self._too_many(terms.numel()):
            return None
        if not bool(torch.isfinite(terms).all()) or terms.dtype != torch.float64:
            return None
        sums = [math.fsum(row) for row in terms.tolist()]
        return torch.tensor(sums, dtype=torch.float64, device=like.device).reshape(like.shape)

    def _too_many(self, terms: int) -> bool:
        count = round(self._times * terms)
        if count > _MOST_TERMS:
            self.refused = f"a sum has {count} terms in all, more than {_MOST_TERMS}"
        return count > _MOST_TERMS


def _lost(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """What rounding took from the FP64 products `a * b`, exactly (Dekker's splitting)."""
    a_high, b_high = _high(a), _high(b)
    a_low, b_low = a - a_high, b - b_high
    return a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _high(x: torch.Tensor) -> torch.Tensor:
    scaled = x * _SPLIT
    return scaled - (scaled - x)
