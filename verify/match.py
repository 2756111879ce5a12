"""Which tensor of a captured call is which input of a spec, by name and by order. Loads no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from bridge.capture.record import Call, TensorRecord
from bridge.errors import SpecError
from bridge.verify.spec import KernelSpec

#: Other names under which modules keep a norm's epsilon.
_ALIASES = {"eps": ("epsilon", "variance_epsilon", "norm_eps")}


def _positional(call: Call) -> list[TensorRecord]:
    def order(record: TensorRecord) -> tuple[int, tuple[int, ...]]:
        parts = record.name.split(".")
        if all(part.isdigit() for part in parts):
            return 0, tuple(int(part) for part in parts)
        return 1, ()

    return sorted(call.inputs, key=order)


def match_inputs(call: Call, spec: KernelSpec) -> dict[str, TensorRecord]:
    """Which record is which input: by name first, then in order; call arguments before parameters.

    A launch's pointers are matched by the kernel's own argument names ("x", "x_ptr", "X").

    Raises:
        SpecError: an input stays without a tensor, or an argument of the call without an input.
    """
    found: dict[str, TensorRecord] = {}
    inputs, params = _positional(call), list(call.params)
    for name in spec.inputs:
        for pool in (inputs, params):
            match = next((r for r in pool if _same_name(r.name, name, call.kind)), None)
            if match is not None:
                found[name] = match
                pool.remove(match)
                break
    if call.kind != "launch":
        # A keyword argument has the module's name for it, which need not be the spec's.
        for name in spec.inputs:
            if name not in found and (inputs or params):
                found[name] = inputs.pop(0) if inputs else params.pop(0)
    lacking = [name for name in spec.inputs if name not in found]
    surplus = [] if call.kind == "launch" else [record.name for record in inputs]
    if lacking or surplus:
        what = (
            f"nothing for {', '.join(lacking)}" if lacking else f"no input for argument {', '.join(surplus)}"
        )
        raise SpecError(
            f"KernelSpec {spec.name} with inputs ({', '.join(spec.inputs)}) does not fit captured "
            f"{call.kind} {call.key} ({describe(call)}): {what}; give the spec a `bind`"
        )
    return found


def _same_name(recorded: str, wanted: str, kind: str) -> bool:
    if recorded == wanted:
        return True
    if kind == "launch":
        return recorded.casefold().removesuffix("_ptr").removesuffix("ptr") == wanted.casefold()
    return recorded.rpartition(".")[2] == wanted and not recorded.rpartition(".")[2].isdigit()


def describe(call: Call) -> str:
    """The call's tensors, for an error message."""
    parts = [f"argument {r.name} {r.dtype}{list(r.shape)}" for r in call.inputs]
    parts += [f"parameter {r.name} {r.dtype}{list(r.shape)}" for r in call.params]
    return ", ".join(parts) or "no tensors"


def bind_attrs(
    call: Call, spec: KernelSpec, notes: list[str], *, known: Collection[str] = ()
) -> dict[str, Any]:
    """The run's values for the spec's attrs; where it recorded none, the spec's own, with a note.

    Those that are `known` are left out.
    """
    values: dict[str, Any] = {}
    for name, default in spec.attrs.items():
        if name in known:
            continue
        for key in (name, *_ALIASES.get(name, ())):
            if key in call.attrs:
                values[name] = call.attrs[key]
                break
        else:
            values[name] = default
            notes.append(f"{name} was not recorded: {default!r} of the spec is used")
    return values
