"""Triton's interpreter, made to compute what the compiled kernel computes, for the duration of a run.

This is the only place that touches the interpreter's private parts. Three things are changed under
TRITON_INTERPRET=1 and put back afterwards:

1. bfloat16. The interpreter keeps it as raw 16-bit words: casts from FP32 truncate where every GPU
   rounds to nearest even, and arithmetic acts on the bits. Here casts go through torch, which rounds
   right, and arithmetic and dots on bfloat16 operands are computed in FP32 and rounded, as compiled
   code does. Kernels that cut the low 16 bits off by integer arithmetic of their own are untouched.
2. The overflow check of integer arithmetic, which doubles the interpreter's time and, without its
   debug option, has no effect.
3. A comparison of scalars stays a truth value when it meets a block: the interpreter widens it to the
   type that was compared, and a load then refuses the mask that compiled code takes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def interpreting() -> bool:
    """Whether Triton kernels defined in this process are interpreted."""
    if "triton" not in sys.modules:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


@contextmanager
def repaired() -> Iterator[None]:
    """The interpreter with right bfloat16 and without its overflow check; nothing when it is not in use."""
    if not interpreting():
        yield
        return
    from triton.runtime import interpreter as triton_interpreter

    builder = triton_interpreter.interpreter_builder
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    put(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
    for name, value in _repairs(triton_interpreter).items():
        put(type(builder), name, value)
    for owner in (triton_interpreter.ReduceOps, triton_interpreter.ScanOps):
        put(owner, "apply_impl", _reduction(triton_interpreter, owner))
    try:
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def _repairs(module: Any) -> dict[str, Callable[..., Any]]:
    import numpy as np
    import triton.language as tl

    builder = module.InterpreterBuilder
    handle = module.TensorHandle

    def widen(data: Any) -> Any:
        """uint16 words of bfloat16 as FP32; exact, subnormals included."""
        words = np.ascontiguousarray(data).astype(np.uint32) << np.uint32(16)
        return words.view(np.float32)

    def narrow(data: Any) -> Any:
        """FP32 (or wider) rounded to nearest even, as uint16 words of bfloat16."""
        wide = np.array(data, copy=True)
        words = torch.from_numpy(wide).to(torch.bfloat16).view(torch.int16).numpy()
        return words.view(np.uint16).reshape(wide.shape)

    def is_bf16(item: Any) -> bool:
        return bool(item.dtype.scalar == tl.bfloat16)

    def as_float(item: Any) -> Any:
        return handle(widen(item.data), tl.float32) if is_bf16(item) else item

    def as_bf16(item: Any) -> Any:
        return handle(narrow(item.data), tl.bfloat16)

    old_fma, old_clampf = builder.create_fma, builder.create_clampf
    old_cast, old_binary, old_unary = builder.cast_impl, builder.binary_op, builder.unary_op
    old_fp_to_fp, old_dot, old_fabs = builder.create_fp_to_fp, builder.create_dot, builder.create_fabs
    compares = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        from_bf16, to_bf16 = is_bf16(src), dst_type.scalar == tl.bfloat16
        if from_bf16 and to_bf16:
            return src
        if from_bf16:
            return old_cast(self, as_float(src), dst_type) if dst_type.scalar != tl.float32 else as_float(src)
        if to_bf16:
            wide = src if src.dtype.scalar in (tl.float32, tl.float64) else old_cast(self, src, tl.float32)
            return as_bf16(wide)
        return old_cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar == tl.float32 and _toward_zero(rounding_mode):
            words = np.ascontiguousarray(src.data).view(np.uint32) >> np.uint32(16)
            return handle(words.astype(np.uint16), tl.bfloat16)
        if is_bf16(src) or dst_type.scalar == tl.bfloat16:
            return cast_impl(self, src, dst_type)
        return old_fp_to_fp(self, src, dst_type, rounding_mode)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not (is_bf16(lhs) or is_bf16(rhs)):
            return old_binary(self, lhs, rhs, op)
        out = old_binary(self, as_float(lhs), as_float(rhs), op)
        return out if op in compares else as_bf16(out)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        return as_bf16(old_unary(self, as_float(arg), op)) if is_bf16(arg) else old_unary(self, arg, op)

    def create_fabs(self: Any, arg: Any) -> Any:
        return as_bf16(old_fabs(self, as_float(arg))) if is_bf16(arg) else old_fabs(self, arg)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return old_dot(self, as_float(a), as_float(b), d, *rest)

    old_splat = builder.create_splat

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        out = old_splat(self, ret_ty, arg)
        return handle(out.data.astype(bool), tl.int1) if arg.data.dtype == np.bool_ else out

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not is_bf16(z):
            return old_fma(self, x, y, z)
        return as_bf16(old_fma(self, as_float(x), as_float(y), as_float(z)))

    def create_clampf(self: Any, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        if not is_bf16(arg):
            return old_clampf(self, arg, lo, hi, propagate_nans)
        return as_bf16(old_clampf(self, as_float(arg), as_float(lo), as_float(hi), propagate_nans))

    repairs: dict[str, Callable[..., Any]] = {
        "create_splat": create_splat,
        "create_fma": create_fma,
        "create_clampf": create_clampf,
        "cast_impl": cast_impl,
        "create_fp_to_fp": create_fp_to_fp,
        "binary_op": binary_op,
        "unary_op": unary_op,
        "create_fabs": create_fabs,
        "create_dot": create_dot,
    }
    return repairs


def _reduction(module: Any, owner: Any) -> Callable[..., Any]:
    """`apply_impl` of reductions and scans that folds bfloat16 as compiled code does: each add rounded."""
    import numpy as np
    import triton.language as tl

    old = owner.apply_impl
    fold = owner is module.ReduceOps

    def value_of(item: Any) -> Any:
        words = np.ascontiguousarray(item.handle.data).astype(np.uint32) << np.uint32(16)
        return words.view(np.float32)

    def words_of(wide: Any) -> Any:
        rounded = torch.from_numpy(np.array(wide, dtype=np.float32, copy=True)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    def apply_impl(self: Any, inputs: Any) -> Any:
        items = inputs if isinstance(inputs, tuple) else (inputs,)
        if items[0].dtype.scalar != tl.bfloat16:
            return old(self, inputs)
        if fold and self.combine_fn is tl.standard._sum_combine:
            return self.to_tensor(words_of(_tree_sum(self, value_of(items[0]), words_of)), tl.bfloat16)
        wide = tuple(
            self.to_tensor(value_of(item), tl.float32) if item.dtype.scalar == tl.bfloat16 else item
            for item in items
        )
        out = old(self, wide)
        parts = out if isinstance(out, list | tuple) else (out,)
        back = [
            self.to_tensor(words_of(part.handle.data), tl.bfloat16)
            if part.dtype.scalar == tl.float32
            else part
            for part in parts
        ]
        return type(out)(back) if isinstance(out, list | tuple) else back[0]

    def _tree_sum(self: Any, values: Any, rounded: Any) -> Any:
        axis = self.axis
        if axis is None:
            values, axis = values.reshape(-1), 0
        while values.shape[axis] > 1:
            half = values.shape[axis] // 2
            low, high = np.split(values[_upto(values.ndim, axis, 2 * half)], 2, axis=axis)
            rest = np.take(values, range(2 * half, values.shape[axis]), axis=axis)
            total = (rounded(low + high).astype(np.uint32) << np.uint32(16)).view(np.float32)
            values = np.concatenate([total, rest], axis=axis)
        return values if self.keep_dims else np.squeeze(values, axis=axis)

    return apply_impl


def _upto(rank: int, axis: int, stop: int) -> tuple[slice, ...]:
    return tuple(slice(0, stop) if i == axis else slice(None) for i in range(rank))


def _toward_zero(rounding_mode: Any) -> bool:
    return rounding_mode is not None and "RTZ" in str(rounding_mode)
