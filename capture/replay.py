"""Run a recorded operator call again from its stored inputs.

A capture proves itself that way: on the machine that made it, an operator gives its stored outputs bit for
bit. Arguments that shared memory share it again, strides and offsets are kept, draws are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bridge.capture.encode import unplain, visit_tensors
from bridge.capture.randomness import random_state
from bridge.capture.record import Call, TensorRecord
from bridge.capture.store import Capture
from bridge.errors import CaptureError

Missing = object()


def why_not_replayable(call: Call) -> str | None:
    """Why a call cannot be run again from what is stored; None when it can."""
    if call.kind != "op":
        return f"it is a {call.kind} call, and only operators are replayed"
    if not call.replayable:
        return call.note or "it talks to other processes or runs code of the caller's"
    if "rng" in call.flags and "state" not in call.flags["rng"]:
        return "it draws random numbers, and as it was not selected the generator's state was not kept"
    for record in call.inputs:
        if record.subclass not in (None, "Parameter"):
            return f"input {record.name} is a {record.subclass}; the local operators inside are replayed"
        if record.blob is None and not is_unwritten(record):
            return f"input {record.name} was not stored"
    return None


def is_unwritten(record: TensorRecord) -> bool:
    """A tensor that was allocated and not written yet: any memory of its layout will do."""
    return record.content == -1 and record.storage >= 0


def find_operator(name: str) -> Any:
    """The overload of "aten::mm.default".

    Raises:
        CaptureError: none of that name is registered in this process.
    """
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
    if found is None:
        raise CaptureError(f"operator {name} is not registered here; import the package that defines it")
    return found


def replay_call(capture: Capture, call: Call, *, device: str | None = None) -> dict[str, torch.Tensor]:
    """Run a call again; its outputs by name, those that it wrote in place as they are afterwards.

    Args:
        capture: Where its tensors are.
        call: One of its operator calls.
        device: Where to run; default: where the call ran.

    Raises:
        CaptureError: it cannot be run again, and why.
    """
    reason = why_not_replayable(call)
    if reason is not None:
        raise CaptureError(f"call {call.key!r} ({call.op}) cannot be replayed: {reason}")
    func = find_operator(call.op)
    tensors = _inputs(capture, call, device)
    args, kwargs = arguments_of(func, call, tensors)
    where = torch.device(device or (call.inputs[0].device if call.inputs else "cpu"))
    with torch.no_grad(), random_state(call.flags, where):
        result = func(*args, **kwargs)
    outputs: dict[str, torch.Tensor] = {}
    visit_tensors(result, outputs.__setitem__)
    for record in call.outputs:
        if record.name not in outputs and record.name in tensors:
            outputs[record.name] = tensors[record.name]
    return outputs


def differing_outputs(capture: Capture, call: Call) -> list[str]:
    """Names of a call's stored outputs whose bytes the replay does not give again.

    Raises:
        CaptureError: as `replay_call`.
    """
    outputs = replay_call(capture, call)
    wrong = []
    for record in call.outputs:
        if record.blob is None:
            continue
        wanted, found = capture.tensor(record), outputs.get(record.name)
        if found is None or not _same_bytes(wanted, found.cpu()):
            wrong.append(record.name)
    return wrong


def arguments_of(
    func: Any,
    call: Call,
    tensors: Mapping[str, torch.Tensor],
    change: Callable[[Any], Any] = lambda value: value,
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of a recorded call, in the schema's order.

    Args:
        func: The overload.
        call: The recorded call.
        tensors: Its tensors, by the paths of its inputs.
        change: Applied to every scalar argument, and to each of a list.

    Raises:
        CaptureError: a value that cannot be made again.
    """
    values: dict[str, Any] = {}
    for name, value in call.attrs.items():
        try:
            if not _is_pattern(value):
                value = unplain(value)
                value = [change(item) for item in value] if isinstance(value, list) else change(value)
            values[name] = value
        except ValueError as error:
            raise CaptureError(f"call {call.key!r} cannot be replayed: {error}") from None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        value = _argument(argument, position, values, tensors)
        if value is Missing:
            continue
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.extend(_default(a) for a in func._schema.arguments[len(args) : position])
            args.append(value)
    return args, kwargs


def _argument(
    argument: Any, position: int, values: dict[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Any:
    for path in (str(position), argument.name):
        if path in tensors:
            return tensors[path]
        pattern: Any = values.get(argument.name)
        if _is_pattern(pattern):
            return [tensors[f"{path}.{i}"] if there else None for i, there in enumerate(pattern["tensors"])]
        if f"{path}.0" in tensors:
            count = sum(name.startswith(f"{path}.") for name in tensors)
            return [tensors[f"{path}.{index}"] for index in range(count)]
    return values.get(argument.name, Missing)


def _default(argument: Any) -> Any:
    # None was passed where the schema allows it, or an empty list of tensors where it wants one.
    if argument.has_default_value():
        return argument.default_value
    return [] if isinstance(argument.type, torch.ListType) else None


def _is_pattern(value: Any) -> bool:
    return isinstance(value, dict) and "tensors" in value


def _inputs(capture: Capture, call: Call, device: str | None) -> dict[str, torch.Tensor]:
    from bridge.capture.rebuild import rebuild

    stored = [record for record in call.inputs if record.blob is not None]
    tensors = dict(zip((r.name for r in stored), rebuild(stored, capture.blob), strict=True))
    placed = _moved(stored, list(tensors.values()), device)
    tensors = dict(zip(tensors, placed, strict=True))
    for record in call.inputs:
        if record.blob is None:
            dtype = getattr(torch, record.dtype)
            tensors[record.name] = torch.empty_strided(
                record.shape, record.stride, dtype=dtype, device=device or record.device
            )
    return tensors


def _moved(
    records: Sequence[TensorRecord], tensors: list[torch.Tensor], device: str | None
) -> list[torch.Tensor]:
    # One copy per buffer, so that what shared memory on the host shares it on the device.
    buffers: dict[int, torch.Tensor] = {}
    moved = []
    for record, tensor in zip(records, tensors, strict=True):
        target = torch.device(device or record.device)
        if target.type == "cpu":
            moved.append(tensor)
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in buffers:
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            buffers[storage._cdata] = whole.to(target)
        buffer = buffers[storage._cdata]
        moved.append(buffer.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return moved


def _same_bytes(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return False
    left, right = wanted.contiguous(), found.contiguous()
    if not left.numel():
        return True
    return torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))
