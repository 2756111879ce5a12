"""Exact probes: inputs on which every legal implementation computes the same bits.

With small integers (and powers of two, where something divides) all intermediate values of a linear formula
are exactly representable, so that no order of summation and no FP32 accumulator can change anything: one
element that differs is a bug, not rounding. Which tensors are exact in that sense is found by running the
reference op by op; whatever passes through a root, an exponential or a division that does not come out even
is left to the other checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bridge.verify.case import Case
from bridge.verify.execute import run
from bridge.verify.formulas import spelled_out
from bridge.verify.golden import plain_math
from bridge.verify.noise import is_exact
from bridge.verify.spec import KernelSpec
from bridge.verify.sweeps import roles

FAMILY = "exact integers"
#: FP32 holds every integer up to here, in units of the grid that the terms lie on.
_LARGEST = float(1 << 24)
#: Finest grid that values are looked for on: multiples of 2^-12.
_FINEST = 12
_SINGLE = frozenset({"add", "sub", "rsub", "mul", "square", "pow", "div", "mean"})
_SUMS = frozenset({"sum", "mean", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "cumsum", "index_add"})
_SCATTERS = frozenset({"scatter_add", "embedding_dense_backward"})


class Exactness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs plain ops and remembers whose results another legal order or formula could not change."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inexact: set[int] = set()  #: storage addresses
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        spelled = spelled_out(self, func, args, kwargs)
        if spelled is not NotImplemented:
            return spelled
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        tainted = any(self.tainted(a) for a in tree_leaves((args, kwargs)))
        for item in tree_leaves(out):
            if not isinstance(item, torch.Tensor) or not item.is_floating_point():
                continue
            self._alive.append(item)  # an address must not come to mean another tensor
            if tainted or not _comes_out_even(func, args, kwargs, item):
                self._inexact.add(item.untyped_storage().data_ptr())
        return out

    def tainted(self, value: Any) -> bool:
        """Whether a tensor holds something that rounding had a part in."""
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._inexact


def exact_tensors(spec: KernelSpec, case: Case) -> frozenset[str]:
    """Names of the outputs and gradients that are exact on these inputs."""
    mode = Exactness()
    with plain_math():
        result = run(spec.reference, spec, case, context=mode)
    if isinstance(result, str):
        return frozenset()
    return frozenset(
        name
        for name, t in result.named().items()
        if t is not None
        and t.is_floating_point()
        and not mode.tainted(t)
        and bool(torch.isfinite(t).all())
        and bool((t != 0).any())
    )


def _comes_out_even(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> bool:
    name = str(func.name()).split("::")[1].split(".")[0].rstrip("_")
    if name == "_to_copy" or name == "copy":
        source = args[1] if name == "copy" else args[0]
        return bool((source.to(torch.float64) == out.to(torch.float64)).all())
    if is_exact(func):
        return True
    if name not in _SINGLE | _SUMS | _SCATTERS or not func.name().startswith("aten::"):
        return False
    if name == "pow" and not (isinstance(args[1], int | float) and args[1] in (1, 2, 3)):
        return False
    if name == "div" and not _powers_of_two(args[1]):
        return False
    wide, options = tree_map(_wide, args), tree_map(_wide, kwargs)
    if any(out is a for a in tree_leaves(args)):
        return False  # in place: the operand is gone, and with it what to compare with
    exact = func(*wide, **options)
    if not bool(torch.isfinite(exact).all()) or not bool((exact == out.to(torch.float64)).all()):
        return False
    if name in _SUMS | _SCATTERS:
        return _any_order(name, func, wide, options, exact)
    return True


def _any_order(name: str, func: Any, wide: Any, options: Any, exact: torch.Tensor) -> bool:
    """Whether the sum of magnitudes fits FP32 on the grid of the terms, so that every order is exact."""
    grids = [_grid(a) for a in tree_leaves(wide) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    if any(g is None for g in grids):
        return False
    grid = 1.0
    for g in grids:
        grid *= min(1.0, g or 1.0)
    sizes = func(*tree_map(_magnitude, wide), **options)
    if name == "mean":
        terms = max(t.numel() for t in wide if isinstance(t, torch.Tensor)) // max(1, exact.numel())
        if terms & (terms - 1):
            return False
        sizes = sizes * terms
    return bool((sizes <= _LARGEST * grid).all())


def _grid(values: torch.Tensor) -> float | None:
    """Largest power of two, 1 at most, that all values are multiples of; None where that is too fine."""
    for bits in range(0, _FINEST + 1, 4):
        scaled = values * float(1 << bits)
        if bool((scaled == scaled.round()).all()):
            return 2.0**-bits
    return None


def _powers_of_two(value: Any) -> bool:
    tensor = torch.as_tensor(value).to(torch.float64)
    return bool((torch.frexp(tensor)[0].abs() == 0.5).all())


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(torch.float64)
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value


def _magnitude(value: Any) -> Any:
    return value.abs() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def exact_cases(
    spec: KernelSpec, start: Case, generator: torch.Generator, draw: Callable[[tuple[int, ...]], Case | None]
) -> Iterator[Case]:
    """Cases of integers, where some tensor is exact on them; none for formulas that always round.

    Args:
        start: a drawn case that gives shapes, dtypes and attributes.
        generator: of the integers.
        draw: makes a case of another shape, for means that come out even over powers of two only.
    """
    best, exact = start, _exact_of(spec, _small(start, generator))
    names = len(spec.outputs) + len(spec.grads)
    if len(exact) < names:
        shape = max((tuple(t.shape) for t in start.inputs), key=len)
        even = draw(tuple(1 << (n.bit_length() - 1) for n in shape))
        if even is not None and len(found := _exact_of(spec, _small(even, generator))) > len(exact):
            best, exact = even, found
    made = [("small integers", _small(best, generator))]
    made.append(("large integers in the first input", _large(best, generator, grads=False)))
    if best.grad_outputs:
        made.append(("large integers in grad_output", _large(best, generator, grads=True)))
    for label, case in made:
        if _exact_of(spec, case):
            yield replace(case, name=f"{best.name}, {label}", family=FAMILY)


def _exact_of(spec: KernelSpec, case: Case) -> frozenset[str]:
    try:
        return exact_tensors(spec, case)
    except Exception:  # a reference that refuses these values says so when its own inputs are judged
        return frozenset()


def _small(case: Case, generator: torch.Generator) -> Case:
    """Every floating value out of -2, -1, 1, 2: integers, and powers of two to divide by."""
    return _filled(case, lambda t: _chosen(t, (-2.0, -1.0, 1.0, 2.0), generator), lambda t: t, all_of=True)


def _large(case: Case, generator: torch.Generator, *, grads: bool) -> Case:
    """One operand of odd integers as long as its dtype holds (12 bits at most), the others small."""

    def large(tensor: torch.Tensor) -> torch.Tensor:
        top = 2 ** min(12, 1 + round(-torch.log2(torch.tensor(torch.finfo(tensor.dtype).eps)).item()))
        drawn = torch.randint(0, top, tensor.shape, generator=generator, device=tensor.device)
        odd: torch.Tensor = 2 * drawn + 1 - top
        return odd.to(tensor.dtype)

    def small(tensor: torch.Tensor) -> torch.Tensor:
        return _chosen(tensor, (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0), generator)

    return _filled(case, small, large, grads=grads)


def _filled(
    case: Case,
    small: Callable[[torch.Tensor], torch.Tensor],
    large: Callable[[torch.Tensor], torch.Tensor],
    *,
    grads: bool = False,
    all_of: bool = False,
) -> Case:
    parts = roles(case.inputs)
    first = parts.index("data") if "data" in parts and not (grads or all_of) else -1
    inputs = tuple(
        t if part == "index" else (large(t) if i == first else small(t))
        for i, (t, part) in enumerate(zip(case.inputs, parts, strict=True))
    )
    upstream = tuple(large(g) if grads else small(g) for g in case.grad_outputs)
    return replace(case, inputs=inputs, grad_outputs=upstream, recorded=None)


def _chosen(tensor: torch.Tensor, values: tuple[float, ...], generator: torch.Generator) -> torch.Tensor:
    table = torch.tensor(values, device=tensor.device)
    index = torch.randint(0, len(values), tensor.shape, generator=generator, device=tensor.device)
    chosen: torch.Tensor = table[index].to(tensor.dtype)
    return chosen
