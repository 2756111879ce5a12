"""The legal noise envelope: how far a correct kernel may land from golden, element by element.

The reference is run several times with a random rounding error put on every operation: one unit on
plain arithmetic, more on transcendental functions, and on sums what a sequential FP32 sum in a random
order would make. Results are kept as they were before their last rounding to 16 bits, the one rounding
that every implementation shares. Data movement is exact and stays exact.

The spread of those runs needs no luck of a single reference draw and knows where the formula is
ill-conditioned: it replaces a tolerance that somebody would have to pick.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from bridge.verify.formulas import spelled_out
from bridge.verify.golden import plain_math
from bridge.verify.lse import recomputed
from bridge.verify.rounding import running_sum_noise
from bridge.verify.ulp import is_low, ulp_of, unit_roundoff

aten = torch.ops.aten

#: Exact by definition: they move, choose, compare or negate values.
_EXACT = frozenset(
    """
    abs alias amax amin any all arange argmax argmin argsort bitwise_and bitwise_not bitwise_or
    bitwise_xor cat ceil clamp clamp_max clamp_min clone concat constant_pad_nd copy copysign
    cummax cummin detach diagonal diagonal_scatter embedding empty empty_like empty_strided eq
    expand expand_copy eye fill flip floor full full_like gather ge gt index index_put
    index_select is_same_size isinf isnan isfinite le lift_fresh lift_fresh_copy linspace
    logical_and logical_not logical_or logical_xor lt masked_fill masked_scatter masked_select
    max max_pool2d_with_indices maximum median min minimum ne neg new_empty new_empty_strided
    new_full new_ones new_zeros nonzero one_hot ones ones_like permute relu repeat
    repeat_interleave roll round scalar_tensor scatter searchsorted select select_backward
    select_scatter sgn sign slice slice_backward slice_scatter sort squeeze stack t threshold
    threshold_backward topk transpose tril triu trunc unfold unsqueeze unsqueeze_copy
    value_selecting_reduction_backward view_as_real view_as_complex where zero zeros zeros_like
    _local_scalar_dense _reshape_alias _to_copy _unsafe_view alias_copy bincount bucketize frexp
    ldexp nextafter set resize view reshape _conj
    """.split()
)

#: Units of relative noise where hardware functions are allowed to be off by more than one rounding.
_WIDE = frozenset(
    """exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sigmoid erf erfc erfinv rsqrt pow lgamma digamma
    atan atan2 asin acos sinh cosh asinh acosh atanh logaddexp logaddexp2 logsumexp reciprocal sqrt div
    softplus gelu silu mish elu""".split()
)
_WIDE_UNITS = 4.0


#: Called inside composed ops; of torch's own kind of view, but a copy where there is something to do.
_MAY_COPY = frozenset(
    {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.reshape.default}
)


def base_name(func: Any) -> str:
    """ "add" for aten::add.Tensor and aten::add_.Tensor."""
    name = str(func.name()).split("::")[1].split(".")[0]
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def is_exact(func: Any) -> bool:
    """Whether `func` moves values without computing new ones."""
    return func.name().startswith("aten::") and (base_name(func) in _EXACT or func.is_view)


class Noisy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every op with random legal rounding errors; see the module's text.

    Args:
        generator: of the noise.
        stable: also move what comes straight from the inputs by one FP32 rounding where arithmetic reads
            it: a result that is right for inputs that close is right by the usual standard.
    """

    def __init__(self, generator: torch.Generator, *, stable: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator
        self._stable = stable
        self.lse: dict[int, torch.Tensor] = {}  #: storage address of a softmax -> |logsumexp| of its rows
        self._computed: set[int] = set()  #: storage addresses that hold results of arithmetic
        # storage address -> value before the rounding to 16 bits that last wrote there
        self._unrounded: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        spelled = recomputed(self, self, func, args)
        if spelled is NotImplemented:
            spelled = spelled_out(self, func, args, kwargs)
        if spelled is not NotImplemented:
            return spelled
        exact = is_exact(func)
        if self._stable and not exact:
            args = tree_map(self._jittered, args)
        out = func(*args, **kwargs)
        if func.is_view:
            if func in _MAY_COPY:
                self._copied(out, args)
            return out
        computed = not exact or self._any_computed(args)
        out = tree_map(lambda o: self._noisy(func, args, kwargs, o), out)
        for item in tree_leaves(out):
            if isinstance(item, torch.Tensor):
                address = item.untyped_storage().data_ptr()
                (self._computed.add if computed else self._computed.discard)(address)
        return out

    def _any_computed(self, args: Any) -> bool:
        return any(
            isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() in self._computed
            for a in tree_leaves(args)
        )

    def _copied(self, out: Any, args: Any) -> None:
        """Note where a result lies that may be a view and is none: `to` inside a composed op copies."""
        address = out.untyped_storage().data_ptr() if isinstance(out, torch.Tensor) else 0
        read = [a.untyped_storage().data_ptr() for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
        if address and address not in read:
            (self._computed.add if self._any_computed(args) else self._computed.discard)(address)

    def _jittered(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or value.ndim == 0:
            return value
        if value.untyped_storage().data_ptr() in self._computed or not value.numel():
            return value
        roundoff = unit_roundoff(torch.float32)
        moved = value.to(torch.float64) * (1.0 + 2.0 * roundoff * (2.0 * self._uniform(value) - 1.0))
        return moved.to(torch.float32)

    def unrounded(self, result: torch.Tensor) -> torch.Tensor:
        """`result` in FP64 before its last rounding to a 16-bit type; itself where there was none."""
        wide = self._unrounded.get(result.untyped_storage().data_ptr())
        if wide is None:
            return result.to(torch.float64)
        return wide.as_strided(result.shape, result.stride(), result.storage_offset())

    def _noisy(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not out.dtype.is_floating_point or not out.numel():
            return out
        in_place = any(out is a for a in tree_leaves(args))
        exact = is_exact(func)
        if func is aten._to_copy.default and _narrows(args[0].dtype, out.dtype):
            return self._rounded(args[0].to(torch.float64), out)
        if exact or in_place:
            self._unrounded.pop(out.untyped_storage().data_ptr(), None)
        if exact:
            return out
        units = _WIDE_UNITS if base_name(func).removesuffix("_backward") in _WIDE else 1.0
        wide = out
        if is_low(out.dtype) and not in_place:
            # A 16-bit op computes in FP32 and rounds once: that rounding is a cast like any other.
            wide = func(*tree_map(_to_fp32, args), **tree_map(_to_fp32, kwargs))
            if not isinstance(wide, torch.Tensor) or wide.shape != out.shape or wide.dtype != torch.float32:
                wide = out
        roundoff = unit_roundoff(torch.float32 if is_low(wide.dtype) else wide.dtype)
        value = wide.to(torch.float64)
        noise = value.abs() * (2.0 * units * roundoff) * (2.0 * self._uniform(value) - 1.0)
        summing = self._summing(func, args, kwargs, value)
        if summing is not None:
            noise = noise + roundoff * summing * self._normal(value)
        value = torch.where(torch.isfinite(value), value + noise, value)
        if is_low(out.dtype) and not in_place:
            return self._rounded(value, out)
        result = value.to(out.dtype)
        if in_place:
            return out.copy_(result)
        self._unrounded.pop(result.untyped_storage().data_ptr(), None)
        return result

    def _rounded(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """FP64 `value` rounded at random to the type of `like`, in its layout; what was lost is kept."""
        if not is_low(like.dtype):
            result = value.to(like.dtype)
            self._unrounded.pop(result.untyped_storage().data_ptr(), None)
            return result
        moved = value + ulp_of(value, like.dtype) * (self._uniform(value) - 0.5)
        result = torch.empty_like(like).copy_(moved)
        kept = torch.empty_strided(result.shape, result.stride(), dtype=torch.float64, device=result.device)
        self._unrounded[result.untyped_storage().data_ptr()] = kept.copy_(value)
        return result

    def _summing(self, func: Any, args: Any, kwargs: Any, value: torch.Tensor) -> torch.Tensor | None:
        """What the order of a sum may cost each element of `value`, over unit roundoff; None: no sum."""
        return running_sum_noise(func, args, kwargs, value)

    def _source(self) -> torch.Generator:
        return self._generator

    def _uniform(self, like: torch.Tensor) -> torch.Tensor:
        return torch.rand(like.shape, generator=self._source(), dtype=torch.float64, device=like.device)

    def _normal(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self._source(), dtype=torch.float64, device=like.device)


def _narrows(source: torch.dtype, to: torch.dtype) -> bool:
    if not source.is_floating_point or not to.is_floating_point:
        return False
    return torch.finfo(to).eps > torch.finfo(source).eps


def tree_leaves(tree: Any) -> list[Any]:
    """Leaves of nested tuples, lists and dicts."""
    from torch.utils._pytree import tree_leaves as leaves

    return list(leaves(tree))


def _to_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and is_low(value.dtype):
        return value.to(torch.float32)
    if isinstance(value, torch.dtype) and value.is_floating_point and is_low(value):
        return torch.float32
    return value


@contextmanager
def noisy(mode: Noisy) -> Iterator[None]:
    """`mode` with attention in its plain formula."""
    with plain_math(), mode:
        yield
