"""Wrong variants of what is handed on: saved statistics, gradients of outputs, rows left unwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from bridge.verify.case import Case
from bridge.verify.execute import Result
from bridge.verify.spec import KernelSpec
from bridge.verify.trace import Change, Op, Trace
from bridge.verify.variant import Variant

_LOG2_E = 1.4426950408889634


def of_saved(spec: KernelSpec, trace: Trace, case: Case) -> list[Variant]:
    """FP32 statistics that the forward saves, one value a row, rounded on their way to the backward."""
    half = torch.bfloat16 if case.dtype == "bfloat16" else torch.float16
    largest = max((t.numel() for t in case.inputs if t.is_floating_point()), default=0)
    data = {name for name, t in zip(spec.inputs, case.inputs, strict=True) if t.numel() == largest}
    saved = [op for op in trace.ops.values() if op.sources & data and _is_statistic(op, trace, largest)]
    if not saved:
        return []
    names = ", ".join(dict.fromkeys(f"`{op.name}`" for op in saved))
    return [
        Variant(
            text=f"statistics saved for the backward ({names}) are kept in {str(half)[6:]}",
            rank="cast",
            changes={op.number: _rounded(half) for op in saved},
            backward_only=True,
        )
    ]


def _is_statistic(op: Op, trace: Trace, largest: int) -> bool:
    return (
        not op.backward
        and not op.exact
        and op.out.dtype == torch.float32
        and 1 < op.out.numel() < largest
        and op.name not in ("mm", "bmm")
        and any(reader.backward for reader in trace.readers(op.number))
    )


def _rounded(dtype: torch.dtype) -> Change:
    return lambda func, args, kwargs, out: out.to(dtype).to(out.dtype)


def of_results(spec: KernelSpec, trace: Trace, case: Case) -> list[Variant]:
    """Faults at the border of the kernel: between its outputs, and in what it leaves unwritten."""
    found: list[Variant] = []
    if any(op.name == "log" and not op.backward for op in trace.ops.values()):
        found += [_in_base_two(spec, place) for place in range(len(spec.outputs))]
    if len(case.grad_outputs) > 1:
        found += list(_between(spec, case))
    if any(t.ndim > 2 for t in case.inputs if t.is_floating_point()):
        found += list(_unwritten(spec))
    return found


def _in_base_two(spec: KernelSpec, place: int) -> Variant:
    def function(*inputs: torch.Tensor, **attrs: Any) -> Any:
        made = spec.reference(*inputs, **attrs)
        if not isinstance(made, tuple | list):
            return made * _LOG2_E
        return tuple(m * _LOG2_E if i == place else m for i, m in enumerate(made))

    return Variant(
        text=f"output `{spec.outputs[place]}` is a logarithm in base 2 where base e is meant",
        rank="formula",
        function=function,
    )


def _between(spec: KernelSpec, case: Case) -> Iterator[Variant]:
    """The gradient of one output lost, or sent down the path of another."""
    shapes = [tuple(g.shape) for g in case.grad_outputs]
    for i, name in enumerate(spec.outputs[: len(shapes)]):
        yield Variant(
            text=f"the gradient of output `{name}` is dropped",
            rank="formula",
            upstreams=lambda grads, i=i: tuple(  # type: ignore[misc]
                torch.zeros_like(g) if j == i else g for j, g in enumerate(grads)
            ),
        )
        for j, other in enumerate(spec.outputs[: len(shapes)]):
            if j != i and shapes[i] == shapes[j]:
                yield Variant(
                    text=f"the gradient of output `{name}` goes through the backward of `{other}` "
                    "(added before it, not after)",
                    rank="formula",
                    upstreams=lambda grads, i=i, j=j: _merged(grads, i, j),  # type: ignore[misc]
                )


def _merged(grads: tuple[torch.Tensor, ...], source: int, into: int) -> tuple[torch.Tensor, ...]:
    moved = list(grads)
    # Widened as a kernel widens it; the reference's own cast rounds once more, which is noise here.
    moved[into] = (grads[into].float() + grads[source].float()).to(grads[into].dtype)
    moved[source] = torch.zeros_like(grads[source])
    return tuple(moved)


def _unwritten(spec: KernelSpec) -> Iterator[Variant]:
    grads = [f"grad_{name}" for name in spec.grads]
    for name in (*spec.outputs, *grads):
        yield Variant(
            text=f"rows of `{name}` are counted from the first axis only: the others stay unwritten",
            rank="index",
            after=_first_axis_only(name),
        )


def _first_axis_only(name: str) -> Callable[[Result], Result]:
    def after(result: Result) -> Result:
        return replace(
            result,
            outputs={n: _cut(t) if n == name else t for n, t in result.outputs.items()},
            grads={
                n: _cut(t) if f"grad_{n}" == name and t is not None else t for n, t in result.grads.items()
            },
        )

    return after


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim < 3:
        return tensor
    rows = tensor.reshape(-1, tensor.shape[-1]).clone()
    rows[tensor.shape[0] :] = 0
    return rows.reshape(tensor.shape)
