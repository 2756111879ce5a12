"""The reference as a list of plain ops, and runs of it with some of them changed.

Wrong variants are made from the author's own reference, op by op, so that a fault library needs to know
arithmetic only and no kernel: an early cast is a cast after some op, a lost tile is a sum over fewer
terms, a misplaced epsilon an add moved past a root.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bridge.verify.case import Case
from bridge.verify.execute import Result, copy_with_layout, run
from bridge.verify.formulas import spelled_out
from bridge.verify.golden import plain_math
from bridge.verify.noise import is_exact
from bridge.verify.spec import KernelSpec

#: Gets the op, its arguments and what it returned; returns what the variant returns instead.
Change = Callable[[Any, tuple[Any, ...], dict[str, Any], torch.Tensor], torch.Tensor]
#: Gets the arguments of a forward op and what it returned; returns what the backward finds in its place.
Swap = Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor]


def times(factor: float | torch.Tensor) -> Change:
    """The op's result times a constant; a tensor must be detached."""
    return lambda func, args, kwargs, out: out * factor


@dataclass(slots=True, kw_only=True)
class Op:
    """One plain op of a recorded run."""

    number: int
    name: str  #: without namespace and overload: "rsqrt"
    func: Any
    args: tuple[Any, ...]
    out: torch.Tensor
    backward: bool
    sources: frozenset[str]  #: inputs (and "grad_output") that its value depends on
    makers: tuple[int, ...]  #: numbers of the ops that made its tensor arguments; 0 is an input
    exact: bool
    node: str = ""  #: of a backward op: the step of the forward that it is the derivative of, "sum"

    @property
    def origin(self) -> str:
        """What it reads in the end, in words: "grad_output, x", or "constants"."""
        return ", ".join(sorted(self.sources)) or "constants"

    @property
    def side(self) -> str:
        """How a sentence about it begins: "in the backward, ", or ""."""
        return "in the backward, " if self.backward else ""

    def scalar(self) -> float | None:
        """The scalar operand of a binary op, if it has one."""
        for value in self.args:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
            if (
                isinstance(value, torch.Tensor)
                and value.numel() == 1
                and value.ndim == 0
                and not value.is_meta
            ):
                return float(value)
        return None


@dataclass(slots=True)
class Trace:
    """All ops of one run, by number, and the numbers that read each op's result."""

    ops: dict[int, Op] = field(default_factory=dict)

    def readers(self, number: int) -> list[Op]:
        return [op for op in self.ops.values() if number in op.makers]


class Replay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs plain ops, numbered; `changes` replaces results, `swaps` replaces arguments in the backward."""

    def __init__(
        self,
        changes: dict[int, Change] | None = None,
        swaps: dict[int, Swap] | None = None,
        trace: Trace | None = None,
        inputs: dict[int, str] | None = None,
        scaled: dict[int, float] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changes = changes or {}
        self._swaps = swaps or {}
        self._trace = trace
        self._number = 0
        self._makers: dict[int, int] = {}  #: storage address -> op number
        self._names = inputs or {}
        self._sources: dict[int, frozenset[str]] = {}
        self._alive: list[Any] = []
        self._replacement: dict[int, torch.Tensor] = {}
        self._scaled = scaled or {}
        self._factors: dict[int, float] = {}  #: storage address of an input -> its factor in the backward
        self.backward = False

    def told(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Which tensors are the inputs, for those that the backward finds scaled."""
        self._factors = {inputs[i].untyped_storage().data_ptr(): by for i, by in self._scaled.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._whole(func):
            spelled = spelled_out(self, func, args, kwargs)
            if spelled is not NotImplemented:
                return spelled
        self._number += 1
        number = self._number
        if self.backward and (self._replacement or self._factors):
            args = tuple(self._swapped(a) for a in args)
        out = func(*args, **kwargs)
        if number in self._changes and isinstance(out, torch.Tensor):
            out = self._changes[number](func, args, kwargs, out)
        if number in self._swaps and isinstance(out, torch.Tensor):
            other = self._swaps[number](args, out)
            self._replacement[out.untyped_storage().data_ptr()] = other
            self._alive += [out, other]
        # Kept in every run: torch skips a detach when it holds the only reference, which shifts the numbers.
        self._alive.append(out)
        if self._trace is not None:
            self._note(number, func, args, out)
        return out

    def _whole(self, func: Any) -> bool:
        return func is torch.ops.aten.gelu.default or func is torch.ops.aten.gelu_backward.default

    def _swapped(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            factor = self._factors.get(value.untyped_storage().data_ptr())
            if factor is not None and value.is_floating_point():
                return value * factor
            other = self._replacement.get(value.untyped_storage().data_ptr())
            if other is not None and other.shape == value.shape:
                return other
        return value

    def _note(self, number: int, func: Any, args: Any, out: Any) -> None:
        tensors = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
        addresses = [t.untyped_storage().data_ptr() for t in tensors]
        sources: frozenset[str] = frozenset()
        for address in addresses:
            sources |= self._sources.get(
                address, frozenset([self._names[address]] if address in self._names else [])
            )
        made = tuple(self._makers.get(address, 0) for address in addresses)
        for item in tree_leaves(out):
            if not isinstance(item, torch.Tensor):
                continue
            address = item.untyped_storage().data_ptr()
            if func.is_view:
                continue
            self._makers[address], self._sources[address] = number, sources
            if self._trace is not None:
                self._trace.ops[number] = Op(
                    number=number,
                    name=str(func.name()).split("::")[1].split(".")[0],
                    func=func,
                    args=args,
                    out=item,
                    backward=self.backward,
                    sources=sources,
                    makers=made,
                    exact=is_exact(func),
                    node=_derivative_of() if self.backward else "",
                )


def _derivative_of() -> str:
    """Name of the forward step whose backward runs now; "" where this torch does not tell."""
    current = getattr(torch._C, "_current_autograd_node", None)
    node = current() if current is not None else None
    found = re.fullmatch(r"(\w+?)Backward\d*", node.name()) if node is not None else None
    return found.group(1).lower() if found is not None else ""


def replay(
    spec: KernelSpec, case: Case, mode: Replay, grad_outputs: tuple[torch.Tensor, ...] | None = None
) -> Result:
    """Run the reference under `mode`, telling it when the backward begins."""
    inputs = tuple(copy_with_layout(t) for t in case.inputs)
    upstream = (
        grad_outputs if grad_outputs is not None else tuple(copy_with_layout(t) for t in case.grad_outputs)
    )
    mode._names |= {t.untyped_storage().data_ptr(): n for t, n in zip(inputs, spec.inputs, strict=True)}
    mode._names |= {t.untyped_storage().data_ptr(): "grad_output" for t in upstream}
    mode.told(inputs)

    def reference(*leaves: torch.Tensor, **attrs: Any) -> Any:
        out = spec.reference(*leaves, **attrs)
        mode.backward = True
        return out

    with plain_math():
        result = run(reference, spec, case, inputs=inputs, grad_outputs=upstream, context=mode)
    assert not isinstance(result, str), result
    return result


def record(spec: KernelSpec, case: Case) -> Trace:
    """The plain ops of the reference's forward and backward on one case."""
    trace = Trace()
    replay(spec, case, Replay(trace=trace))
    return trace
