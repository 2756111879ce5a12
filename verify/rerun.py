"""Run one captured operator again: as it was, in FP64, or on other inputs. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bridge.capture.encode import visit_tensors
from bridge.capture.record import Call
from bridge.capture.replay import arguments_of, find_operator
from bridge.errors import CaptureError, KernelError
from bridge.verify.golden import plain_math, wide_defaults

#: What `transform` of an argument gives for an op that runs in FP64.
_WIDE = torch.float64


def cannot_rerun(call: Call) -> str | None:
    """Why a call cannot be run again, in words; None when it can, its tensors provided."""
    if call.kind != "op":
        return f"a {call.kind} call is no single operator"
    if not call.replayable:
        return "not replayable"
    if find_op(call.op) is None:
        return f"operator {call.op.rsplit('.', 1)[0]} is not registered here"
    if torch.Tag.nondeterministic_seeded in find_op(call.op).tags:
        return "draws random numbers"
    if any(record.subclass is not None for record in call.inputs):
        return "its inputs are wrapped (DTensor); the local call inside it is run instead"
    return None


def find_op(name: str) -> Any:
    """The overload of "aten::mm.default"; None when nothing of that name is registered."""
    try:
        return find_operator(name)
    except (CaptureError, RuntimeError):
        return None


def rerun(call: Call, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run the call on `tensors` (by the paths of its inputs) and give its outputs, as recorded.

    Tensors that the op writes are changed in place: give copies.

    Raises:
        KernelError: the op raised, or its arguments cannot be made again.
    """
    return _run(call, tensors, lambda value: value)


def rerun_wide(call: Call, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The same in FP64: floating inputs, and arguments that name a lower dtype, are widened."""
    wide = {path: widen(tensor) for path, tensor in tensors.items()}
    with plain_math(), wide_defaults():
        return _run(call, wide, _lift)


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in FP64 (or complex128), strides kept; integers as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128, copy=True)
    if tensor.is_floating_point():
        return tensor.to(_WIDE, copy=True)
    return tensor.clone()


def _lift(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        if value.is_complex:
            return torch.complex128
        return _WIDE if value.is_floating_point else value
    return value


def _run(call: Call, tensors: Mapping[str, torch.Tensor], lift: Callable[[Any], Any]) -> list[torch.Tensor]:
    op = find_op(call.op)
    if op is None:
        raise KernelError(
            f"{call.key}: operator {call.op} is not registered in this process; import its library"
        )
    try:
        args, kwargs = arguments_of(op, call, tensors, lift)
        with torch.no_grad():
            result = op(*args, **kwargs)
    except Exception as error:
        # Anything at all may come out of an arbitrary operator; the caller decides what that means.
        text = " ".join(str(error).split())[:200]
        raise KernelError(f"{call.key}: {call.op} raised {type(error).__name__}: {text}") from error
    outputs: list[torch.Tensor] = []
    visit_tensors(result, lambda _, tensor: outputs.append(tensor))
    returned = {id(tensor) for tensor in outputs}
    written = [
        tensors[path] for path in call.mutated if path in tensors and id(tensors[path]) not in returned
    ]
    return outputs + written
