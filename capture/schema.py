"""What an operator's schema says about it, and what it leaves out. Looked up once per operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

#: Namespaces whose operators fill their outputs later, on another thread or stream.
_ASYNC = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

#: Operators that write arguments although their schema declares no mutation: argument names.
_UNDECLARED_WRITES = {
    "c10d::allreduce_": ("tensors",),
    "c10d::allreduce_coalesced_": ("tensors",),
    "c10d::broadcast_": ("tensors",),
    "c10d::reduce_": ("tensors",),
    "c10d::allgather_": ("output_tensors",),
    "c10d::_allgather_base_": ("output_tensor",),
    "c10d::allgather_coalesced_": ("output_lists",),
    "c10d::allgather_into_tensor_coalesced_": ("outputs",),
    "c10d::reduce_scatter_": ("output_tensors",),
    "c10d::_reduce_scatter_base_": ("output_tensor",),
    "c10d::reduce_scatter_tensor_coalesced_": ("outputs",),
    "c10d::gather_": ("output_tensors",),
    "c10d::scatter_": ("output_tensors",),
    "c10d::alltoall_": ("output_tensors",),
    "c10d::alltoall_base_": ("output",),
    "c10d::recv_": ("tensors",),
    "c10d::recv_any_source_": ("tensors",),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
}

#: Collectives whose result depends on what was in the arguments that they write.
_READ_TOO = ("allreduce", "broadcast", "reduce_")

#: Views and bookkeeping that compute nothing; their results share the memory they came from.
_SILENT = frozenset(
    (
        "aten::_unsafe_view",
        "aten::_reshape_alias",
        "aten::lift_fresh",
        "aten::resize_",
        "aten::set_",
        "aten::record_stream",
        "aten::_version",
        "aten::is_same_size",
        "aten::sym_size",
        "aten::sym_stride",
        "aten::sym_numel",
        "prim::device",
        "profiler::_record_function_enter",
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
        "_c10d_functional::_wrap_tensor_autograd",
    )
)

#: Views whose gradient is a view as well.
_RESHAPES = frozenset(
    ("aten::view", "aten::view_as", "aten::_unsafe_view", "aten::_reshape_alias", "aten::t",
     "aten::transpose", "aten::permute", "aten::unsqueeze", "aten::squeeze", "aten::detach", "aten::alias")
)  # fmt: skip

#: Higher-order operators that are functions of their tensors and nothing else.
_PURE_HIGHER_ORDER = frozenset(
    ("cond", "while_loop", "scan", "associative_scan", "map", "flex_attention", "flex_attention_backward")
)

#: Their results hold whatever was in the memory.
_UNINITIALISED = frozenset(
    ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
     "aten::empty_permuted", "aten::empty_quantized", "aten::_empty_affine_quantized")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OpInfo:
    """One operator.

    name: "aten::mm.default".  short: "mm".  base: "aten::mm".  names: all three, for patterns.
    silent: not worth a call (views, allocations, profiler marks).
    reshapes: a silent one whose backward computes nothing either.
    allocates: its results hold whatever was in the memory before.
    arguments: argument names in the schema's order, positional ones first.
    writes: names of the arguments it writes.
    fills: those of them whose earlier bytes do not matter to it.
    partial: it fills only a part of the memory that it returns, and returns that part first.
    deferred: its results are not there yet when it returns.
    waits: it hands out what a deferred operator left behind.
    opaque: what it runs inside is not seen, and may write what it was given.
    random: it draws from a generator.
    replayable: it can be called again from its recorded arguments.
    """

    name: str
    base: str
    short: str
    names: tuple[str, ...]
    silent: bool = False
    reshapes: bool = False
    allocates: bool = False
    arguments: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    fills: tuple[str, ...] = ()
    partial: bool = False
    deferred: bool = False
    waits: bool = False
    opaque: bool = False
    random: bool = False
    replayable: bool = True


#: By identity, since an operator's own hash is a Python call; it is kept, so that its id stays its own.
_KNOWN: dict[int, tuple[OpInfo, Any]] = {}


def op_info(func: Any) -> OpInfo:
    """Facts about an operator or higher-order operator."""
    found = _KNOWN.get(id(func))
    if found is None:
        found = _KNOWN[id(func)] = (_describe(func), func)
    return found[0]


def _describe(func: Any) -> OpInfo:
    if not isinstance(func, torch._ops.OpOverload):
        name = str(getattr(func, "__name__", func))
        full = f"higher_order::{name}"
        opaque = name not in _PURE_HIGHER_ORDER
        return OpInfo(name=full, base=full, short=name, names=(full, name), opaque=opaque, replayable=False)
    schema = func._schema
    base = schema.name
    namespace, short = base.split("::", 1)
    writes = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    writes = _UNDECLARED_WRITES.get(base, writes)
    waits = short == "wait_tensor"
    deferred = namespace in _ASYNC and not waits
    full = f"{base}.{schema.overload_name or 'default'}"
    return OpInfo(
        name=full,
        base=base,
        short=short,
        names=(full, base, short),
        allocates=base in _UNINITIALISED,
        reshapes=base in _RESHAPES,
        silent=base in _SILENT or base in _UNINITIALISED or (func.is_view and not writes),
        arguments=tuple(a.name for a in schema.arguments),
        writes=writes,
        fills=_fills(schema, base, short, writes),
        partial=base == "fsdp::all_gather_copy_in",
        deferred=deferred,
        waits=waits,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        replayable=namespace not in _ASYNC and namespace not in ("fsdp", "profiler"),
    )


def _fills(schema: Any, base: str, short: str, writes: tuple[str, ...]) -> tuple[str, ...]:
    if base in _UNDECLARED_WRITES:
        return () if short.startswith(_READ_TOO) else writes
    return tuple(a.name for a in schema.arguments if a.is_out)
