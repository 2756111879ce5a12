"""Captured calls -> cases: which captured tensor is which input of the spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from bridge.capture.record import Call, TensorRecord
from bridge.errors import SpecError, UsageError
from bridge.verify import sites
from bridge.verify.case import Case, Recorded
from bridge.verify.items import items
from bridge.verify.match import bind_attrs, describe, match_inputs
from bridge.verify.spec import KernelSpec

if TYPE_CHECKING:
    from bridge.capture.store import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall:
    """What `KernelSpec.bind` is given: one captured call with its tensors, by name, layout preserved."""

    call: Call
    inputs: Mapping[str, torch.Tensor]
    params: Mapping[str, torch.Tensor]
    attrs: Mapping[str, Any]
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)  #: those that were stored


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCall:
    """A captured call that fits the spec; its tensors are read when wanted, not held for all at once."""

    call: Call
    name: str  #: of the case
    recorded: frozenset[str]  #: what the run recorded: names of outputs, and of gradients as `grad_x`
    load: Callable[[], Case]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """Cases made from a capture; left_out says what was not judged and why."""

    bound: tuple[BoundCall, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def calls(self) -> tuple[Call, ...]:
        """The captured calls, in execution order."""
        return tuple(item.call for item in self.bound)

    @property
    def cases(self) -> tuple[Case, ...]:
        """Every case at once, read anew."""
        return tuple(item.load() for item in self.bound)


def bind_cases(
    capture: Capture,
    spec: KernelSpec,
    *,
    op: str | None = None,
    max_calls: int = 4,
    seed: int = 0,
    device: str = "cpu",
) -> Bindings:
    """Turn the captured calls of the spec's sites into cases.

    Raises:
        UsageError: no call matches, none was stored, or none has a shape and dtype that the spec declares.
        SpecError: names and order do not say which tensor is which input, and the spec has no `bind`.
    """
    calls = sites.find_calls(capture, spec, op=op)
    ranked = sites.rank([part for call in calls for part in items(call)] if spec.per_item else calls)
    if not ranked.calls:
        raise UsageError(
            f"capture {capture.path} holds calls of {op or spec.name} but not their tensors "
            f"({'; '.join(ranked.left_out)}); recapture with --ops {op or spec.name}"
        )
    ranks = _declared_ranks(spec)
    found: list[BoundCall] = []
    refused: dict[object, str] = {}
    beyond = 0
    for call in ranked.calls:
        group = sites.group_of(call)
        if group in refused:
            continue
        if len(found) == max_calls:
            beyond += 1
            continue
        case = _bind(capture, call, spec, seed=seed, device=device)
        problem = undeclared(case, spec, ranks)
        if problem is None:
            load = partial(_bind, capture, call, spec, seed=seed, device=device)
            found.append(BoundCall(call=call, name=case.name, recorded=_recorded_names(case), load=load))
        else:
            refused[group] = f"{call.key}: {problem}"
    left_out = [*ranked.left_out, *refused.values()]
    if not found:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        first = next(iter(refused.values()))
        raise UsageError(f"op {spec.name} does not declare what was captured: {first}{more}")
    if beyond:
        left_out.append(f"{sites.plural(beyond)} beyond --max-calls {max_calls}")
    found.sort(key=lambda item: (item.call.step, item.call.rank, item.call.index))
    return Bindings(bound=tuple(found), left_out=tuple(left_out))


def _recorded_names(case: Case) -> frozenset[str]:
    if case.recorded is None:
        return frozenset()
    return frozenset((*case.recorded.outputs, *(f"grad_{name}" for name in case.recorded.grads)))


def _bind(capture: Capture, call: Call, spec: KernelSpec, *, seed: int, device: str) -> Case:
    notes: list[str] = []
    loaded = _to_device(capture.tensors(call), device)
    if spec.bind is not None:
        inputs, attrs, written = _bind_by_spec(spec, call, loaded)
        records = _records_of(inputs, spec, call, loaded)
    else:
        records = match_inputs(call, spec)
        inputs = tuple(loaded[_slot(records[name], call)] for name in spec.inputs)
        attrs, written = {}, {}
    attrs = {**bind_attrs(call, spec, notes, known=attrs), **attrs}
    recorded = _recorded(call, spec, records, loaded)
    outputs = [(output.shape, getattr(torch, output.dtype)) for output in call.outputs[: len(spec.outputs)]]
    if written:
        recorded = Recorded(outputs=written, grads=recorded.grads if recorded is not None else {})
        if len(written) == len(spec.outputs):
            outputs = [(tuple(written[name].shape), written[name].dtype) for name in spec.outputs]
    if spec.bind is not None and (made := _made_outputs(spec, inputs, attrs)) != outputs:
        # A kernel may sit inside the module: what that returned, and its gradient, are not the kernel's.
        recorded, outputs = None, made
        notes.append(f"`bind` takes the inputs out of {call.op}, whose own outputs are another tensor's")
        call = msgspec.structs.replace(call, grad_outputs=())
        loaded = {name: tensor for name, tensor in loaded.items() if not name.startswith("grad_outputs/")}
    if len(outputs) < len(spec.outputs):
        raise SpecError(
            f"KernelSpec {spec.name} names outputs ({', '.join(spec.outputs)}) but captured {call.key} "
            f"returned {len(call.outputs)} tensors"
        )
    grad_outputs: tuple[torch.Tensor, ...] = ()
    if spec.grads:
        grad_outputs = _upstream(call, spec, outputs, loaded, notes, seed=seed, device=device)
    if call.note:
        notes.append(call.note)
    return Case(
        name=case_name(call),
        family="captured",
        dtype=case_dtype(inputs),
        inputs=inputs,
        attrs=attrs,
        grad_outputs=grad_outputs,
        recorded=recorded,
        notes=tuple(notes),
    )


def case_name(call: Call) -> str:
    """Readable and unique within a capture: "captured layers.0.attention_norm (step 100)"."""
    rank = f", rank {call.rank}" if call.rank else ""
    return f"captured {call.key} (step {call.step}{rank})"


def case_dtype(inputs: Sequence[torch.Tensor]) -> str:
    """dtype of the first floating input, without "torch."; of the first input where none is floating."""
    for tensor in inputs:
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    return str(inputs[0].dtype).removeprefix("torch.")


def _slot(record: TensorRecord, call: Call) -> str:
    """Name of an input or parameter among `Capture.tensors`."""
    part = "params" if any(record is other for other in call.params) else "inputs"
    return f"{part}/{record.name}"


def _to_device(tensors: Mapping[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """Move tensors and keep what they share: each storage moves once, as a whole."""
    moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    placed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
        if tensor.device.type == torch.device(device).type or not tensor.numel():
            placed[name] = tensor.to(device)
            continue
        if key not in moved:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
            moved[key] = whole.to(device)
        placed[name] = moved[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return placed


def _bind_by_spec(
    spec: KernelSpec, call: Call, loaded: Mapping[str, torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], dict[str, torch.Tensor]]:
    """Ask `spec.bind`, which returns a mapping by name, the inputs in order, or (inputs, attrs).

    Returns inputs, attrs, and the recorded outputs that a mapping names.
    """
    assert spec.bind is not None
    view = CapturedCall(
        call=call,
        inputs={record.name: loaded[f"inputs/{record.name}"] for record in call.inputs},
        params={record.name: loaded[f"params/{record.name}"] for record in call.params},
        attrs=call.attrs,
        outputs={
            record.name: loaded[f"outputs/{record.name}"]
            for record in call.outputs
            if f"outputs/{record.name}" in loaded
        },
    )
    try:
        result = spec.bind(view)
    except Exception as error:
        raise SpecError(
            f"KernelSpec {spec.name}: `bind` raised {type(error).__name__}: {error} "
            f"on {call.key} ({describe(call)})"
        ) from error
    attrs: dict[str, Any] = {}
    written: dict[str, torch.Tensor] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, attrs = result[0], dict(result[1])
    if isinstance(result, Mapping):
        own = (*spec.inputs, *spec.outputs)
        attrs.update({name: value for name, value in result.items() if name not in own})
        written = {name: result[name] for name in spec.outputs if name in result and name not in spec.inputs}
        result = tuple(result.get(name) for name in spec.inputs)
    values = tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(values) != len(spec.inputs) or not all(isinstance(value, torch.Tensor) for value in values):
        raise SpecError(
            f"KernelSpec {spec.name}: `bind` must return one tensor for each of ({', '.join(spec.inputs)}), "
            f"got {[type(value).__name__ for value in values]} for {call.key}"
        )
    unknown = set(attrs) - set(spec.attrs)
    if unknown:
        raise SpecError(
            f"KernelSpec {spec.name}: `bind` returned {sorted(unknown)}, not in inputs, attrs or outputs"
        )
    return values, attrs, written


def _records_of(
    inputs: Sequence[torch.Tensor], spec: KernelSpec, call: Call, loaded: Mapping[str, torch.Tensor]
) -> dict[str, TensorRecord]:
    """Which records `bind` handed through unchanged; only their gradients can be compared."""
    return {
        name: record
        for name, tensor in zip(spec.inputs, inputs, strict=True)
        for record in (*call.inputs, *call.params)
        if loaded[_slot(record, call)] is tensor
    }


def _recorded(
    call: Call, spec: KernelSpec, records: Mapping[str, TensorRecord], loaded: Mapping[str, torch.Tensor]
) -> Recorded | None:
    """Outputs and gradients that the run itself produced; None when it stored no output of this call."""
    outputs = {
        name: loaded[f"outputs/{record.name}"]
        for name, record in zip(spec.outputs, call.outputs, strict=False)
        if f"outputs/{record.name}" in loaded
    }
    grads = {
        name: loaded[f"grad_inputs/{records[name].name}"]
        for name in spec.grads
        if name in records and f"grad_inputs/{records[name].name}" in loaded
    }
    return Recorded(outputs=outputs, grads=grads) if outputs else None


def _made_outputs(
    spec: KernelSpec, inputs: Sequence[torch.Tensor], attrs: Mapping[str, Any]
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes that the reference makes of the inputs.

    Raises:
        SpecError: the reference does not run on what `bind` returned.
    """
    try:
        with torch.no_grad():
            returned = spec.reference(*(tensor.clone() for tensor in inputs), **attrs)
    except Exception as error:
        text = f"the reference raised {type(error).__name__}: {error} on what `bind` returned"
        raise SpecError(f"KernelSpec {spec.name}: {text}") from error
    tensors = returned if isinstance(returned, tuple | list) else (returned,)
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _upstream(
    call: Call,
    spec: KernelSpec,
    outputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    loaded: Mapping[str, torch.Tensor],
    notes: list[str],
    *,
    seed: int,
    device: str,
) -> tuple[torch.Tensor, ...]:
    """One upstream gradient per output: the run's own; a seeded random one where the run recorded none.

    An output without one, beside others that have theirs, is one that the loss does not depend on: zeros.
    """
    upstream = {record.name for record in call.grad_outputs}
    generator = torch.Generator().manual_seed(seed)
    grads: list[torch.Tensor] = []
    for place, (name, (shape, dtype)) in enumerate(zip(spec.outputs, outputs, strict=True)):
        recorded = call.outputs[place].name if place < len(call.outputs) else ""
        stored = loaded.get(f"grad_outputs/{recorded}")
        if stored is not None:
            grads.append(stored)
        elif upstream and recorded not in upstream:
            grads.append(torch.zeros(shape, dtype=dtype, device=device))
            notes.append(f"{name} had no upstream gradient in the run: zeros")
        else:
            grads.append(torch.randn(shape, generator=generator).to(dtype).to(device))
            notes.append(f"no upstream gradient of {name} was recorded: a random one (seed {seed}) is used")
    return tuple(grads)


def _declared_ranks(spec: KernelSpec) -> set[tuple[int, ...]]:
    """Numbers of dimensions of the inputs that `sample` makes, one tuple per declared rank."""
    smallest: dict[int, tuple[int, ...]] = {}
    for shape in sorted(spec.shapes, key=lambda shape: torch.Size(shape).numel()):
        smallest.setdefault(len(shape), shape)
    ranks = set()
    for shape in smallest.values():
        try:
            drawn = spec.sample(
                shape, getattr(torch, spec.dtypes[0]), torch.Generator().manual_seed(0), "cpu"
            )
        except Exception as error:
            raise SpecError(
                f"KernelSpec {spec.name}: `sample` raised {type(error).__name__}: {error} for shape {shape}"
            ) from error
        ranks.add(tuple(tensor.dim() for tensor in drawn))
    return ranks


def undeclared(case: Case, spec: KernelSpec, ranks: set[tuple[int, ...]]) -> str | None:
    """What about the case the spec does not declare, in words; None when it fits."""
    if case.dtype not in spec.dtypes:
        return f"dtype {case.dtype} is not declared (declared: {', '.join(spec.dtypes)})"
    have = tuple(tensor.dim() for tensor in case.inputs)
    if have not in ranks and not any(_has_more_batch(have, declared) for declared in ranks):
        shapes = " ".join(str(tuple(tensor.shape)) for tensor in case.inputs)
        declared = ", ".join(str(shape) for shape in spec.shapes)
        return f"inputs {shapes} have other numbers of dimensions than the declared shapes give: {declared}"
    return None


def _has_more_batch(have: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    """[batch, tokens, columns] where [rows, columns] is declared: the same kernel call in every project."""
    if len(have) != len(declared):
        return False
    more = {h - d for h, d in zip(have, declared, strict=True)} - {0}
    return len(more) == 1 and more.pop() > 0
