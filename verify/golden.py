"""The FP64 oracle: the spec's own, or the reference with every cast to a lower type lifted to FP64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from bridge.errors import SpecError
from bridge.verify.case import Case
from bridge.verify.execute import Result, run
from bridge.verify.spec import KernelSpec


class Lifted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every dtype argument below FP64 becomes FP64, so `.float()`, `.to(x.dtype)` and factories stay wide."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_lift, args), tree_map(_lift, kwargs or {})
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """Products of groups one by one; torch's own operator, which experts use, has no FP64.

    Args:
        a: `[rows, inner]` or `[groups, rows, inner]`.
        b: `[inner, columns]` or `[groups, inner, columns]`.
        offs: where each group ends, along the rows, columns or inner axis that is shared out; rows or columns
            beyond the last group are 0.
    """
    if offs is None:
        return a @ b
    ends = offs.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if a.ndim == b.ndim == 2:
        return torch.stack([a[:, span] @ b[span] for span in spans])
    out = a.new_zeros(a.shape[-2], b.shape[-1])
    for group, span in enumerate(spans):
        if a.ndim == 2:
            out[span] = a[span] @ b[group]
        else:
            out[:, span] = a[group] @ b[:, span]
    return out


def _lift(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value


@contextmanager
def plain_math() -> Iterator[None]:
    """Attention through its plain formula: the fused CPU and CUDA ones hide their inner casts."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def wide_defaults() -> Iterator[None]:
    """New floating tensors are FP64 for the duration, so that constants are not rounded to FP32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _lifted() -> Iterator[None]:
    with wide_defaults(), plain_math(), Lifted():  # type: ignore[no-untyped-call]
        yield


def widen(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The exact values in FP64 (floating tensors) or as they are, each in memory of its own."""
    return tuple(t.to(torch.float64, copy=True) if t.is_floating_point() else t.clone() for t in tensors)


@contextmanager
def _also(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


def run_golden(
    spec: KernelSpec, case: Case, *, inputs: tuple[torch.Tensor, ...] | None = None, under: Any = None
) -> Result:
    """Golden's outputs and gradients in FP64, from the case's exact values.

    Args:
        inputs: FP64 stand-ins for the case's own values (the stability check moves them a little).
        under: a dispatch mode that the formula runs under (the self-check reorders its sums).

    Raises:
        SpecError: the reference cannot run in FP64; the spec must then give `golden`.
    """
    function, context = (
        (spec.golden, plain_math()) if spec.golden is not None else (spec.reference, _lifted())
    )
    if under is not None:
        context = _also(context, under)
    values = widen(inputs if inputs is not None else case.inputs)
    try:
        result = run(
            function, spec, case, inputs=values, grad_outputs=widen(case.grad_outputs), context=context
        )
    except Exception as error:
        what = "golden" if spec.golden is not None else "reference in FP64"
        raise SpecError(
            f"the {what} of {spec.name} must run on case {case.name!r}, got {type(error).__name__}: {error}; "
            "give KernelSpec.golden a plain FP64 formula"
        ) from error
    if isinstance(result, str):
        raise SpecError(f"the golden of {spec.name} {result}")
    for name, tensor in result.outputs.items():
        if tensor.is_floating_point():
            result.outputs[name] = tensor.to(torch.float64)
    for name, grad in result.grads.items():
        if grad is not None:
            result.grads[name] = grad.to(torch.float64)
    return result
