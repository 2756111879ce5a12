"""The calls of one run as numpy columns, so that 100,000 of them are compared without a Python loop.

Strings become numbers of a pool that both runs share; equal numbers mean equal strings.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bridge.capture.layout import memory_order
from bridge.capture.record import Call, Digest, TensorRecord

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

KINDS = ("op", "module", "launch")
PHASES = ("forward", "recompute", "backward", "optimizer", "other")

#: Roles of a call's tensors; the first three are read, the last two written.
INPUT, PARAM, GRAD_OUTPUT, OUTPUT, GRAD_INPUT = range(5)
ROLES = ("input", "param", "grad_output", "output", "grad_input")


class Pool:
    """Numbers for hashable things (strings, signatures), given out in order of first sight."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, item: Any) -> int:
        return self._numbers.setdefault(item, len(self._numbers))

    def numbers(self, items: Iterable[Any]) -> Ints:
        items, known = list(items), self._numbers
        for item in dict.fromkeys(items):
            known.setdefault(item, len(known))
        return np.fromiter(map(known.__getitem__, items), np.int64, len(items))

    def items(self) -> tuple[Any, ...]:
        return tuple(self._numbers)


@dataclass(frozen=True, slots=True)
class Tensors:
    """One row per tensor use. `start[i]:start[i + 1]` are the rows of call i; NaN: not known."""

    start: Ints
    call: Ints
    role: Ints
    dtype: Ints  #: pool
    shape: Ints  #: pool of tuples
    numel: Floats
    count: Floats
    sum: Floats
    abs_sum: Floats
    sq_sum: Floats
    min: Floats
    max: Floats
    nonfinite: Ints
    hash: npt.NDArray[np.uint64]  #: 0: unknown; of the elements as they lie in memory
    order: Ints  #: pool of memory orders; hashes of one shape compare where these agree
    known: Bools  #: has a digest
    producer: Ints  #: position of the producing call; -1: from outside the step, or unknown
    stored: Bools
    void: Bools  #: no content that matters: unwritten memory, or what the call overwrites unread


@dataclass(frozen=True, slots=True)
class Columns:
    """One row per call, in the order of `calls`."""

    calls: Sequence[Call]
    pool: Pool
    key: Ints
    op: Ints
    module: Ints
    module_class: Ints
    phase: Ints  #: number in PHASES
    kind: Ints  #: number in KINDS
    rank: Ints
    step: Ints
    microbatch: Ints
    index: Ints
    signature: Ints  #: pool: shapes and dtypes of the outputs
    shapes: Ints  #: pool: shapes of the outputs
    input_shapes: Ints  #: pool: shapes of the inputs
    first_shape: Ints  #: pool: shape of the first output; -1: none
    parent: Ints  #: index of the call that this one ran inside; -1: none
    reads: Tensors
    writes: Tensors

    def __len__(self) -> int:
        return len(self.key)

    def text(self, number: int) -> str:
        return str(self.pool.items()[number])


#: Ops that write their first argument without reading it.
_OVERWRITES = dict.fromkeys(
    """copy_ fill_ zero_ uniform_ normal_ bernoulli_ exponential_ random_ set_ resize_ _allgather_base_
    all_gather_copy_in""".split(),
    0,
)


def short_op(op: str) -> str:
    """Give "mm" for "aten::mm.default" and for "mm"."""
    return op.rsplit("::", 1)[-1].split(".", 1)[0]


def _is_empty(op: str) -> bool:
    return short_op(op).removeprefix("new_").startswith("empty")


_EMPTY = Digest(
    count=0,
    sum=np.nan,
    abs_sum=np.nan,
    sq_sum=np.nan,
    min=None,
    max=None,
    nan=0,
    pos_inf=0,
    neg_inf=0,
    hash="",
)


def _by_name(records: tuple[TensorRecord, ...]) -> tuple[TensorRecord, ...]:
    return tuple(sorted(records, key=lambda record: record.name))


def reads_of(call: Call) -> tuple[TensorRecord, ...]:
    """What a call reads, in the order of the columns: a module's parameters and gradients by name.

    Autograd makes gradients in an order of its own, which differs between implementations.
    """
    if call.kind != "module":
        return call.inputs
    return call.inputs + _by_name(call.params) + _by_name(call.grad_outputs)


def writes_of(call: Call) -> tuple[TensorRecord, ...]:
    """What a call writes, in the order of the columns."""
    return call.outputs if call.kind != "module" else call.outputs + _by_name(call.grad_inputs)


def columns(calls: Sequence[Call], pool: Pool) -> Columns:
    """Turn calls into columns; `pool` is shared by the two runs that are to be compared."""
    # Millions of short-lived objects and no cycles: the collector would cost more than the work.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _columns(calls, pool)
    finally:
        if collecting:
            gc.enable()


def _columns(calls: Sequence[Call], pool: Pool) -> Columns:
    kind_number = {name: number for number, name in enumerate(KINDS)}
    phase_number = {name: number for number, name in enumerate(PHASES)}
    index = np.array([call.index for call in calls], np.int64)
    rank = np.array([call.rank for call in calls], np.int64)
    step = np.array([call.step for call in calls], np.int64)
    reads = [reads_of(call) for call in calls]
    writes = [writes_of(call) for call in calls]
    read_roles = [
        (INPUT,) * len(call.inputs) + (PARAM,) * len(call.params) + (GRAD_OUTPUT,) * len(call.grad_outputs)
        for call in calls
        if call.kind == "module"
    ]
    write_roles = [
        (OUTPUT,) * len(call.outputs) + (GRAD_INPUT,) * len(call.grad_inputs)
        for call in calls
        if call.kind == "module"
    ]
    kind = np.array([kind_number[call.kind] for call in calls], np.int64)
    ops = dict.fromkeys(call.op for call in calls)
    overwrites = {op: _OVERWRITES.get(short_op(op), -1) for op in ops}
    unwritten = {op: 0 if _is_empty(op) else -1 for op in ops}
    shapes = [tuple([record.shape for record in call.outputs]) for call in calls]
    dtypes = [tuple([record.dtype for record in call.outputs]) for call in calls]
    return Columns(
        calls=calls,
        pool=pool,
        key=pool.numbers([call.key for call in calls]),
        op=pool.numbers([call.op for call in calls]),
        module=pool.numbers([call.module for call in calls]),
        module_class=pool.numbers([call.module_class for call in calls]),
        phase=np.array([phase_number[call.phase] for call in calls], np.int64),
        kind=kind,
        rank=rank,
        step=step,
        microbatch=np.array([call.microbatch for call in calls], np.int64),
        index=index,
        signature=pool.numbers(zip(shapes, dtypes, strict=True)),
        shapes=pool.numbers(shapes),
        input_shapes=pool.numbers([("in", *[record.shape for record in call.inputs]) for call in calls]),
        first_shape=np.array([pool.number(each[0]) if each else -1 for each in shapes], np.int64),
        parent=np.array([-1 if call.parent is None else call.parent for call in calls], np.int64),
        reads=_tensors(
            calls,
            reads,
            [overwrites[call.op] for call in calls],
            read_roles,
            kind,
            INPUT,
            rank,
            step,
            index,
            pool,
        ),
        writes=_tensors(
            calls,
            writes,
            [unwritten[call.op] for call in calls],
            write_roles,
            kind,
            OUTPUT,
            rank,
            step,
            index,
            pool,
        ),
    )


def _tensors(
    calls: Sequence[Call],
    lists: list[tuple[TensorRecord, ...]],
    voids: list[int],
    module_roles: list[tuple[int, ...]],
    kind: Ints,
    default_role: int,
    rank: Ints,
    step: Ints,
    index: Ints,
    pool: Pool,
) -> Tensors:
    counts = np.array([len(records) for records in lists], np.int64)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    call = np.repeat(np.arange(len(lists)), counts)
    flat = [record for records in lists for record in records]
    role = np.full(len(flat), default_role, np.int64)
    role[(kind == KINDS.index("module"))[call]] = [number for roles in module_roles for number in roles]
    # Distinct contents and layouts are far fewer than uses: look at each once.
    digest_of = {id(record.digest): record.digest for record in flat}
    numbers = {key: number for number, key in enumerate(digest_of)}
    content = np.fromiter((numbers[id(record.digest)] for record in flat), np.int64, len(flat))
    digests = [digest or _EMPTY for digest in digest_of.values()]
    nan = np.nan

    def figures(values: list[Any], kind: Any = np.float64) -> Any:
        return np.array(values, kind)[content] if len(flat) else np.zeros(0, kind)

    layouts = [(record.dtype, record.shape, record.stride) for record in flat]
    known_layouts = dict.fromkeys(layouts)
    place = {layout: number for number, layout in enumerate(known_layouts)}
    layout = np.fromiter(map(place.__getitem__, layouts), np.int64, len(flat))

    def facts(values: list[Any], kind: Any = np.int64) -> Any:
        return np.array(values, kind)[layout] if len(flat) else np.zeros(0, kind)

    producers = np.array([-1 if record.producer is None else record.producer for record in flat], np.int64)
    return Tensors(
        start=start,
        call=call,
        role=role,
        dtype=facts([pool.number(dtype) for dtype, _, _ in known_layouts]),
        shape=facts([pool.number(shape) for _, shape, _ in known_layouts]),
        numel=facts([math.prod(shape) for _, shape, _ in known_layouts], np.float64),
        count=figures([digest.count for digest in digests]),
        sum=figures([digest.sum for digest in digests]),
        abs_sum=figures([digest.abs_sum for digest in digests]),
        sq_sum=figures([digest.sq_sum for digest in digests]),
        min=figures([nan if digest.min is None else digest.min for digest in digests]),
        max=figures([nan if digest.max is None else digest.max for digest in digests]),
        nonfinite=figures([digest.nan + digest.pos_inf + digest.neg_inf for digest in digests], np.int64),
        hash=figures([int(digest.hash, 16) or 1 if digest.hash else 0 for digest in digests], np.uint64),
        order=facts([_order(shape, stride, pool) for _, shape, stride in known_layouts]),
        known=figures([digest is not _EMPTY for digest in digests], bool),
        producer=_positions(producers, call, rank, step, index),
        stored=np.array([record.blob is not None for record in flat], bool),
        void=(np.arange(len(flat)) - start[call] == np.array(voids, np.int64)[call])
        | np.array([record.name == "out" for record in flat], bool)
        | _fresh(calls, lists, start),
    )


def _fresh(calls: Sequence[Call], lists: list[tuple[TensorRecord, ...]], start: Ints) -> Bools:
    """Outputs that a launch was given memory for, which nothing has written before."""
    fresh = np.zeros(int(start[-1]), bool)
    for at, call in enumerate(calls):
        if call.kind == "launch" and call.mutated:
            for place, record in enumerate(lists[at]):
                fresh[int(start[at]) + place] = record.producer is None and record.name in call.mutated
    return fresh


def _order(shape: tuple[int, ...], stride: tuple[int, ...], pool: Pool) -> int:
    return pool.number(("order", memory_order(shape, stride) if len(shape) == len(stride) else ()))


def _positions(producers: Ints, call: Ints, rank: Ints, step: Ints, index: Ints) -> Ints:
    """Position of the call with each producer's index in the same rank and step; -1: none."""
    if not len(producers):
        return producers
    width = int(max(index.max(), producers.max())) + 2
    place = (rank * (int(step.max()) + 1) + step) * width
    order = np.argsort(place + index, kind="stable")
    sought = place[call] + producers
    found = np.minimum(np.searchsorted((place + index)[order], sought), len(order) - 1)
    position = order[found]
    return np.where((producers >= 0) & ((place + index)[position] == sought), position, -1)


def take(tensors: Tensors, call: int) -> range:
    """Rows of one call."""
    return range(int(tensors.start[call]), int(tensors.start[call + 1]))


def inner_calls(columns: Columns) -> Ints:
    """Per call the position of the call that it ran inside of and whose outputs it made; -1: none.

    A custom op is followed by the kernel launches that do its work, a wrapper's op by the local one.
    """
    writes = columns.writes
    outer = np.full(len(columns), -1, np.int64)
    rows = (writes.producer >= 0) & (writes.producer != writes.call)
    rows &= (columns.kind[writes.call] != KINDS.index("module")) & (writes.role == OUTPUT)
    outer[writes.producer[rows]] = writes.call[rows]
    return outer


def owners(columns: Columns) -> dict[int, int]:
    """Per call that no module is known of (a custom backward), the module call whose gradients it made."""
    writes = columns.writes
    found: dict[int, int] = {}
    outer = inner_calls(columns)
    rows = np.flatnonzero((writes.role == GRAD_INPUT) & (writes.producer >= 0))
    for row in rows.tolist():
        module, maker = int(writes.call[row]), int(writes.producer[row])
        for call in (maker, int(outer[maker])):
            known = found.get(call)
            if call >= 0 and (known is None or _depth(columns, module) > _depth(columns, known)):
                found[call] = module
    return found


def _depth(columns: Columns, call: int) -> int:
    return len(columns.calls[call].module)


def combined_hash(tensors: Tensors, calls: int) -> npt.NDArray[np.uint64]:
    """Per call one number from the hashes of its tensors in order; 0: unknown or none."""
    place = (np.arange(len(tensors.call)) - tensors.start[tensors.call]).astype(np.uint64)
    mixed = tensors.hash ^ (place * np.uint64(0x9E3779B97F4A7C15))
    mixed ^= tensors.order.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(29)
    total = np.zeros(calls, np.uint64)
    np.add.at(total, tensors.call, mixed)
    unknown = np.zeros(calls, bool)
    unknown[tensors.call[tensors.hash == 0]] = True
    unknown |= np.diff(tensors.start) == 0
    total[unknown] = 0
    return total
